"""Proven kernels of `kbrl optimize` as demonstrations: what a search found out flows back into the policy.

::

    optimized_X.evidence.json, .failed.json ─ right attempts, fastest first ─▶ best `keep` ─▶ Conversation

Invariant: a module that does what a held-out problem does is never taken, unless evaluations' answers are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import KbrlError
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.runs.demonstrations.formats import ASSISTANT, USER, Conversation, FormatError, Message
from protocols.records import Fault, Problem

SUFFIXES = (".evidence.json", ".failed.json")
"""Of a search that found a faster kernel, and of one that did not; right ones may be in both."""
Chain = tuple[str, ...]
"""The operations of a module, in order."""


class _Judged(msgspec.Struct, frozen=True):
    fault: str
    lo: float | None = None


class _Attempt(msgspec.Struct, frozen=True):
    number: int
    source_sha256: str
    judgement: _Judged | None = None
    same_as: int | None = None


class _Target(msgspec.Struct, frozen=True):
    title: str
    problem: str


class _Asked(msgspec.Struct, frozen=True):
    prompt_option: str
    backend: str


class _Evidence(msgspec.Struct, frozen=True):
    target: _Target
    search: _Asked
    tree: list[_Attempt]
    sources: dict[str, str]

    def is_right(self, attempt: _Attempt) -> bool:
        """A kernel that passed every check, in its first place."""
        is_proven = attempt.judgement is not None and attempt.judgement.fault == Fault.OK
        return is_proven and attempt.same_as is None and attempt.source_sha256 in self.sources


def is_evidence(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def chains_of(problems: Collection[Problem]) -> frozenset[Chain]:
    return frozenset(operations(Scope(problem.source)) for problem in problems)


def proven_answers(
    path: Path, keep: int, guarded: Collection[Chain]
) -> Iterator[tuple[str, Conversation | FormatError]]:
    """Each with its place. `guarded`: chains of operations that nothing may be learned of."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Evidence)
        problem = Problem("", 0, found.target.title, found.target.problem)
        is_guarded = operations(Scope(problem.source)) in guarded
        prompt = render_prompt(found.search.prompt_option, problem, found.search.backend)
    except (OSError, msgspec.MsgspecError, SyntaxError, ValueError, KbrlError) as error:
        yield str(path), FormatError(f"no evidence that can be read: {str(error).splitlines()[0]}")
        return
    if is_guarded:
        yield str(path), FormatError(f"{found.target.title} does what a held-out problem does")
        return
    for attempt in sorted(filter(found.is_right, found.tree), key=_rank)[:keep]:
        answer = f"```python\n{found.sources[attempt.source_sha256].rstrip()}\n```\n"
        messages = (Message(USER, prompt), Message(ASSISTANT, answer, True))
        yield f"{path}:{attempt.number}", Conversation(messages, is_chat=False, is_asked=True)


def _rank(attempt: _Attempt) -> tuple[float, int]:
    lo = attempt.judgement.lo if attempt.judgement is not None else None
    return -(lo or 0.0), attempt.number
