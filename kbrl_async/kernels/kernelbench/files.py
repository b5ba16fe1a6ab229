"""KernelBench's files written and read: kernels and results of a run folder, pass@k, baseline times.

One folder a level, because `eval_results.json` has no level in it::

    kernelbench/level1/level_1_problem_3_sample_0_kernel.py …   eval_results.json   pass_at_k_results.json
    kernelbench/baseline.json                                   {"level1": {"3_name.py": {"mean": ms, …}}}

Times are milliseconds; −1.0 where nothing was measured, which is KernelBench's own sign for it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.kernels.kernelbench.formats import EVAL_FILE, SampleOutcome, by_level, eval_results
from kbrl_async.kernels.problems.finding import number
from protocols.records import Problem

CHANCES_FILE = "pass_at_k_results.json"
BASELINE_FILE = "baseline.json"
NOT_TIMED = -1.0


class KernelFile(msgspec.Struct, frozen=True):
    """One answer with its kernel; empty `source`: there was none."""

    outcome: SampleOutcome
    source: str


class Baseline(msgspec.Struct, frozen=True):
    """One problem's reference time."""

    mean: float
    std: float = 0.0
    min: float = NOT_TIMED
    max: float = NOT_TIMED
    num_trials: int = 0
    hardware: str = ""
    device: str = ""


Baselines = Mapping[str, Mapping[str, Baseline]]
"""By `level1`, and within it by the problem file's name."""


def numbers(problems: Iterable[Problem]) -> dict[str, int]:
    """KernelBench's number of each problem: the one its name starts with, else the next one free in its level."""
    found: dict[str, int] = {}
    taken: dict[int, set[int]] = {}
    listed = list(problems)
    for problem in sorted(listed, key=lambda p: number(p) is None):
        used = taken.setdefault(problem.level, set())
        wanted = number(problem)
        chosen = wanted if wanted is not None and wanted not in used else max(used, default=0) + 1
        used.add(chosen)
        found[problem.problem_id] = chosen
    return found


def file_name(problem: Problem, problem_number: int) -> str:
    """The name of a problem's file, which begins with its number."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", problem.name)
    return f"{name}.py" if number(problem) == problem_number else f"{problem_number}_{name}.py"


def write_run_folders(folder: Path, answers: Sequence[KernelFile], k_values: Sequence[int]) -> list[Path]:
    """One run folder a level; returns them. Results of an earlier writing are replaced."""
    folders = []
    sources = {(a.outcome.level, a.outcome.problem, a.outcome.sample): a.source for a in answers}
    for level, outcomes in by_level([answer.outcome for answer in answers]).items():
        place = folder / f"level{level}"
        place.mkdir(parents=True, exist_ok=True)
        for o in outcomes:
            if source := sources[o.level, o.problem, o.sample]:
                name = f"level_{o.level}_problem_{o.problem}_sample_{o.sample}_kernel.py"
                write_atomically(place / name, source)
        table = eval_results(outcomes)
        _write_json(place / EVAL_FILE, table)
        _write_json(place / CHANCES_FILE, pass_at_k_results(table, k_values))
        folders.append(place)
    return folders


def pass_at_k_results(table: Mapping[str, Sequence[Mapping[str, Any]]], k_values: Sequence[int]) -> dict[str, Any]:
    """The content of `pass_at_k_results.json`; a problem with fewer than k samples has no pass@k."""
    problems: dict[str, dict[str, Any]] = {}
    for problem, entries in table.items():
        n, c = len(entries), sum(bool(e["correctness"] and e["compiled"]) for e in entries)
        chances = {f"pass@{k}": _pass_at_k(n, c, k) for k in k_values if k <= n}
        problems[problem] = {"total_samples": n, "correct_samples": c, **chances}
    averages, counts = {}, {}
    for k in k_values:
        found = [row[f"pass@{k}"] for row in problems.values() if f"pass@{k}" in row]
        averages[f"avg_pass@{k}"] = sum(found) / len(found) if found else 0.0
        counts[f"pass@{k}_count"] = len(found)
    metadata = {
        "total_problems": len(problems),
        "problems_with_samples": sum(row["total_samples"] > 0 for row in problems.values()),
        "total_evaluated_samples": sum(row["total_samples"] for row in problems.values()),
        "total_correct_samples": sum(row["correct_samples"] for row in problems.values()),
        **counts,
    }
    return {"averages": averages, "metadata": metadata, "problems": problems}


def _pass_at_k(n: int, c: int, k: int) -> float:
    missed = 1.0
    for i in range(n - c + 1, n + 1):
        missed *= 1.0 - k / i
    return 1.0 if n - c < k else 1.0 - missed


def baselines_of(answers: Iterable[KernelFile], problems: Iterable[Problem]) -> dict[str, dict[str, Baseline]]:
    """The reference times that were measured beside the answers; every problem has an entry, timed or not."""
    known = numbers(listed := list(problems))
    timings: dict[tuple[int, int], list[Any]] = {}
    for answer in answers:
        result = answer.outcome.result
        if result is not None and result.timing is not None:
            place = (answer.outcome.level, answer.outcome.problem)
            timings.setdefault(place, []).append((result.timing, result.device))
    table: dict[str, dict[str, Baseline]] = {}
    for problem in listed:
        found = timings.get((problem.level, known[problem.problem_id]), [])
        level = table.setdefault(f"level{problem.level}", {})
        level[file_name(problem, known[problem.problem_id])] = _baseline(found)
    return table


def _baseline(found: Sequence[Any]) -> Baseline:
    if not found:
        return Baseline(NOT_TIMED)
    times = [timing.reference_ms for timing, _ in found]
    return Baseline(
        statistics.fmean(times),
        statistics.pstdev(times),
        min(times),
        max(times),
        sum(timing.n for timing, _ in found),
        found[0][0].hardware,
        found[0][1],
    )


def write_baselines(path: Path, table: Baselines) -> None:
    """A file that KernelBench's analysis takes as `baseline_file`."""
    _write_json(path, table)


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=4).decode() + "\n")
