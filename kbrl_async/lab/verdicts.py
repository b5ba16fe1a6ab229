"""Verdicts as a data set: sources, what was found, times, licences; JSONL or Parquet that `datasets` reads.

::

    RUN/rollouts.sqlite, SERVICE/jobs.sqlite ─▶ one row a candidate, of one type a column ─▶ FILE.jsonl | FILE.parquet

Invariants
* A row is a candidate with a verdict. What the infrastructure lost is no row: nothing is known of it (I4).
* The file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import CheckpointError, MissingTool, ProblemError, UserError
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.problems.cases import workload_lines
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.rollouts.rewards.parts import is_built
from kbrl_async.runs.archive.archive import FILE as ARCHIVE
from kbrl_async.runs.archive.archive import ArchiveReader
from kbrl_async.runs.archive.rows import TurnRow
from kbrl_async.serving.documents import Job, reward_for
from kbrl_async.serving.journal import FILE as JOBS
from kbrl_async.serving.journal import read_jobs
from protocols.records import Timing, Verdict
from protocols.rollout import Record

SUFFIXES = (".jsonl", ".parquet")
BATCH = 512
OURS = "Apache-2.0"
"""Of the suite's problems, which are part of this project."""
UNKNOWN = "unknown"


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate. Times are milliseconds; a speedup is reference over candidate."""

    run: str
    id: str
    problem_id: str
    level: int
    reference: str
    """Source of the problem."""
    problem_licence: str
    backend: str
    kernel: str
    """Source of the candidate."""
    author: str
    """The policy that wrote it and its version, or the service's client."""
    kernel_licence: str = UNKNOWN
    """What the author's model allows; nobody here knows."""
    fault: str
    rule: str
    message: str
    compiled: bool
    correct: bool
    passed: int
    total: int
    trust: str
    reward: float | None
    speedup: float | None
    speedup_lo: float | None
    speedup_hi: float | None
    candidate_ms: float | None
    reference_ms: float | None
    pairs: int | None
    workloads: list[str]
    """How each ended, of a problem with several: name, sets passed, speedup with its interval."""
    hardware: str
    purpose: str
    turn: int
    at: float
    """Epoch seconds."""


def export_verdicts(sources: Sequence[Path], target: Path) -> int:
    """Writes the verdicts of these run and service folders; returns how many there are.

    :raises UserError: the file's ending is not known.
    :raises CheckpointError: a folder holds none.
    :raises MissingTool: Parquet, and pyarrow is not installed.
    """
    if target.suffix not in SUFFIXES:
        raise UserError(f"{target} is neither JSONL nor Parquet", f"Choose an ending: {', '.join(SUFFIXES)}")
    rows = itertools.chain.from_iterable(map(rows_of, sources))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    try:
        count = _jsonl(rows, fresh) if target.suffix == ".jsonl" else _parquet(rows, fresh)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return count


def rows_of(folder: Path) -> Iterator[VerdictRow]:
    """:raises CheckpointError: it is neither a run with an archive nor a service."""
    if (folder / JOBS).is_file():
        yield from filter(None, (of_job(folder.name, job) for job in read_jobs(folder / JOBS)))
        return
    if not (folder / ARCHIVE).is_file():
        raise CheckpointError(f"{folder} holds no verdicts", "Give a run's folder, or a service's")
    with ArchiveReader(folder / ARCHIVE) as archive:
        for row in archive.rows():
            record = archive.record(row.task_id)
            if record is not None and record.is_scorable and record.candidate is not None:
                yield of_record(folder.name, row, record)


def of_record(run: str, row: TurnRow, record: Record) -> VerdictRow:
    problem = record.request.problem
    return VerdictRow(
        run=run,
        id=row.task_id,
        problem_id=problem.problem_id,
        level=problem.level,
        reference=problem.source,
        problem_licence=_licence(problem.source),
        backend=record.request.backend,
        kernel=record.source,
        author=f"{run} v{row.policy_version}",
        compiled=bool(is_built(record)),
        reward=row.reward,
        purpose=row.purpose,
        turn=row.turn,
        at=row.at,
        **of_verdict(record.verdict, record.timing),
        **_of_timing(record.timing),
    )


def of_job(run: str, job: Job) -> VerdictRow | None:
    """None where there is no verdict."""
    result: Result | None = job.outcome.result if job.outcome is not None else None
    if result is None:
        return None
    reference = job.ask.reference or _source(result.problem_id)
    return VerdictRow(
        run=run,
        id=job.id,
        problem_id=result.problem_id,
        level=_level(result.problem_id),
        reference=reference,
        problem_licence=_licence(reference),
        backend=result.backend,
        kernel=job.ask.candidate,
        author=job.client,
        compiled=result.compiled,
        reward=reward_for(job.ask, result),
        purpose="service",
        turn=0,
        at=job.finished_at,
        **of_verdict(result.verdict, result.timing),
        **_of_timing(result.timing),
    )


def of_verdict(v: Verdict, t: Timing | None) -> dict[str, Any]:
    said = {
        "fault": v.fault.value,
        "rule": v.rule,
        "message": v.message,
        "trust": v.trust,
        "workloads": list(workload_lines(v, t)),
    }
    return {**said, "correct": v.fault == "ok", "passed": v.passed, "total": v.total}


def _of_timing(t: Timing | None) -> dict[str, Any]:
    if t is None:
        names = ("speedup", "speedup_lo", "speedup_hi", "candidate_ms", "reference_ms", "pairs")
        return {**dict.fromkeys(names), "hardware": ""}
    times = {"candidate_ms": t.candidate_ms, "reference_ms": t.reference_ms, "pairs": t.n, "hardware": t.hardware}
    return {"speedup": t.speedup, "speedup_lo": t.lo, "speedup_hi": t.hi, **times}


@cache
def _suite() -> dict[str, str]:
    """Sources in both sizes, and the id of each."""
    return {problem.source: problem.problem_id for shapes in ("cpu", "gpu") for problem in load_suite(shapes=shapes)}


def _licence(source: str) -> str:
    """As the problem declares it; of the suite's, the project's."""
    if source in _suite():
        return OURS
    try:
        return declared(source).license or UNKNOWN
    except (ProblemError, SyntaxError):
        return UNKNOWN


def _source(problem_id: str) -> str:
    return next((source for source, known in _suite().items() if known == problem_id), "")


def _level(problem_id: str) -> int:
    digits = problem_id.partition("/")[0].removeprefix("L")
    return int(digits) if digits.isdigit() else 0


def _jsonl(rows: Iterator[VerdictRow], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")
            count += 1
    return count


def _parquet(rows: Iterator[VerdictRow], path: Path) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        cure = "pip install 'kbrl-async[retrieval]', or write FILE.jsonl"
        raise MissingTool("Parquet needs pyarrow, and it is not installed", cure) from None
    kinds = {"str": pyarrow.string(), "int": pyarrow.int64(), "bool": pyarrow.bool_(), "float": pyarrow.float64()}
    named = {name: str(kind).partition(" ")[0] for name, kind in VerdictRow.__annotations__.items()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in named.items()])
    count = 0
    with contextlib.closing(parquet.ParquetWriter(path, schema)) as writer:
        while batch := [msgspec.to_builtins(row) for row in itertools.islice(rows, BATCH)]:
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return count
