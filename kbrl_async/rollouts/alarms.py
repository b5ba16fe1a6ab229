"""Alarms on what an update reports: when they are raised, when they clear, and what is done meanwhile. Pure.

::

    quiet ── mean of the last `window` updates beyond the threshold ──▶ raised, level 1
      ▲                                                                   │  beyond it for another window: level + 1
      └── the mean is back by `margin` on the right side ◀────────────────┘

Invariants
* The same updates give the same alarms, so a replayed journal does (I9).
* A single bad update raises nothing unless `window` is 1; a value that wavers about the threshold raises it once.
* A metric that an update lacks leaves its alarm as it was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.rollouts.settings import AlarmAction, Alarms

NON_FINITE = "nonfinite"


class Rule(msgspec.Struct, frozen=True):
    """One alarm: `metric` of an update below (or above) `threshold`."""

    name: str
    metric: str
    threshold: float
    is_below: bool
    action: AlarmAction
    window: int
    margin: float
    """Share of the threshold by which the mean must be on the right side again."""

    def is_beyond(self, value: float) -> bool:
        return value < self.threshold if self.is_below else value > self.threshold

    def is_clear(self, value: float) -> bool:
        room = self.margin * abs(self.threshold)
        return value >= self.threshold + room if self.is_below else value <= self.threshold - room


def rules_of(alarms: Alarms) -> list[Rule]:
    """A threshold of 0 means: no such alarm."""
    a = alarms
    found = [
        Rule("ess", "ess", a.ess_below, True, a.ess_action, a.window, a.margin),
        Rule("kl", "mismatch_kl", a.kl_above, False, a.kl_action, a.window, a.margin),
        Rule("entropy", "entropy", a.entropy_below, True, a.entropy_action, a.window, a.margin),
    ]
    # Its value is 0 or 1, and one is one too many.
    never = Rule(NON_FINITE, NON_FINITE, 0.5, False, a.nonfinite_action, 1, 0.0)
    return [*(rule for rule in found if rule.threshold > 0), never]


class AlarmChange(msgspec.Struct, frozen=True):
    """An alarm was raised (level 1), got worse (a higher level) or cleared (level 0)."""

    name: str
    level: int
    value: float
    """Mean over the window."""
    rule: Rule
    version: int

    def in_words(self) -> str:
        side = "below" if self.rule.is_below else "above"
        if self.level == 0:
            return f"{self.rule.metric} is back at {self.value:.3g}"
        return f"{self.rule.metric} {self.value:.3g} is {side} {self.rule.threshold:g} since {self.rule.window} updates"


class AlarmsState(msgspec.Struct, frozen=True):
    """All that the alarms remember, by name."""

    values: dict[str, list[float]]
    levels: dict[str, int]
    raised: dict[str, int]


class AlarmWatch:
    """The state of all alarms of a run."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._values: dict[str, deque[float]] = {rule.name: deque(maxlen=rule.window) for rule in rules}
        self.levels: dict[str, int] = dict.fromkeys(self._rules, 0)
        self.raised: dict[str, int] = dict.fromkeys(self._rules, 0)
        """How often each was raised."""

    @property
    def metrics(self) -> frozenset[str]:
        """What must be observed."""
        return frozenset(rule.metric for rule in self._rules.values())

    def state(self) -> AlarmsState:
        values = {name: list(seen) for name, seen in self._values.items()}
        return AlarmsState(values, dict(self.levels), dict(self.raised))

    def restore(self, state: AlarmsState) -> None:
        """An alarm that is new since then begins afresh; one that is gone is forgotten."""
        for name, rule in self._rules.items():
            self._values[name] = deque(state.values.get(name, ()), maxlen=rule.window)
            self.levels[name], self.raised[name] = state.levels.get(name, 0), state.raised.get(name, 0)

    def observe(self, version: int, metrics: Mapping[str, float]) -> list[AlarmChange]:
        """Takes in one update; returns what changed by it."""
        found = (self._observe(rule, version, metrics.get(rule.metric)) for rule in self._rules.values())
        return [change for change in found if change is not None]

    def _observe(self, rule: Rule, version: int, value: float | None) -> AlarmChange | None:
        if value is None or math.isnan(value):
            return None
        values = self._values[rule.name]
        values.append(value)
        level, mean = self.levels[rule.name], sum(values) / len(values)
        if len(values) < rule.window:
            return None
        if level and rule.is_clear(mean):
            return self._change(rule, 0, mean, version)
        if not rule.is_beyond(mean):
            return None
        self.raised[rule.name] += level == 0
        return self._change(rule, level + 1, mean, version)

    def _change(self, rule: Rule, level: int, mean: float, version: int) -> AlarmChange:
        self.levels[rule.name] = level
        self._values[rule.name].clear()  # the next judgement is of updates that the action could reach
        return AlarmChange(rule.name, level, mean, rule, version)

    # ── what is to be done now ──────────────────────────────────────────────────────────────────────────────────

    def active(self, action: AlarmAction) -> int:
        """The highest level of the raised alarms with this action; 0: none."""
        return max((self.levels[name] for name, rule in self._rules.items() if rule.action == action), default=0)

    @property
    def any_raised(self) -> list[str]:
        return [name for name, level in self.levels.items() if level]

    def allowed_staleness(self, max_staleness: int) -> int:
        """What admission goes by: one lower for each level of `lower_staleness`, 0 while admission is paused."""
        return 0 if self.active("pause_admission") else max(0, max_staleness - self.active("lower_staleness"))
