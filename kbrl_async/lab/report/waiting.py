"""What a run waits for: how long rollouts wait before each stage, and how much each stage was at work. Pure.

The window keeps a fixed number of rollouts under way, so the others wait for the slowest stage, and it alone never
does: it is the one that was at work most of the time. Where two are at work alike, it is the one with the longer queue.
Queues alone do not tell: samplers are held back while a later stage is behind, and then rollouts wait before them.

Invariant: everything is of training rollouts, from when the first was begun to the last update's end. The first groups
are asked for while the policy is still made: what they wait for it is no queue, and none of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kbrl_async.lab.report.model import RunData
from kbrl_async.runs.telemetry.system_metrics import busy_fractions
from protocols.messages import Stage
from protocols.rollout import STAGES, StageSpan

ALIKE = 0.05
"""Difference of busy shares below which queues decide."""
IDLE = 0.5
"""Busy share that the slowest stage has at least."""


class StageWait(msgspec.Struct, frozen=True):
    """One stage of training."""

    stage: str
    rollouts: int
    """That came there, each turn once."""
    waited: float
    """Seconds before it, mean over all training rollouts, those that never came there too; or over all updates."""
    worked: float
    """Seconds in it, likewise."""
    busy: float
    """Share of training in which its workers were at work, by their own word; mean over them. Without that: in which
    they had something in hand."""


class Waits(msgspec.Struct, frozen=True):
    """Of all stages, and which one is waited for."""

    stages: tuple[StageWait, ...]
    whole: float
    """Seconds from asking, or from the beginning of training, to score; mean."""
    slowest: StageWait | None
    """None where no stage was at work most of the time."""


def waits(run: RunData) -> Waits | None:
    """None where the times of single rollouts were not kept."""
    turns = [turn for turn in run.training if turn.spans and turn.asked is not None and turn.at is not None]
    if not turns or not run.updates:
        return None
    start, end = min(span.started for turn in turns for span in turn.spans), max(update.at for update in run.updates)
    by_stage: dict[str, list[StageSpan]] = defaultdict(list)
    for turn in turns:
        for span in turn.spans:
            by_stage[span.stage].append(span)
    updates = [span for update in run.updates for span in update.spans]
    said = _busy_shares(run, start, end)
    found = [_of_stage(stage, by_stage[stage], len(turns), start, end, said) for stage in STAGES if by_stage[stage]]
    whole = sum((turn.at or 0.0) - max(turn.asked or 0.0, start) for turn in turns) / len(turns)
    if updates:
        found.append(_of_stage(Stage.TRAIN, updates, len(updates), start, end, said))
    most = max(stage.busy for stage in found)
    slowest = max((stage for stage in found if stage.busy >= most - ALIKE), key=lambda stage: stage.waited)
    return Waits(tuple(found), whole, slowest if most >= IDLE else None)


def _busy_shares(run: RunData, start: float, end: float) -> dict[str, float]:
    """Busy share of each stage, as its workers told the broker."""
    stages = {name: worker.stages for sample in run.system for name, worker in sample.workers.items()}
    busy = busy_fractions(run.system, start, end)
    shares = {stage: [busy[name] for name in busy if stage in stages.get(name, ())] for stage in (*STAGES, Stage.TRAIN)}
    return {stage: sum(each) / len(each) for stage, each in shares.items() if each}


def _of_stage(
    stage: str, spans: Sequence[StageSpan], rollouts: int, start: float, end: float, said: Mapping[str, float]
) -> StageWait:
    workers: dict[str, list[StageSpan]] = defaultdict(list)
    for span in spans:
        workers[span.worker].append(span)
    held = sum(_covered(mine, start, end) for mine in workers.values()) / len(workers) / ((end - start) or 1.0)
    waited = sum(min(s.waited, s.started - start) for s in spans) / rollouts
    worked = sum(s.seconds for s in spans) / rollouts
    return StageWait(stage, len(spans), waited, worked, said.get(stage, held))


def _covered(spans: Iterable[StageSpan], start: float, end: float) -> float:
    """Seconds of start … end in which at least one of the spans runs."""
    total, until = 0.0, start
    for span in sorted(spans, key=lambda s: s.started):
        total += max(0.0, min(end, span.finished) - max(until, span.started))
        until = max(until, span.finished)
    return total
