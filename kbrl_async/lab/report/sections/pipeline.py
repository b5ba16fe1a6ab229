"""How the system ran: queues, staleness, throughput, and who was busy when."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import (
    Bar,
    Mark,
    axis_row,
    cells,
    figure,
    grid,
    legend,
    place,
    row,
    rows,
    section,
    time_axis,
    version_axis,
)
from kbrl_async.lab.report.markup import Markup
from kbrl_async.lab.report.model import STAGES, RunData
from kbrl_async.lab.report.plots import Series, line_chart
from kbrl_async.lab.report.scales import Points, binned, time_label, time_ticks
from kbrl_async.lab.report.waiting import StageWait, waits
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from protocols.messages import Stage
from protocols.rollout import StageSpan

COLUMNS = 150
QUEUES = tuple(stage for stage in STAGES if stage != Stage.SCORE)
DETAIL_S = 20.0
MOST_GUIDES = 60
MOST_LANES = 8
MOST_ROWS = 40


def make(run: RunData) -> Markup:
    intro = (
        "Every stage works at the same time and hands its results on through a queue. Curves over time run from the "
        "run's beginning to its end; a dotted line is where a policy version was made."
    )
    charts = grid([_staleness(run), *_queues(run), _throughput(run), *_processes(run)])
    return section("system", "How the system ran", intro, _waits(run), _gantt(run), _detail(run), charts)


# ── what is waited for ─────────────────────────────────────────────────────────────────────────────────────────────


def _waits(run: RunData) -> Markup:
    """Seconds before and in each stage, and how busy it was."""
    found = waits(run)
    if found is None:
        return Markup("")
    stages = [stage for stage in found.stages if stage.stage != Stage.TRAIN]
    longest = max(stage.waited + stage.worked for stage in stages) or 1.0
    made = [_wait_row(stage, longest) for stage in stages]
    busy = [
        row(stage.stage, [Bar(0, 100 * stage.busy, f"{stage.stage} s5")], value=numbers.percent(stage.busy))
        for stage in found.stages
    ]
    axis = [(100 * tick / longest, time_label(tick)) for tick in time_ticks(longest, 5)]
    note = f"mean before a stage (grey) and in it; from asking to score {numbers.seconds(found.whole)}"
    return grid(
        [
            figure("Where rollouts wait", note,
                   rows([*made, axis_row(axis)], label="where rollouts wait", kind="bars")),
            figure("How busy each stage was", "share of training in which its workers were at work",
                   rows(busy, label="how busy each stage was", kind="bars")),
        ],
        "grid two",
    )  # fmt: skip


def _wait_row(stage: StageWait, longest: float) -> Markup:
    before, until = 100 * stage.waited / longest, 100 * (stage.waited + stage.worked) / longest
    tip = f"{stage.stage}: {numbers.seconds(stage.waited)} before, {numbers.seconds(stage.worked)} in it"
    bars = [Bar(0.0, before, "wait s5"), Bar(before, until, f"{stage.stage} s5")]
    waited = time_label(stage.waited) if stage.waited >= 60 else numbers.seconds(stage.waited)
    return row(stage.stage, bars, value=waited, tip=tip)


# ── who was busy when ──────────────────────────────────────────────────────────────────────────────────────────────


def _gantt(run: RunData) -> Markup:
    if len(run.system) < 2:
        return Markup("")
    names = {"broker": "none", **{name: _colour(sample) for s in run.system[-1:] for name, sample in s.workers.items()}}
    for sample in run.system:
        names |= {name: _colour(worker) for name, worker in sample.workers.items() if name not in names}
    parts = binned(run.system, lambda s: s.t, min(COLUMNS, len(run.system)), 0.0, run.duration)
    ordered = sorted(names, key=lambda name: (_rank(names[name]), name))
    made = [_busy_row(run, name, names[name], parts) for name in ordered[:MOST_ROWS]]
    versions = [Mark(place(run, update.at), "train tick") for update in _some(run.updates, 200)]
    updates = row("updates", [], marks=versions, value=str(len(run.updates)), tip="when a policy version was made")
    left = f"; {len(ordered) - MOST_ROWS} more processes are not shown" if len(ordered) > MOST_ROWS else ""
    chart = rows([*made, updates, axis_row(time_axis(run), "mean")], label="how busy each process was", kind="gantt")
    return figure("Who was busy when", f"by process, over the whole run{left}", _stages_key(), chart)


def _stages_key() -> Markup:
    return legend([(stage, stage) for stage in STAGES])


def _colour(worker: WorkerSample) -> str:
    return next((stage for stage in worker.stages if stage in STAGES), "none")


def _rank(colour: str) -> int:
    return STAGES.index(colour) if colour in STAGES else len(STAGES)


def _some(items: Sequence, most: int) -> Sequence:  # type: ignore[type-arg] # of anything
    return items[:: -(-len(items) // most)] if len(items) > most else items


def _busy_row(run: RunData, name: str, colour: str, parts: Sequence[Sequence[SystemSample]]) -> Markup:
    shares: list[tuple[float, str] | None] = []
    for number, samples in enumerate(parts):
        found = [busy for sample in samples if (busy := _busy(sample, name)) is not None]
        when = time_label(round(number * run.duration / len(parts)))
        share = statistics.fmean(found) if found else None
        shares.append(None if share is None else (share, f"{name} at {when}: {numbers.percent(share)} busy"))
    bars, tips = cells(shares, colour)
    known = [cell[0] for cell in shares if cell is not None]
    return row(name, bars, value=numbers.percent(statistics.fmean(known) if known else None), tips=tips)


def _busy(sample: SystemSample, name: str) -> float | None:
    if name == "broker":
        return min(1.0, sample.broker.busy)
    worker = sample.workers.get(name)
    return None if worker is None else 0.0 if worker.suspect else min(1.0, worker.busy)


def _detail(run: RunData) -> Markup:
    """Every single task of a few seconds from the middle of training."""
    spans = [span for turn in run.turns for span in turn.spans if span.seconds]
    spans += [span for update in run.updates for span in update.spans]
    if not any(span.stage == Stage.BENCH for span in spans):
        return Markup("")
    start = _middle(run, spans)
    inside = [span for span in spans if span.finished > start and span.started < start + DETAIL_S]
    lanes = _lanes(inside)
    made = [
        row(name, [Bar(_at(s.started, start), _at(s.finished, start), f"{s.stage} s5") for s in mine], value=len(mine))
        for name, mine in lanes[:MOST_ROWS]
    ]
    axis = [(100 * tick / DETAIL_S, time_label(tick)) for tick in time_ticks(DETAIL_S, 6)]
    title = f"{DETAIL_S:.0f} seconds in detail"
    note = (
        f"from {numbers.seconds(start)} into the run: a bar is one task; a worker with several slots has several rows"
    )
    return figure(title, note, rows([*made, axis_row(axis, "tasks")], label="single tasks", kind="gantt"))


def _at(moment: float, start: float) -> float:
    return min(100.0, max(0.0, 100 * (moment - start) / DETAIL_S))


def _middle(run: RunData, spans: Sequence[StageSpan]) -> float:
    """A moment shortly before the update in the middle of training."""
    updates = [update.start for update in run.updates if update.start is not None]
    wanted = updates[len(updates) // 2] if updates else sorted(span.started for span in spans)[len(spans) // 2]
    return max(0.0, wanted - DETAIL_S / 4)


def _lanes(spans: Sequence[StageSpan]) -> list[tuple[str, list[StageSpan]]]:
    """Spans by worker and slot, so that those of one row never overlap; stages in their order."""
    lanes: dict[str, list[list[StageSpan]]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.started):
        mine = lanes[f"{_rank(span.stage)}{span.worker or span.stage}"]
        free = next((lane for lane in mine if lane[-1].finished <= span.started + 1e-3), None)
        if free is None:
            mine.append([span])
        else:
            free.append(span)
    return [
        (f"{key[1:]} · {number}" if len(mine) > 1 else key[1:], lane)
        for key, mine in sorted(lanes.items())
        for number, lane in enumerate(mine[:MOST_LANES], start=1)
    ]


# ── over time ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _staleness(run: RunData) -> Markup:
    by_version: dict[int, list[int]] = defaultdict(list)
    for turn in run.training:
        if turn.stats.staleness is not None:
            by_version[turn.stats.policy_version + turn.stats.staleness + 1].append(turn.stats.staleness)
    if not by_version:
        return Markup("")
    found = sorted(by_version.items())
    mean = Series("mean", [(float(v), statistics.fmean(ages)) for v, ages in found], "c1")
    most = Series("max", [(float(v), float(max(ages))) for v, ages in found], "c2")
    axis = version_axis(run)
    chart = line_chart(
        [mean, most], label="staleness by policy version", y_ends=(0.0, 1.0), x_ends=axis.ends, x_ticks=axis.ticks()
    )
    return figure("Staleness", "versions from writing to training, by the policy version that was made", chart)


def _queues(run: RunData) -> list[Markup]:
    if len(run.system) < 2:
        return []
    waiting = {stage: [(s.t, float(s.queues.get(stage, 0))) for s in run.system] for stage in QUEUES}
    oldest = {stage: [(s.t, s.oldest_s.get(stage, 0.0)) for s in run.system] for stage in QUEUES}
    return [
        _by_stage(run, waiting, "Queues", "tasks waiting"),
        _by_stage(run, oldest, "Longest wait", "seconds that the oldest task has waited"),
    ]


def _by_stage(run: RunData, points: Mapping[str, Points], title: str, note: str) -> Markup:
    lines = [Series(stage, found, stage) for stage, found in points.items() if any(value for _, value in found)]
    if not lines:
        return Markup("")
    key = legend([(line.colour, line.name) for line in lines])
    return figure(title, note, key, _over_time(run, lines, note))


def _over_time(run: RunData, lines: Sequence[Series], label: str) -> Markup:
    return line_chart(
        lines, label=label, x_format=_clock, x_ends=(0.0, run.duration), labels="", x_ticks=time_ticks(run.duration, 5),
        guides=[update.at for update in _some(run.updates, MOST_GUIDES)],
    )  # fmt: skip


def _processes(run: RunData) -> list[Markup]:
    """Memory and event-loop lag of one worker of each stage."""
    names = {_colour(w): name for sample in run.system[-1:] for name, w in sorted(sample.workers.items(), reverse=True)}
    if len(run.system) < 2:
        return []
    seen = {stage: [(s.t, s.workers[name]) for s in run.system if name in s.workers] for stage, name in names.items()}
    memory = {stage: [(t, worker.rss_mb / 1000) for t, worker in found] for stage, found in seen.items()}
    lag = {stage: [(t, worker.lag_ms) for t, worker in found] for stage, found in seen.items()}
    return [
        _by_stage(run, memory, "Memory", "GB resident, one process of each stage"),
        _by_stage(run, lag, "Event-loop lag", "ms, one process of each stage"),
    ]


def _throughput(run: RunData) -> Markup:
    turns = sorted(turn.at for turn in run.turns if turn.at is not None)
    if len(turns) < 8:
        return Markup("")
    parts = binned(turns, float, 40, 0.0, run.duration)
    width = run.duration / 40
    line = Series("rollouts", [((i + 0.5) * width, len(part) / width) for i, part in enumerate(parts)], "c6")
    chart = _over_time(run, [line], "rollouts scored a second")
    return figure("Throughput", "rollouts scored a second", chart)


def _clock(moment: float) -> str:
    return time_label(round(moment))
