"""A `live.View` as text: fits 80 × 24 and uses what is wider or higher. Pure.

::

    run, state, versions          one line, and one that says how far the run is, or that the broker is away
    rates and the last update     three lines
    stages                        one line each
    workers                       as many as there is room for, suspects first
    errors                        what room is left, newest first
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kbrl_async.runs.telemetry.live import LEARNER_FACTS, Error, StageView, View, WorkerView
from kbrl_async.runs.telemetry.log_reading import printable

WIDE = 112
"""From this width on there are bars, and more columns."""
_BAR = 10
_FULL = "━"
_BAR_STYLE = "bar"
"""Of a cell that is one: green as far as it is full."""
_SLOW_LOOP_MS = 500
_STATES = {
    "running": ("●", "green"),
    "stopping": ("◐", "yellow"),
    "away": ("○", "red"),
    "ended": ("■", "cyan"),
    "stopped": ("■", "yellow"),
    "working": ("●", "green"),
    "idle": ("·", "dim"),
    "suspect": ("!", "bold red"),
    "starting": ("·", "yellow"),
    "missing": ("!", "bold red"),
}
_SHOWN_COUNTERS = ("submitted", "finished", "live", "lost", "poisoned", "stale", "busy")
_LEAST_ERRORS = 1


def render(view: View, width: int = 80, height: int = 24) -> RenderableType:
    """The whole screen in at most `height` lines of at most `width` characters."""
    wide = width >= WIDE
    stages = _stages(view.stages, wide, waits=any(worker.state == "starting" for worker in view.workers))
    header = _header(view)
    room = height - len(header) - (len(view.stages) + 2) - 2
    wanted = min(len(view.workers), max(1, room - _LEAST_ERRORS - 1))
    left = room - wanted - (wanted < len(view.workers))
    parts = [*header, Text(), *stages, Text(), *_workers(view.workers, wanted, wide)]
    if left > 1:
        parts += [Text(), *_errors(view.errors, left - 1, width)]
    return Group(*parts)


def _header(view: View) -> list[RenderableType]:
    sign, style = _STATES[view.state]
    first = Table.grid(expand=True)
    first.add_column(no_wrap=True, ratio=1)
    first.add_column(justify="right", no_wrap=True)
    title = Text.assemble(
        (view.run or "run", "bold"), "  ", (f"{sign} {view.state}", style), f"  policy v{view.policy_version}"
    )
    first.add_row(title, Text(f"up {duration(view.uptime_s)}  Ctrl-C leaves, the run goes on", "dim"))
    if view.state == "away":
        told = f"the broker has not answered for {duration(view.away_s)}; this is how things stood. Trying again …"
        return [first, Text(told, "red"), _rates(view), _update(view), _counters(view)]
    return [first, *_progress(view), _rates(view), _update(view), _learner(view), _counters(view)]


def _progress(view: View) -> list[RenderableType]:
    seen = view.progress
    if seen is None:
        return []
    left = seen.left_s(view.at)
    return [_pairs((seen.phase, seen.note), *((("left", duration(left)),) if left is not None else ()))]


def _pairs(*pairs: tuple[str, str]) -> Text:
    return _line([Text.assemble((f"{name} ", "dim"), value) for name, value in pairs])


def _line(parts: Sequence[Text]) -> Text:
    line = Text("  ").join(parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _rates(view: View) -> Text:
    rates, limit = view.rates, view.facts.get("max_staleness")
    allowed = "" if limit is None else f" of {limit:.0f}"
    return _pairs(
        ("rollouts", f"{rates.rollouts_per_s:.1f}/s" if rates else "–"),
        ("tokens", f"{rates.tokens_per_s:.0f}/s" if rates else "–"),
        ("updates", f"{rates.updates_per_h:.0f}/h" if rates else "–"),
        ("staleness", f"{view.staleness_max}{allowed}"),
    )


def _update(view: View) -> Text:
    facts = view.facts
    if "updates" not in facts:
        return _pairs(("last update", "none yet"))
    total = f"/{facts['max_steps']:.0f}" if "max_steps" in facts else ""
    return _pairs(
        ("update", f"{facts.get('updates', view.policy_version):.0f}{total}"),
        *((("version", f"{facts['answers_of']:.0f}"),) if "answers_of" in facts else ()),
        *((("reward", f"{facts['reward_mean']:.3f}"),) if "reward_mean" in facts else ()),
        *((name, f"{facts[key]:.0%}") for name, key in _RATES if key in facts),
        *((("speedup", f"{facts['speedup_mean']:.2f}×"),) if "speedup_mean" in facts else ()),
    )


_RATES = (
    ("compile", "compile_rate"), ("correct", "correct_rate"), ("workloads", "workload_rate"), ("fast_1", "fast_1"),
    ("proven", "fast_1_proven"),
)  # fmt: skip


def _learner(view: View) -> Text:
    shown = [(name.replace("_", " "), f"{view.facts[name]:.3f}") for name in LEARNER_FACTS if name in view.facts]
    return _pairs(*shown) if shown else _pairs(("learner", "no update yet"))


def _counters(view: View) -> Text:
    names = {"poisoned": "given up", "busy": "refused"}
    bad = ("lost", "poisoned")
    shown = [(name, view.counters.get(name, 0)) for name in _SHOWN_COUNTERS]
    return _line(
        [
            Text.assemble((f"{names.get(name, name)} ", "dim"), (str(value), "yellow" if value and name in bad else ""))
            for name, value in shown
        ]
    )


Cell = tuple[str, str]
"""Text and style."""


Column = tuple[str, str, int]
"""Name, `<` or `>`, and the least width, so that columns stay where they are while figures change."""


def _lines(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[RenderableType]:
    """Rows below their headings.

    rich's Table measures and wraps each cell, which for many workers would cost more than all the rest.
    """
    heads = [(name, "dim") for name, _, _ in columns]
    widths = [
        max(least, *(len(row[place][0]) for row in (heads, *rows))) for place, (_, _, least) in enumerate(columns)
    ]
    made: list[RenderableType] = []
    for row in (heads, *rows):
        line = Text(no_wrap=True, overflow="ellipsis")
        for (text, style), (_, side, _), width in zip(row, columns, widths, strict=True):
            if style == _BAR_STYLE:
                full = text.count(_FULL)
                line.append(text[:full], "green").append(text[full:], "dim").append("  ")
            else:
                line.append(f"{text:{side}{width}}  ", style)
        line.rstrip()
        made.append(line)
    return made


def _stages(stages: Sequence[StageView], wide: bool, waits: bool) -> list[RenderableType]:
    bars: list[Column] = [("in use", "<", _BAR)] if wide else []
    columns: list[Column] = [
        ("stage", "<", 8), ("queued", ">", 6), ("in flight", ">", 9), ("credit", ">", 6), *bars, ("workers", ">", 7),
        ("oldest", ">", 6), ("versions behind", ">", 15),
    ]  # fmt: skip
    return _lines(columns, [_stage(stage, wide, waits) for stage in stages])


def _stage(stage: StageView, wide: bool, waits: bool) -> list[Cell]:
    nobody = stage.queued and not stage.workers and not waits
    behind = f"{stage.lag_mean:.1f}, max {stage.lag_max}" if stage.lag_max else "–"
    return [
        (stage.stage, "bold"),
        (str(stage.queued), "" if stage.queued else "dim"),
        (str(stage.in_flight), "" if stage.in_flight else "dim"),
        (str(stage.credit), ""),
        *([bar(stage.in_flight / stage.credit if stage.credit else 0.0)] if wide else []),
        (str(stage.workers), "bold red" if nobody else ""),
        (duration(stage.oldest_s) if stage.oldest_s else "–", ""),
        (behind, ""),
    ]


def _workers(workers: Sequence[WorkerView], shown: int, wide: bool) -> list[RenderableType]:
    bars: list[Column] = [("", "<", _BAR)] if wide else []
    more: list[Column] = [("GPU mem", ">", 7), ("done", ">", 6), ("silent", ">", 6)] if wide else []
    columns: list[Column] = [
        ("process", "<", 19), ("state", "<", 8), ("leases", ">", 6), ("busy", ">", 4), *bars, ("cores", ">", 5),
        ("GPU", ">", 4), ("mem", ">", 4), ("lag", ">", 5), ("done/s", ">", 6), *more,
    ]  # fmt: skip
    made = _lines(columns, [_worker(worker, wide) for worker in workers[:shown]])
    hidden = len(workers) - shown
    return [*made, Text(f"… and {hidden} more; --json has all", "dim")] if hidden > 0 else made


def _worker(worker: WorkerView, wide: bool) -> list[Cell]:
    sign, style = _STATES[worker.state]
    row: list[Cell] = [
        (_cut(printable(worker.worker_id), 40 if wide else 19), "bold"),
        (f"{sign}{worker.state}" if sign == "!" else worker.state, style),
        (f"{worker.leases}/{worker.credit}" if worker.stages else "–", ""),
        (f"{worker.busy:.0%}", ""),
        *([bar(worker.busy)] if wide else []),
        (f"{worker.cpu:.2f}", ""),
        ("–" if worker.gpu is None else f"{worker.gpu:.0%}", ""),
        (memory(worker.rss_mb), ""),
        (f"{worker.lag_ms:.0f}ms", "yellow" if worker.lag_ms > _SLOW_LOOP_MS else ""),
        ("–" if worker.done_per_s is None else f"{worker.done_per_s:.1f}", ""),
    ]
    if wide:
        row += [
            ("–" if worker.gpu_mb is None else memory(worker.gpu_mb), ""),
            (str(worker.done), ""),
            (duration(worker.silent_s), "red" if worker.state == "suspect" else "dim"),
        ]
    return row


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _errors(errors: Sequence[Error], room: int, width: int) -> list[RenderableType]:
    if not errors:
        return [Text("no errors", "dim")]
    lines = []
    for error in errors[:room]:
        clock = time.strftime("%H:%M:%S", time.localtime(error.at))
        line = Text.assemble((clock, "dim"), "  ", (printable(error.who), "red"), "  ", printable(error.what))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return list(lines)


def bar(share: float) -> Cell:
    """`━━━━━━────` for .6."""
    full = round(min(1.0, max(0.0, share)) * _BAR)
    return _FULL * full + "─" * (_BAR - full), _BAR_STYLE


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m 05s`, `2h 07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def memory(mb: float) -> str:
    return f"{mb / 1024:.1f}G" if mb >= 1000 else f"{mb:.0f}M"
