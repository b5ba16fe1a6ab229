"""Attempts and which of them refined which, as a tree that only grows.

::

    (module) ─┬─ 0 compile error ─── 3 mismatch ─── 5 correct, 2.1×
              ├─ 1 = 0                                 └─ 8 correct, 2.9×   ◀ best
              └─ 2 correct, 0.9×

Invariants
* An attempt is added once and judged at most once; a parent is older than its children.
* Equal sources are judged once: later ones point at the first (`same_as`) and share its judgement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from protocols.records import Fault

POLICY = "policy"
"""Origin of what the engine wrote."""


class Judgement(msgspec.Struct, frozen=True):
    """What the funnel says of one attempt."""

    fault: Fault
    category: str
    """As the policy is told: format, static, compile, runtime, resources, mismatch, cheating, slow or fast."""
    message: str = ""
    rule: str = ""
    passed: int = 0
    total: int = 0
    speedup: float | None = None
    lo: float | None = None
    hi: float | None = None
    max_abs_error: float | None = None
    seconds: float = 0.0

    @property
    def is_proven(self) -> bool:
        """Right on every secret input set."""
        return self.fault is Fault.OK

    @property
    def is_faster(self) -> bool:
        """… and its whole interval lies above 1."""
        return self.is_proven and self.lo is not None and self.lo > 1.0


class Attempt(msgspec.Struct, frozen=True):
    """One answer of the engine."""

    number: int
    parent: int | None
    turn: int
    asked_at: float
    """Seconds since the search began."""
    origin: str = POLICY
    """Who wrote it: the engine, or where else it was taken from."""
    source: str = ""
    """Empty where no candidate could be taken out of the answer."""
    tokens: int = 0
    same_as: int | None = None
    judgement: Judgement | None = None
    lost: str = ""
    """Why it has no judgement: cancelled, or a fault of the host."""

    @property
    def is_proven(self) -> bool:
        return self.judgement is not None and self.judgement.is_proven


class Tree:
    """See the module."""

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []
        self._children: dict[int | None, list[int]] = {}
        self._first: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    def __getitem__(self, number: int) -> Attempt:
        return self._attempts[number]

    def children(self, number: int | None) -> list[int]:
        return self._children.get(number, [])

    def ask(self, parent: int | None, at: float, origin: str = POLICY) -> Attempt:
        turn = 0 if parent is None else self._attempts[parent].turn + 1
        made = Attempt(len(self._attempts), parent, turn, at, origin)
        self._attempts.append(made)
        self._children.setdefault(parent, []).append(made.number)
        return made

    def write(self, number: int, source: str, tokens: int) -> Attempt:
        """Notes what was answered; the attempt then says whether an earlier one is the same."""
        key = fingerprint(source)
        first = self._first.setdefault(key, number) if source else number
        same_as = first if first != number else None
        judgement = self._attempts[first].judgement if same_as is not None else None
        return self._change(number, source=source, tokens=tokens, same_as=same_as, judgement=judgement)

    def judge(self, number: int, judgement: Judgement) -> None:
        """A verdict, for this attempt and those that are the same."""
        assert self._attempts[number].judgement is None, "an attempt is judged once"
        for attempt in list(self._attempts):
            if attempt.number == number or attempt.same_as == number:
                self._change(attempt.number, judgement=judgement)

    def lose(self, number: int, reason: str) -> None:
        self._change(number, lost=reason)

    def proven(self) -> list[Attempt]:
        """Distinct proven attempts, the surest speedup first."""
        found = [a for a in self._attempts if a.is_proven and a.same_as is None]
        return sorted(found, key=lambda a: (-_floor(a), a.number))

    def failures(self) -> list[Attempt]:
        """Distinct attempts that are wrong, the ones that came furthest first."""
        found = [a for a in self._attempts if a.judgement is not None and not a.is_proven and a.same_as is None]
        return sorted(found, key=lambda a: (-progress(a.judgement), a.number))

    def document(self) -> list[dict[str, Any]]:
        """For JSON; sources are named by their hash and stand once."""
        return [{**msgspec.to_builtins(a), "source_sha256": fingerprint(a.source), "source": None} for a in self]

    def _change(self, number: int, **fields: Any) -> Attempt:
        self._attempts[number] = msgspec.structs.replace(self._attempts[number], **fields)
        return self._attempts[number]


_STEPS = {"format": 0.0, "cheating": 0.0, "static": 0.5, "compile": 1.0, "resources": 1.5, "runtime": 2.0}


def progress(judgement: Judgement | None) -> float:
    """How far an attempt came: 0 for no candidate, 1 … 2 for one that does not run, up to 4 for a wrong result."""
    if judgement is None:
        return 0.0
    if judgement.is_proven:
        return 4.0
    share = judgement.passed / judgement.total if judgement.total else 0.0
    return _STEPS.get(judgement.category, 3.0 + 0.9 * share)


def fingerprint(source: str) -> str:
    """Of the text without blank ends of lines: what differs by nothing that could matter is the same attempt."""
    return hashlib.sha256("\n".join(line.rstrip() for line in source.strip().splitlines()).encode()).hexdigest()


def _floor(attempt: Attempt) -> float:
    return attempt.judgement.lo or 0.0 if attempt.judgement else 0.0
