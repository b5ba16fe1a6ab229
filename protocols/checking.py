"""Does a farm or a bench tell the truth? Some candidates are built and verified twice, by workers of different keys.

::

    result of A ─┬─ not picked ─▶ held until A's next check agrees ───────────▶ next stage
                 └─ picked ─▶ B does it too ─┬─ they agree ───────────────────▶ next stage, and all that A had held
                                             └─ they don't ─▶ C decides: the one who stands alone gets a strike,
                                                what it had held is done again by others; `strikes` ─▶ quarantine

`CheckDesk` is pure: it is told of results and comparisons, and says what to do with a task. The comparison itself
(`protocols.opinions`) reads reports and is the broker's to make.

Invariants
* Nobody gives a second opinion on its own result: principals are keys, whatever worker ids they use.
* A task is held or checked for `hold_s` at most while nobody else could check it; then it goes on, counted `unchecked`.
* One disagreement without a third opinion is nobody's fault: the task ends as `worker_lost`, and no one gets a strike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec


class CheckOptions(msgspec.Struct, frozen=True):
    share: float = 0.0
    """Of builds that a second farm makes, and of verdicts that a second bench finds; 0: none, and nothing is held."""
    hold_s: float = 10.0
    strikes: float = 2.0
    """At so many a worker is quarantined; each agreement halves what it has."""
    tolerance: float = 0.25
    """By so much two timing intervals may miss each other."""


class OpenCheck(msgspec.Struct):
    """One task with opinions. `principals[i]` gave opinion i."""

    principals: list[str]
    since: float
    checking: bool = False
    """Somebody else is to give an opinion; else it is held until its principal's next check."""


class CheckOutcome(msgspec.Struct, frozen=True):
    """What a comparison has shown."""

    winner: int = -1
    """The opinion that goes on; −1: none, see `more`."""
    more: bool = False
    """A third opinion is needed."""
    release: tuple[str, ...] = ()
    """Tasks whose held result may go on."""
    redo: tuple[str, ...] = ()
    """Tasks whose held result is not believed any more."""
    quarantine: str = ""


class CheckDesk:
    """See the module's docstring."""

    def __init__(self, options: CheckOptions, rng: random.Random) -> None:
        self.options = options
        self._rng = rng
        self.cases: dict[str, OpenCheck] = {}
        self.strikes: dict[str, float] = {}
        self.quarantined: set[str] = set()
        self.counters = dict.fromkeys(("checked", "agreed", "disagreed", "unsettled", "unchecked", "redone"), 0)

    @property
    def is_on(self) -> bool:
        return self.options.share > 0

    def opinion(self, task_id: str, principal: str, others: bool, now: float) -> str:
        """A result has come: `"compare"` it, `"check"` it by somebody else, `"hold"` it, or `"pass"` it on."""
        case = self.cases.get(task_id)
        if case is not None:
            case.principals.append(principal)
            return "compare"
        if not others:
            self.counters["unchecked"] += 1
            return "pass"
        picked = self._rng.random() < self.options.share
        self.cases[task_id] = OpenCheck([principal], now, picked)
        self.counters["checked"] += picked
        return "check" if picked else "hold"

    def barred(self, task_id: str) -> frozenset[str]:
        """Who may give no (further) opinion on a task."""
        case = self.cases.get(task_id)
        return frozenset(case.principals) if case else frozenset()

    def compared(self, task_id: str, agree: Iterable[tuple[int, int]], others: bool) -> CheckOutcome:
        """`agree`: the pairs of opinions that agree. `others`: a third worker could give one."""
        case = self.cases[task_id]
        pairs = set(agree)
        if len(case.principals) == 2:
            if (0, 1) in pairs:
                return self._agreed(task_id, 0, case.principals)
            if others:
                return CheckOutcome(more=True)
        elif (0, 2) in pairs and (1, 2) not in pairs:
            return self._lied(task_id, 0, case.principals[1], (case.principals[0], case.principals[2]))
        elif (1, 2) in pairs and (0, 2) not in pairs:
            return self._lied(task_id, 1, case.principals[0], (case.principals[1], case.principals[2]))
        self.counters["unsettled"] += 1
        del self.cases[task_id]
        return CheckOutcome()

    def _agreed(self, task_id: str, winner: int, principals: Iterable[str]) -> CheckOutcome:
        self.counters["agreed"] += 1
        del self.cases[task_id]
        released: list[str] = []
        for principal in principals:
            if self.strikes.get(principal):
                self.strikes[principal] /= 2
            released += self._take_held(principal)
        return CheckOutcome(winner, release=tuple(released))

    def _lied(self, task_id: str, winner: int, liar: str, honest: Iterable[str]) -> CheckOutcome:
        found = self._agreed(task_id, winner, honest)
        self.counters["agreed"] -= 1
        self.counters["disagreed"] += 1
        self.strikes[liar] = self.strikes.get(liar, 0.0) + 1.0
        redo = tuple(self._take_held(liar))
        self.counters["redone"] += len(redo)
        is_out = self.strikes[liar] >= self.options.strikes and liar not in self.quarantined
        if is_out:
            self.quarantined.add(liar)
        return CheckOutcome(found.winner, release=found.release, redo=redo, quarantine=liar if is_out else "")

    def _take_held(self, principal: str) -> list[str]:
        held = [t for t, case in self.cases.items() if not case.checking and case.principals == [principal]]
        for task_id in held:
            del self.cases[task_id]
        return held

    def forget(self, task_id: str) -> None:
        self.cases.pop(task_id, None)

    def due(self, now: float) -> list[tuple[str, OpenCheck]]:
        """Cases that have waited for `hold_s`: check the held ones now, let go of those that nobody can check."""
        return [(t, case) for t, case in self.cases.items() if now - case.since >= self.options.hold_s]

    def check_now(self, task_id: str, now: float) -> None:
        """A held result is checked although it was not picked: too much time has passed without a check."""
        case = self.cases[task_id]
        case.checking = True
        case.since = now
        self.counters["checked"] += 1

    def let_go(self, task_id: str) -> None:
        self.counters["unchecked"] += 1
        del self.cases[task_id]
