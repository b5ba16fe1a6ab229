"""What each policy version was worth, as soon as all of its answers are in, while a run goes on.

::

    commands ─ note ─▶ Tally ─ settled, up to what may still be written ─▶ one Part a version, in their order, once

A batch is no sample of a policy: it holds the groups that were complete first, of several versions, without those whose
rewards are all alike.

Invariants
* A version is told when no open group can hold an answer of it any more, and none that is admitted from now on.
* As large as what is open and the answers of versions that are not told yet (I10).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kbrl_async.evaluation.heldout import is_evaluation
from kbrl_async.rollouts.buffer.events import Admitted, Lost, RolloutScored, StragglersCut, Swept
from kbrl_async.rollouts.trajectories import TurnTaken
from kbrl_async.runs.commands import Command, RolloutEnded
from kbrl_async.runs.telemetry.by_version import Tally, VersionRange, settled


class SettledVersions:
    """`note` each command, ask `new` after an update."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._told = -1

    def __len__(self) -> int:
        """Answers that are kept."""
        return len(self._tally.answers().listed)

    def note(self, commands: Iterable[Command]) -> None:
        for command in commands:
            note(self._tally, command)

    def new(self, newest: float = math.inf) -> list[VersionRange]:
        """Versions whose last answers have come in since the last call.

        :param newest: the version that the next group is admitted at; none is admitted any more: infinity.
        """
        horizon = self._tally.horizon(newest)
        found = settled(self._tally.answers()).versions
        fresh = [VersionRange(v, v, listed) for v, listed in found.items() if self._told < v < horizon]
        self._told = max([self._told, *(part.last for part in fresh)])
        self._tally.forget(horizon)
        return fresh


def note(tally: Tally, command: Command) -> None:
    """What a command says of training answers and their groups."""
    match command:
        case Admitted():
            tally.admitted(command.group_id, command.rollouts, command.version, command.problem_id)
        case RolloutEnded() | TurnTaken() if not is_evaluation(command.group_id):
            tally.answered(command.group_id, command.stats)
        case RolloutScored():
            tally.ended(command.group_id)
        case Lost():
            tally.ended(command.group_id, command.reason)
        case Swept() | StragglersCut():
            tally.swept(command.group_ids, whole=isinstance(command, Swept))
        case _:
            pass
