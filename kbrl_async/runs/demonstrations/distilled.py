"""A demonstration set from verified answers that a run or an evaluation holds: the file that `kbrl distill` writes.

::

    RUN/rollouts.sqlite ─ right answers to training problems ─▶ of each the best `keep`, and `keep` repairs ─▶ lines

A line has the answer (`answer`) and what was asked for it (`asked`), the problem, and the time as it was measured. A
repair is an answer of a later turn: what it was asked holds the attempt before it and the feedback on that.

Invariants
* Only kernels that passed every check are taken, and none of a held-out problem, whoever was asked.
* No answer to a problem stands there twice, whichever run it is from.
* The same archives give the same lines in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.kernels.problems.split import HELDOUT
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.archive.rows import TurnRow
from kbrl_async.runs.demonstrations.archives import rank
from protocols.records import VERIFIER


class ProvenAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file. Of a kernel that was not timed the last three are left out."""

    asked: str
    answer: str
    problem: str
    level: int
    backend: str
    turn: int = 0
    """Above 0 for a repair."""
    found_in: str
    """The run and the task of it."""
    speedup: float | None = None
    lo: float | None = None
    hi: float | None = None


class Distilled(msgspec.Struct):
    """What was taken, and why the rest was not."""

    answers: list[ProvenAnswer] = msgspec.field(default_factory=list)
    left_out: Counter[str] = msgspec.field(default_factory=Counter)
    """By reason; wrong answers are counted too."""

    @property
    def problems(self) -> int:
        return len({answer.problem for answer in self.answers})

    @property
    def repairs(self) -> int:
        return sum(answer.turn > 0 for answer in self.answers)


def distil(runs: Sequence[Path], keep: int) -> Distilled:
    """The best `keep` different right answers to each training problem, and as many repairs of it; fastest first among
    equally rewarded ones.

    :raises UserError: a folder holds no archive.
    """
    found, ranked = Distilled(), list[tuple[tuple[str, bool, float, float], Path, TurnRow]]()
    for run in runs:
        if not (run / FILE).is_file():
            raise UserError(f"{run} holds no answers: it has no {FILE}", "Name a folder that train or eval made")
        with ArchiveReader(run / FILE) as archive:
            for row in archive.rows(purpose=None):
                if row.role == VERIFIER:
                    continue
                if row.correct:
                    ranked.append((rank(row), run, row))
                else:
                    found.left_out["not proven right"] += 1
    ranked.sort(key=lambda one: one[0])
    _take(ranked, keep, found)
    return found


def _take(ranked: Sequence[tuple[tuple[str, bool, float, float], Path, TurnRow]], keep: int, found: Distilled) -> None:
    texts: dict[str, set[str]] = {}
    taken = Counter[tuple[str, bool]]()
    readers = {run: ArchiveReader(run / FILE) for _, run, _ in ranked}
    try:
        for _, run, row in ranked:
            kind = (row.problem_id, row.turn > 0)
            if taken[kind] >= keep:
                found.left_out[f"beyond the best {keep} of its problem"] += 1
                continue
            answer = _answer(readers[run], run, row)
            if isinstance(answer, str):
                found.left_out[answer] += 1
            elif answer.answer.strip() in texts.setdefault(row.problem_id, set()):
                found.left_out["the same as another"] += 1
            else:
                texts[row.problem_id].add(answer.answer.strip())
                taken[kind] += 1
                found.answers.append(answer)
    finally:
        for reader in readers.values():
            reader.close()


def _answer(archive: ArchiveReader, run: Path, row: TurnRow) -> ProvenAnswer | str:
    """The answer, or why it is none to learn from."""
    record = archive.record(row.task_id)
    if record is None or record.generation is None:
        return "its record is no longer in the archive"
    if record.request.problem.split == HELDOUT:
        return "its problem is held out"
    if record.generation.finish_reason != "stop":
        return "it was cut off"
    timed = {} if row.disturbed or row.lo is None else {"speedup": row.speedup, "lo": row.lo, "hi": row.hi}
    return ProvenAnswer(
        asked=record.request.prompt,
        answer=record.generation.text,
        problem=row.problem_id,
        level=row.level,
        backend=record.request.backend,
        turn=row.turn,
        found_in=f"{run.name}:{row.task_id}",
        **timed,
    )


def write(found: Distilled, path: Path) -> None:
    """A JSON line an answer; the file is there whole or not at all.

    :raises UserError: there is none.
    """
    if not found.answers:
        reasons = "; ".join(f"{count} {reason}" for reason, count in found.left_out.most_common(3)) or "none was given"
        raise UserError(f"no proven answer to a training problem: {reasons}", "Ask more often, or somebody better")
    lines = (msgspec.json.encode(answer).decode() for answer in found.answers)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
