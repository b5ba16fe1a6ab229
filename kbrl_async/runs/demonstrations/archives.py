"""The best verified answers of earlier runs as demonstrations.

::

    RUN/rollouts.sqlite ─ correct training rollouts ─▶ by problem: best `keep` by reward, no text twice ─▶ Conversation

Invariants
* Only kernels that passed every check are taken, and only of training rollouts, so that held-out problems never get in;
  who asks for evaluations' answers has them, and an evaluation of those problems says nothing afterwards.
* The same archive gives the same answers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.archive.rows import TurnRow
from kbrl_async.runs.demonstrations.formats import ASSISTANT, USER, Conversation, FormatError, Message
from protocols.records import VERIFIER, Purpose

HELDOUT = "heldout"


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / FILE).is_file()


def best_answers(run: Path, keep: int, *, include_eval: bool) -> Iterator[tuple[str, Conversation | FormatError]]:
    """The best `keep` different answers a problem, faster ones first among equally good, each with its place.

    `include_eval`: those of evaluations, and so of held-out problems, too.
    """
    with ArchiveReader(run / FILE) as archive:
        ranked = sorted(_right(archive, include_eval), key=rank)
        kept: dict[str, set[str]] = {}
        for row in ranked:
            texts = kept.setdefault(row.problem_id, set())
            if len(texts) >= keep:
                continue
            found = _conversation(archive, row, include_eval)
            if isinstance(found, Conversation):
                answer = found.messages[-1].content
                if answer in texts:
                    continue
                texts.add(answer)
            yield f"{run}:{row.task_id}", found


def rank(row: TurnRow) -> tuple[str, bool, float, float]:
    """Of a problem, best first by reward, then by speed; those whose time was disturbed come last."""
    return row.problem_id, row.disturbed, -(row.reward or 0.0), -(row.lo or 0.0)


def _right(archive: ArchiveReader, include_eval: bool) -> Iterator[TurnRow]:
    rows = archive.rows(purpose=None if include_eval else Purpose.TRAIN)
    return (row for row in rows if row.correct and row.role != VERIFIER)


def _conversation(archive: ArchiveReader, row: TurnRow, include_eval: bool) -> Conversation | FormatError:
    record = archive.record(row.task_id)
    if record is None or record.generation is None:
        return FormatError("its record is no longer in the archive (archive.max_bytes, archive.keep)")
    if record.request.problem.split == HELDOUT and not include_eval:
        return FormatError(f"{row.problem_id} is held out")
    if record.generation.finish_reason != "stop":
        return FormatError("its answer was cut off")
    messages = (Message(USER, record.request.prompt), Message(ASSISTANT, record.generation.text, True))
    return Conversation(messages, is_chat=False, is_asked=True)
