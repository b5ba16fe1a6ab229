"""Single turns, of which a report can hold only some: the commonest mistakes, and a sample of answers to look at.

::

    rollouts.sqlite ─┬─ failures, at most so many of each fault ─ alike? ─▶ Mistakes, each with an example
                     └─ examples, best kernels, then each version and outcome in turn ─▶ SampledTurns

Invariants
* Which turns are taken follows from their ids and outcomes alone, so the same run always shows the same ones, and
  nobody chose them.
* However many turns there are, at most so many are read and so many characters are kept (I10).
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from kbrl_async.lab.report.archived import Archived
from kbrl_async.lab.report.kernels import best_turns
from kbrl_async.lab.report.markup import clipped
from kbrl_async.lab.report.model import TRAIN, Examples, Mistake, ReportedTurn, SampledTurn
from kbrl_async.runs.archive.archive import ArchiveReader
from protocols.records import Fault
from protocols.rollout import Record

MOST_READ = 1200
"""Failures of one fault whose messages are read."""
MOST_KINDS = 8
"""Kinds of mistakes of one fault that are shown."""
MOST_TURNS, MOST_CHARACTERS = 160, 700_000
PROMPT, ANSWER = (120, 200), (240, 200)
"""Lines and columns that are kept of a text."""
EXAMPLE = (12, 300)

_ERROR = re.compile(r"(?:fatal )?error: (.*)")
_NUMBER = re.compile(r"(?<![\w'])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?\b", re.IGNORECASE)
_NAME = re.compile(r"['‘\"](\w[^'’\"]*)['’\"]")
_LONG = re.compile(r"\([^()]{24,}\)")


def read_examples(turns: Sequence[ReportedTurn], stored: Archived | None) -> Examples:
    """Of an archive, which may hold none of the records any more."""
    if stored is None:
        return Examples()
    ordered = sorted((turn for turn in turns if turn.task_id), key=_drawn)
    failed: dict[str, list[ReportedTurn]] = defaultdict(list)
    for turn in ordered:
        if turn.phase == TRAIN and turn.stats.fault not in ("", Fault.OK):
            failed[turn.stats.fault].append(turn)
    kept = {row.task_id for row in stored.rows if row.bytes}
    with ArchiveReader(stored.path) as archive:
        mistakes, read = {}, {}
        for fault, found in sorted(failed.items(), key=lambda item: -len(item[1])):
            known = [(turn, record) for turn in found[:MOST_READ] if (record := archive.record(turn.task_id))]
            mistakes[fault], read[fault] = commonest(fault, known), (len(known), len(found))
        first = [mistake.task_id for listed in mistakes.values() for mistake in listed]
        first += [turn.task_id for turn in best_turns(turns)]
        sample = _sample(archive, [turn for turn in ordered if turn.task_id in kept], first)
    return Examples(mistakes, read, sample, len(kept))


# ── the commonest mistakes ───────────────────────────────────────────────────────────────────────────────────────────


def commonest(fault: str, failures: Iterable[tuple[ReportedTurn, Record]]) -> list[Mistake]:
    """The commonest kinds of a fault's messages, each with the first of its turns as its example."""
    kinds: dict[str, list[tuple[ReportedTurn, Record]]] = defaultdict(list)
    for turn, record in failures:
        kinds[kind_of(record.verdict.message, record.verdict.hint, fault)].append((turn, record))
    ranked = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_mistake(fault, kind, members) for kind, members in ranked[:MOST_KINDS]]


def _mistake(fault: str, kind: str, members: Sequence[tuple[ReportedTurn, Record]]) -> Mistake:
    turn, record = members[0]
    verdict = record.verdict
    problems = len({member.stats.problem_id for member, _ in members})
    return Mistake(fault, kind, len(members), problems, _kept(verdict.message, EXAMPLE), verdict.hint, turn.task_id)


def kind_of(message: str, hint: str = "", fault: str = "") -> str:
    """What makes messages alike: a compiler's first error, Python's last line, or what a wrong result's hint calls
    it (how many values are wrong differs from answer to answer), each without numbers, names and places."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if fault == Fault.INCORRECT and hint:
        said = hint
    elif errors := [found[1] for line in lines if (found := _ERROR.search(line))]:
        said = errors[0]
    else:
        said = lines[-1] if lines else "no message"
    return _kept(_LONG.sub("(…)", _NUMBER.sub("#", _NAME.sub("'…'", said))), (1, 160))


# ── answers to look at ───────────────────────────────────────────────────────────────────────────────────────────────


def _sample(archive: ArchiveReader, turns: Sequence[ReportedTurn], first: Sequence[str]) -> list[SampledTurn]:
    """Those of `first`, then one of each phase, version and outcome, then a second one of each …"""
    by_id = {turn.task_id: turn for turn in turns}
    wanted = dict.fromkeys([*(key for key in first if key in by_id), *(turn.task_id for turn in _in_turn(turns))])
    taken: list[SampledTurn] = []
    room = MOST_CHARACTERS
    for task_id in wanted:
        if len(taken) >= MOST_TURNS or room <= 0:
            break
        if (record := archive.record(task_id)) is not None:
            taken.append(_sampled(by_id[task_id], record))
            room -= len(taken[-1].prompt) + len(taken[-1].answer)
    return sorted(taken, key=_order)


def _in_turn(turns: Sequence[ReportedTurn]) -> Iterator[ReportedTurn]:
    """One of each phase, version and outcome after the other."""
    alike: dict[tuple[str, int, str], list[ReportedTurn]] = defaultdict(list)
    for turn in turns:
        alike[turn.phase, turn.stats.policy_version, turn.stats.fault].append(turn)
    for one_of_each in zip_longest(*(alike[key] for key in sorted(alike))):
        yield from (turn for turn in one_of_each if turn is not None)


def _drawn(turn: ReportedTurn) -> tuple[int, str]:
    """A draw that has nothing to do with what the turn came to."""
    return zlib.crc32(turn.task_id.encode("utf-8", "replace")), turn.task_id


def _order(one: SampledTurn) -> tuple[int, str, int]:
    return one.turn.stats.policy_version, one.turn.stats.rollout_id, one.turn.stats.turn


def _sampled(turn: ReportedTurn, record: Record) -> SampledTurn:
    checks = tuple((stage.name, stage.fault.value, stage.seconds, stage.detail) for stage in record.stages)
    loads = tuple((f"workload {one.name}", one.fault.value, 0.0, one.message) for one in record.verdict.workloads)
    answer = record.generation.text if record.generation is not None else ""
    verdict = record.verdict
    return SampledTurn(
        turn, _kept(record.request.prompt, PROMPT), _kept(answer, ANSWER), _kept(verdict.message, EXAMPLE),
        verdict.hint, (*checks, *loads),
    )  # fmt: skip


def _kept(text: str, most: tuple[int, int]) -> str:
    """Within so many lines and columns; what was left out is said in its last line."""
    shown, left_out = clipped(text, lines=most[0], columns=most[1])
    return f"{shown}\n… {left_out}" if left_out and most[0] > 1 else shown
