"""Training turns over time in columns: one an update, or several where there are many.

A batch is the honest unit: rollouts that fail early are scored early, so columns of equal time would show waves of bad
and good ones that come from the pipeline and not from the policy.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec

from kbrl_async.lab.report.model import RunData, Turn

MOST = 48
LEAST = 4
LEAST_A_COLUMN = 32


class Column(msgspec.Struct, frozen=True):
    at: float
    turns: list[Turn]


def columns(run: RunData, most: int = MOST) -> list[Column]:
    """By the update that they were trained for, or, where too few were, by the time of their scoring."""
    trained = _by_update(run)
    return _merged(trained, most) if len(trained) >= LEAST else _by_time(run, most)


def start_of_training(run: RunData) -> float:
    return min((turn.at for turn in run.training if turn.at is not None), default=0.0)


def _by_update(run: RunData) -> list[Column]:
    update_of = {group_id: update for update in run.updates for group_id in update.group_ids}
    found: dict[float, list[Turn]] = defaultdict(list)
    for turn in run.training:
        if (update := update_of.get(turn.group_id)) is not None:
            found[update.at].append(turn)
    return [Column(at, found[at]) for at in sorted(found)]


def _merged(found: list[Column], most: int) -> list[Column]:
    count = min(most, len(found))
    edges = [round(i * len(found) / count) for i in range(count + 1)]
    parts = [found[start:end] for start, end in itertools.pairwise(edges)]
    return [
        Column(sum(column.at for column in part) / len(part), [turn for column in part for turn in column.turns])
        for part in parts
    ]


def _by_time(run: RunData, most: int) -> list[Column]:
    turns = sorted((turn for turn in run.training if turn.at is not None), key=_at)
    if not turns:
        return []
    size = -(-len(turns) // max(LEAST, min(most, len(turns) // LEAST_A_COLUMN)))
    parts = [turns[i : i + size] for i in range(0, len(turns), size)]
    if len(parts) > 1 and len(parts[-1]) < size / 2:
        parts[-2:] = [parts[-2] + parts[-1]]
    return [Column(sum(map(_at, part)) / len(part), part) for part in parts]


def _at(turn: Turn) -> float:
    return turn.at or 0.0
