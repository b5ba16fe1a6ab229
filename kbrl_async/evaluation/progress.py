"""One evaluation as it goes on: problems × samples, each asked once, each with one end. Pure.

::

    rollouts in order ─ begin ─▶ open, at most `in_flight` ─ end ─▶ ended, however it came out
                          ▲                                    │
                          └────────────────────────────────────┘   the next ones, until none are left

Used before, after and during a run (`runs.run_state`, `rounds`) and by `kbrl eval` (`course`): they say what an end is.

Invariants
* Every rollout ends once; late and unknown ends change nothing.
* What is open follows from what has ended, so nothing but the ends has to be remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from protocols.records import Problem

EndT = TypeVar("EndT")


class EvaluationProgress(Generic[EndT]):
    """`name` begins the ids of its rollouts: `eval-before.L1/13_softmax.0`."""

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        samples: int,
        in_flight: int | None = None,
        *,
        whole_problems: bool = False,
    ) -> None:
        """:param in_flight: most rollouts that are open at once; None: all.
        :param whole_problems: a problem's samples begin together, or not yet.
        """
        self.name = name
        self._problems = {f"{name}.{p.problem_id}.{sample}": p for p in problems for sample in range(samples)}
        self._step = samples if whole_problems else 1
        self._in_flight = len(self._problems) if in_flight is None else max(in_flight, self._step)
        self._ended: dict[str, EndT] = {}
        self._open: dict[str, Problem] = {}
        self._begun_at: dict[str, float] = {}
        self._left: Iterator[str] = iter(self._problems)
        self._begun = 0

    @property
    def total(self) -> int:
        return len(self._problems)

    @property
    def ended(self) -> Mapping[str, EndT]:
        """How rollouts ended, by id."""
        return self._ended

    @property
    def has_ended(self) -> bool:
        return len(self._ended) == len(self._problems)

    @property
    def open(self) -> Mapping[str, Problem]:
        """Rollouts that are under way, and what they are asked."""
        return self._open

    def in_order(self) -> list[EndT]:
        """The ends so far, in the order of their rollouts."""
        return [self._ended[key] for key in self._problems if key in self._ended]

    def overdue(self, now: float, deadline_s: float) -> list[str]:
        """Ids of problems that began `deadline_s` ago and have open rollouts."""
        open_ = {problem.problem_id for problem in self._open.values()}
        return sorted(p for p in open_ if now - self._begun_at[p] >= deadline_s)

    def begin(self, now: float = 0.0) -> dict[str, Problem]:
        """Opens as many rollouts as may be; returns those that are new."""
        new: dict[str, Problem] = {}
        while self._begun < self.total and len(self._open) + self._step <= self._in_flight:
            for _ in range(self._step):
                key = next(self._left)
                self._begun += 1
                self._begun_at.setdefault(self._problems[key].problem_id, now)
                if key not in self._ended:
                    new[key] = self._open[key] = self._problems[key]
        return new

    def end(self, rollout_id: str, how: EndT) -> bool:
        """One rollout's end; False where it is late or nobody's."""
        if rollout_id not in self._problems or rollout_id in self._ended:
            return False
        self._open.pop(rollout_id, None)
        self._ended[rollout_id] = how
        return True

    def restore(self, ended: Mapping[str, EndT]) -> None:
        """The ends that a new one begins with."""
        for rollout_id, how in ended.items():
            self.end(rollout_id, how)
