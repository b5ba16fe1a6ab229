"""Where the time of a rollout goes: single ones through the stages, and the typical one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import Bar, axis_row, figure, legend, row, rows, section
from kbrl_async.lab.report.markup import Markup, element, join
from kbrl_async.lab.report.model import PolicyUpdate, ReportedTurn, RunData
from kbrl_async.lab.report.scales import time_label, time_ticks
from kbrl_async.lab.report.sections.rollouts import link
from protocols.messages import Stage
from protocols.rollout import STAGES, StageSpan

SHOWN = 12
KEY = (("wait", "waiting"), *((stage, stage) for stage in (*STAGES, Stage.TRAIN)))


class Journey(msgspec.Struct, frozen=True):
    """A turn from being asked for to the end of the update that it was trained on; seconds since it was asked for."""

    turn: ReportedTurn
    spans: tuple[StageSpan, ...]
    scored: float
    end: float


def make(run: RunData) -> Markup:
    journeys = _journeys(run)
    if journeys:
        intro = (
            "From being asked for to the update that learned from it. Between two colours a rollout waits in a queue; "
            "after the bench its score is known, and it waits for its group, and its group for a batch."
        )
        return section(
            "timeline", "A rollout through the stages", intro, legend(KEY), _singles(run, journeys), _share(journeys)
        )
    are_known = any(turn.spans for turn in run.training)
    why = "No rollout went through all stages to an update" if are_known else "Single rollouts' times were not kept"
    intro = f"{why}: these are the medians of the stages' durations."
    return section("timeline", "A rollout through the stages", intro, _typical(run))


def _journeys(run: RunData) -> list[Journey]:
    """Of the training turns that went through all stages."""
    trained = {group_id: update for update in run.updates for group_id in update.group_ids}
    return [
        journey
        for turn in run.training
        if {span.stage for span in turn.spans} >= set(STAGES)
        and (journey := _journey(turn, trained.get(turn.group_id))) is not None
    ]


def _journey(turn: ReportedTurn, update: PolicyUpdate | None) -> Journey | None:
    if turn.asked is None or turn.at is None or update is None or update.start is None:
        return None
    moved = tuple(span.since(turn.asked) for span in (*turn.spans, *update.spans))
    return Journey(turn, moved, turn.at - turn.asked, update.at - turn.asked)


def _singles(run: RunData, journeys: Sequence[Journey]) -> Markup:
    """Evenly chosen from the shortest to the longest."""
    ordered = sorted(journeys, key=lambda j: j.end)
    count = min(SHOWN, len(ordered))
    chosen = [ordered[round(i * (len(ordered) - 1) / max(1, count - 1))] for i in range(count)]
    longest = max(journey.end for journey in chosen) or 1.0
    made = [_row(run, journey, longest) for journey in chosen]
    axis = [(100 * tick / longest, time_label(tick)) for tick in time_ticks(longest, 7)]
    title = f"{count} of {len(journeys):,} rollouts"
    note = "from the one that was trained on soonest to the one that took longest"
    return figure(title, note, rows([*made, axis_row(axis)], label="rollouts through the stages", kind="bare"))


def _row(run: RunData, journey: Journey, longest: float) -> Markup:
    stats = journey.turn.stats
    bars = [Bar(0.0, 100 * journey.end / longest, "wait s5")]
    bars += [
        Bar(100 * s.started / longest, 100 * s.finished / longest, f"{s.stage} s5") for s in journey.spans if s.seconds
    ]
    said = [f"{s.stage} {numbers.seconds(s.seconds)}" for s in journey.spans if s.seconds]
    name = join([link(run, journey.turn.task_id, stats.rollout_id), element("small", f"  {stats.problem_id}")])
    who = f"{stats.rollout_id} · {stats.problem_id} · {stats.fault or 'ok'}"
    tip = f"{who}\n{', '.join(said)}; all {numbers.seconds(journey.end)}"
    took = time_label(journey.end) if journey.end >= 60 else numbers.seconds(journey.end)
    return row(name, bars, value=took, tip=tip)


def _share(journeys: Sequence[Journey]) -> Markup:
    """The mean rollout's time in parts."""
    work = {
        stage: statistics.fmean(sum(s.seconds for s in j.spans if s.stage == stage) for j in journeys)
        for stage in (*STAGES, Stage.TRAIN)
    }
    scored = statistics.fmean(journey.scored for journey in journeys)
    whole = statistics.fmean(journey.end for journey in journeys) or 1.0
    before = max(0.0, scored - sum(work[stage] for stage in STAGES))
    after = max(0.0, whole - scored - work[Stage.TRAIN])
    words = [
        ("waiting for a stage", before, "wait"),
        *((stage, work[stage], stage) for stage in STAGES),
        ("waiting for a batch", after, "wait"),
        (Stage.TRAIN, work[Stage.TRAIN], Stage.TRAIN),
    ]
    made = [_part(name, value, whole, class_) for name, value, class_ in words]
    note = f"the mean of {len(journeys):,} rollouts that reached training: {numbers.seconds(whole)}"
    return figure("Where the time goes", note, rows(made, label="share of a rollout's time by stage", kind="bars"))


def _part(name: str, value: float, whole: float, class_: str) -> Markup:
    share, bars = numbers.percent(value / whole), [Bar(0, 100 * value / whole, f"{class_} s5")]
    return row(name, bars, value=share, tip=f"{name}: {numbers.seconds(value)}")


def _typical(run: RunData) -> Markup:
    medians = _medians([turn.stats.seconds for turn in run.training])
    if not medians:
        return Markup("")
    most = max(medians.values()) or 1.0
    made = [
        row(
            name,
            [Bar(0, 100 * value / most, f"{'wait' if name == 'queue' else name} s5")],
            value=numbers.seconds(value),
        )
        for name, value in medians.items()
    ]
    return figure("Seconds by stage", "median of the rollouts that came there", rows(made, label="seconds by stage"))


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = (STAGES[0], "queue", *STAGES[1:])
    values = {name: [seconds[name] for seconds in found if name in seconds] for name in names}
    return {name: statistics.median(some) for name, some in values.items() if some}
