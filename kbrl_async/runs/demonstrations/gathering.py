"""All sources of demonstrations together, with an account of what was left out and why.

Invariants
* `read` = lessons + bad + too long + doubles.
* What runs, evaluations and `kbrl optimize` found is learned once, however many of them found it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.runs.demonstrations import archives, optimized
from kbrl_async.runs.demonstrations.formats import Conversation, FormatError, conversation_of
from kbrl_async.runs.demonstrations.optimized import Chain, is_evidence
from kbrl_async.runs.demonstrations.reading import files_of, records
from kbrl_async.runs.demonstrations.rendering import Lesson, Renderer, TooLong

BAD, TOO_LONG, DOUBLE = "bad", "too_long", "double"
NAMED = 10_000
"""Most problems that are kept by name; all are counted."""


class Skipped(msgspec.Struct, frozen=True):
    """Something that was left out."""

    where: str
    """`file:line`."""
    reason: str
    kind: str = BAD


class Gathered(msgspec.Struct):
    """What `gather` brought together."""

    lessons: list[Lesson] = msgspec.field(default_factory=list)
    problems: list[Skipped] = msgspec.field(default_factory=list)
    """The first `NAMED` of what was left out."""
    counts: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(("read", BAD, TOO_LONG, DOUBLE), 0))

    def leave_out(self, problem: Skipped) -> None:
        self.counts[problem.kind] += 1
        if len(self.problems) < NAMED:
            self.problems.append(problem)

    def account(self) -> dict[str, Any]:
        """What a person should know of it, for JSON."""
        targets = sum(lesson.targets for lesson in self.lessons)
        turns = sum(len(lesson.spans) for lesson in self.lessons)
        figures = {**self.counts, "lessons": len(self.lessons), "turns": turns, "target_tokens": targets}
        return {**figures, "left_out": [msgspec.to_builtins(problem) for problem in self.problems]}


def gather(
    sources: Sequence[str],
    renderer: Renderer,
    keep: int,
    *,
    include_eval: bool,
    guarded: Collection[Chain] = (),
) -> Gathered:
    """SftDataset of files, folders of files, evidence of `kbrl optimize` and runs, in that order.

    :param keep: best answers a problem that a run, or a search, gives.
    :param include_eval: right answers of a run's evaluations, too.
    :param guarded: operations of held-out problems, of which no search's kernels are taken.
    :raises UserError: a source is missing, or all together hold nothing that can be learned.
    """
    found, first_of = Gathered(), dict[str, str]()
    for where, record in _all(sources, keep, include_eval, guarded):
        found.counts["read"] += 1
        if isinstance(record, Conversation) and (other := first_of.setdefault(_text(record), where)) != where:
            found.leave_out(Skipped(where, f"the same as {other}", DOUBLE))
            continue
        try:
            conversation = record if isinstance(record, Conversation) else _read(record)
            found.lessons.append(renderer(conversation, where))
        except TooLong as error:
            found.leave_out(Skipped(where, str(error), TOO_LONG))
        except FormatError as error:
            found.leave_out(Skipped(where, str(error)))
    if not found.lessons:
        first = found.problems[0] if found.problems else Skipped(", ".join(sources), "there is nothing in it")
        raise UserError(f"no demonstration can be learned: {first.where}: {first.reason}", "See docs/learning.md, SFT")
    return found


def _text(conversation: Conversation) -> str:
    """Equal for equal answers to equal questions, whatever ends their lines."""
    return "\0".join(
        "\n".join(line.rstrip() for line in message.content.strip().splitlines()) for message in conversation.messages
    )


def _all(
    sources: Sequence[str], keep: int, include_eval: bool, guarded: Collection[Chain]
) -> Iterator[tuple[str, Any]]:
    for source in sources:
        path = Path(source).expanduser()
        if archives.is_run(path):
            yield from archives.best_answers(path, keep, include_eval=include_eval)
        else:
            for file in files_of(path):
                yield from optimized.proven_answers(file, keep, guarded) if is_evidence(file) else records(file)


def _read(record: Any) -> Conversation:
    if isinstance(record, FormatError):
        raise record
    return conversation_of(record)
