"""KernelBench's own formats: names in a run folder, and the entries of its `eval_results.json`. Pure.

A run folder holds `level_{L}_problem_{P}_sample_{S}_kernel.py`; `eval_results.json` maps `"P"` to a list of entries
for the samples of one level. Times in it are milliseconds, −1.0 where nothing was timed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.problems.cases import workload_lines
from kbrl_async.kernels.problems.sources.folder import kernelbench_root
from protocols.records import Fault

KERNEL_FILE = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py")
EVAL_FILE = "eval_results.json"
_BUILD_FAULTS = frozenset({Fault.FORMAT_ERROR, Fault.STATIC_VIOLATION, Fault.COMPILE_ERROR})


class GeneratedSample(msgspec.Struct, frozen=True, order=True):
    """One generated kernel."""

    level: int
    problem: int
    """KernelBench's `problem_id`, counted from 1 within its level."""
    sample: int
    path: str


class SampleOutcome(msgspec.Struct, frozen=True):
    """What became of a sample. Exactly one of `result` and `error` is filled."""

    level: int
    problem: int
    sample: int
    key: str
    """Hash of all that the result follows from: where it differs, the sample is verified again."""
    result: Result | None = None
    error: str = ""
    """Why there is no verdict: a missing problem, or a fault of the host."""


def samples(folder: Path) -> list[GeneratedSample]:
    """The kernels of a run folder in the order of level, problem and sample.

    :raises UserError: it is no folder, or holds none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "Give a KernelBench run folder")
    found = [(KERNEL_FILE.fullmatch(path.name), path) for path in folder.iterdir()]
    listed = [GeneratedSample(int(m[1]), int(m[2]), int(m[3]), str(path)) for m, path in found if m]
    if not listed:
        raise UserError(f"{folder} holds no level_L_problem_P_sample_S_kernel.py", "Give a KernelBench run folder")
    return sorted(listed)


def problems_root(given: str, environment: MutableMapping[str, str]) -> str:
    """Where the problems lie: `given`, else the checkout that is named or found; or its `KernelBench` folder.

    :raises UserError: nothing was said, or there is no `level1` … there.
    """
    root = given or kernelbench_root(environment)
    if not root:
        raise UserError("a run folder says only numbers of problems", "Give --problems DIR or set KERNELBENCH_ROOT")
    for path in (Path(root).expanduser(), Path(root).expanduser() / "KernelBench"):
        if any(path.glob("level*/*.py")):
            return str(path)
    raise UserError(f"{root} holds no level*/*.py", "Point --problems or KERNELBENCH_ROOT at a KernelBench checkout")


def eval_results(outcomes: Iterable[SampleOutcome]) -> dict[str, list[dict[str, Any]]]:
    """The content of `eval_results.json`; what has no verdict is left out."""
    table: dict[str, list[dict[str, Any]]] = {}
    for outcome in sorted(outcomes, key=lambda o: (o.problem, o.sample)):
        if outcome.result is not None:
            table.setdefault(str(outcome.problem), []).append(_entry(outcome.sample, outcome.result))
    return table


def by_level(outcomes: Sequence[SampleOutcome]) -> dict[int, list[SampleOutcome]]:
    levels: dict[int, list[SampleOutcome]] = {}
    for outcome in outcomes:
        levels.setdefault(outcome.level, []).append(outcome)
    return dict(sorted(levels.items()))


def _entry(sample: int, result: Result) -> dict[str, Any]:
    timing = result.timing
    stats: dict[str, Any] = {}
    if timing is not None:
        place = {"hardware": timing.hardware, "device": result.device}
        stats = {"mean": timing.candidate_ms, "num_trials": timing.n, **place}
    return {
        "sample_id": sample,
        "compiled": result.compiled,
        "correctness": result.ok,
        "metadata": metadata_of(result),
        "runtime": -1.0 if timing is None else timing.candidate_ms,
        "runtime_stats": stats,
    }


def metadata_of(result: Result) -> dict[str, Any]:
    verdict = result.verdict
    data: dict[str, Any] = {"verifier": "kbrl-async", "fault": verdict.fault.value, "device": result.device}
    if result.timing is not None:
        data["hardware"] = result.timing.hardware
        data["speedup"] = [result.timing.speedup, result.timing.lo, result.timing.hi]
    if verdict.total:
        data["correctness_trials"] = f"({verdict.passed} / {verdict.total})"
    if verdict.workloads:
        data["workloads"] = list(workload_lines(verdict, result.timing))
    if verdict.max_abs_error is not None:
        data["max_difference"] = [f"{verdict.max_abs_error:.6f}"]
    if verdict.rule:
        data["rule"] = verdict.rule
    if verdict.fault in _BUILD_FAULTS:
        data |= {"compilation_error_name": verdict.fault.value, "compilation_error": verdict.message}
    elif verdict.fault is Fault.INCORRECT:
        data |= {"correctness_issue": "Output mismatch", "correctness_issue_detail": verdict.message}
    elif verdict.fault is not Fault.OK:
        data |= {"runtime_error_name": verdict.fault.value, "runtime_error": verdict.message}
    return data
