"""What an evaluation leaves: `evaluation.json`, KernelBench's files, TensorBoard, and at last `summary.json`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import RunError
from kbrl_async.evaluation import document, show
from kbrl_async.evaluation.course import Course
from kbrl_async.evaluation.document import Document
from kbrl_async.evaluation.metrics import values_k
from kbrl_async.kernels.kernelbench import analysis
from kbrl_async.kernels.kernelbench.files import (
    BASELINE_FILE,
    Baselines,
    KernelFile,
    baselines_of,
    file_name,
    numbers,
    write_baselines,
    write_run_folders,
)
from kbrl_async.runs.config import Config, config_hash
from kbrl_async.runs.folder import SUMMARY_FILE
from kbrl_async.runs.telemetry.tensorboard import Writer
from protocols.records import Problem

KERNELBENCH = "kernelbench"


def write_all(run_dir: Path, config: Config, course: Course, policy: dict[str, Any]) -> None:
    """Everything again from the course, so that a crash in the middle costs nothing.

    :raises RunError: not one sample has a verdict.
    """
    if not course.kept:
        reasons = ", ".join(f"{n} × {reason}" for reason, n in Counter(course.lost.values()).items())
        raise RunError(f"no sample has a verdict ({reasons})", f"See {run_dir / 'logs'}; evaluate again with name=…")
    found = write_kernelbench(run_dir / KERNELBENCH, course)
    made = msgspec.structs.replace(build(config, course, policy), kernelbench=found)
    document.write(run_dir / document.FILE, made)
    settings = config.evaluation
    folder = Path(settings.tensorboard_log_dir) if settings.tensorboard_log_dir else run_dir / "tensorboard" / "eval"
    step = settings.tensorboard_step
    with Writer(folder) as writer:  # all figures at one step, so that evaluations of several versions make a curve
        writer.scalars(show.scalars(made), step if step is not None else int(policy.get("version") or 0))
        writer.flush()
    summary = {
        "kind": made.kind,
        "run": run_dir.name,
        "policy": made.policy,
        "file": document.FILE,
        "overall": msgspec.to_builtins(made.overall),
    }
    write_atomically(
        run_dir / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
    )


def build(config: Config, course: Course, policy: dict[str, Any]) -> Document:
    settings = config.evaluation
    return document.build(
        [kept.sample for kept in course.kept.values()],
        policy=policy,
        settings={
            "samples": settings.samples,
            "temperature": config.temperature if settings.temperature is None else settings.temperature,
            "max_tokens": config.max_tokens,
            "mode": config.mode,
            "turns": 1 if config.mode == "single_turn" else config.max_turns,
            "backend": config.backend,
            "problems": config.problems or "suite",
            "prompt": config.prompt.option,
            "index": config.prompt.index,
            "deadline_s": settings.deadline_s,
            "config_hash": config_hash(config),
        },
        lost=dict(Counter(course.lost.values())),
        seconds=course.clock,
        created_at=time.time(),
    )


def write_kernelbench(folder: Path, course: Course) -> dict[str, dict[str, Any]]:
    """A run folder for each level, and the reference times; what their analysis says of them, by level."""
    problems = list(course.problems.values())
    known = numbers(problems)
    answers = [
        KernelFile(msgspec.structs.replace(kept.outcome, problem=known[kept.sample.problem_id]), kept.source)
        for _, kept in sorted(course.kept.items())
    ]
    write_run_folders(folder, answers, values_k([kept.sample for kept in course.kept.values()]))
    times = baselines_of(answers, problems)
    write_baselines(folder / BASELINE_FILE, times)
    return {
        str(level): msgspec.to_builtins(_analysed(folder, level, problems, known, times))
        for level in sorted({answer.outcome.level for answer in answers})
    }


def _analysed(
    folder: Path, level: int, problems: Sequence[Problem], known: Mapping[str, int], times: Baselines
) -> analysis.Analysis:
    names = {known[p.problem_id]: file_name(p, known[p.problem_id]) for p in problems if p.level == level}
    return analysis.analyse(analysis.read(folder / f"level{level}"), names, times[f"level{level}"], level)
