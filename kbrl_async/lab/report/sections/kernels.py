"""The fastest kernels: their speedups as intervals against 1×, a table to sort, and their source."""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import Bar, Mark, axis_row, data_table, figure, row, rows, section
from kbrl_async.lab.report.markup import Content, Markup, element, join, source
from kbrl_async.lab.report.model import BestKernel, RunData
from kbrl_async.lab.report.scales import Scale
from kbrl_async.lab.report.sections.rollouts import link
from protocols.records import TIMING_CONFIDENCE

CONFIDENCE = f"{100 * TIMING_CONFIDENCE:.0f}\u00a0%"
MOST_INTERVALS, MOST_ROWS, MOST_SOURCES = 60, 300, 24
WIDEST = 2.0
"""Factor by which the axis goes beyond the slowest and the fastest kernel; intervals are cut there."""


def make(run: RunData) -> Markup:
    if not run.kernels:
        words = f"No correct kernel has a time that can be compared.{_disturbed(run)}"
        return section("kernels", "Kernels", words, Markup(" ")) if _disturbed(run) else Markup("")
    faster = sum(kernel.lo > 1 for kernel in run.kernels)
    intro = (
        f"Of each of {numbers.count(len(run.kernels), 'problem')} the correct kernel whose {CONFIDENCE} interval of "
        "the speedup begins highest. Proven faster than the reference, the whole interval above 1×: "
        f"{faster or 'none'}.{_disturbed(run)}"
    )
    return section("kernels", "Kernels", intro, _forest(run.kernels), _table(run), _sources(run.kernels))


def _disturbed(run: RunData) -> str:
    count = sum(turn.stats.is_disturbed for turn in run.turns)
    return f" Measurements that were disturbed, and rank nowhere: {count:,}." if count else ""


def _forest(kernels: Sequence[BestKernel]) -> Markup:
    shown = kernels[:MOST_INTERVALS]
    scale = Scale.logarithmic([*_ends(shown), 0.5, 2.0], 0.0, 100.0)
    one = scale.percent(1.0)
    made = [_interval(kernel, scale, one) for kernel in shown]
    axis = [(scale.percent(tick), f"{tick:g}×") for tick in scale.ticks()]
    left = f" The first {MOST_INTERVALS} of {len(kernels)}." if len(kernels) > MOST_INTERVALS else ""
    note = f"median of paired runs over the reference, and its {CONFIDENCE} interval; logarithmic.{left}"
    return figure("Speedups", note, rows([*made, axis_row(axis)], label="speedup intervals", kind="bare thin forest"))


def _ends(kernels: Sequence[BestKernel]) -> list[float]:
    """Of the intervals; one that says nothing (a bench that was disturbed all the time) does not stretch the axis."""
    least, most = min(kernel.speedup for kernel in kernels), max(kernel.speedup for kernel in kernels)
    return [min(most * WIDEST, max(least / WIDEST, end)) for kernel in kernels for end in (kernel.lo, kernel.hi)]


def _interval(kernel: BestKernel, scale: Scale, one: float) -> Markup:
    class_ = "fast" if kernel.lo > 1 else "slow" if kernel.hi >= 1 else "wrong"
    bar = Bar(scale.percent(kernel.lo), max(scale.percent(kernel.hi), scale.percent(kernel.lo)), f"{class_} s3")
    tip = f"{kernel.problem_id}: {numbers.times(kernel.speedup)} ({_between(kernel)})"
    mark = Mark(scale.percent(kernel.speedup), class_)
    return row(kernel.problem_id, [bar], value=numbers.times(kernel.speedup), marks=[mark], guides=[one], tip=tip)


def _between(kernel: BestKernel) -> str:
    return f"{numbers.times(kernel.lo)} … {numbers.times(kernel.hi)}"


def _table(run: RunData) -> Markup:
    baselines = sorted({name for kernel in run.kernels for name in kernel.baselines})
    has_times = any(kernel.candidate_ms is not None for kernel in run.kernels)
    heads = [("problem", ""), ("speedup", "n"), (f"{CONFIDENCE} interval", "n"), ("against 1×", "n")]
    heads += [("kernel", "n"), ("reference", "n")] if has_times else []
    heads += [(f"over {name}", "n") for name in baselines] + [("policy", "n"), ("found at", "n"), ("rollout", "")]
    head = element(
        "tr",
        join(element("th", name, class_=class_ or None, data_sort=str(i)) for i, (name, class_) in enumerate(heads)),
    )
    body = [_line(run, kernel, baselines, has_times) for kernel in run.kernels[:MOST_ROWS]]
    made = data_table(body, head, class_="scroll tall", kind="sortable")
    left = f"the first {MOST_ROWS} of {len(run.kernels):,}" if len(run.kernels) > MOST_ROWS else ""
    return figure("Kernels by problem", left, made)


def _line(run: RunData, kernel: BestKernel, baselines: Sequence[str], has_times: bool) -> Markup:
    who = f"{kernel.rollout_id}{f' turn {kernel.turn + 1}' if kernel.turn else ''}"
    values: list[tuple[Content, float | None]] = [
        (numbers.times(kernel.speedup), kernel.speedup),
        (_between(kernel), kernel.lo),
    ]
    values += [(_standing(kernel), kernel.lo)]
    if has_times:
        values += [(numbers.milliseconds(ms), ms) for ms in (kernel.candidate_ms, kernel.reference_ms)]
    values += [
        (_over(kernel, name), kernel.baselines[name][0] if name in kernel.baselines else None) for name in baselines
    ]
    version = None if kernel.policy_version is None else float(kernel.policy_version)
    values += [(f"v{kernel.policy_version}", version), (numbers.seconds(kernel.at), kernel.at)]
    cells = [element("td", shown, class_="n", data_v="" if key is None else f"{key:.6g}") for shown, key in values]
    return element("tr", element("td", kernel.problem_id), *cells, element("td", link(run, kernel.task_id, who)))


def _standing(kernel: BestKernel) -> str:
    return "proven faster" if kernel.lo > 1 else "proven slower" if kernel.hi < 1 else "not told"


def _over(kernel: BestKernel, name: str) -> str:
    return numbers.times(kernel.baselines[name][0]) if name in kernel.baselines else "–"


def _sources(kernels: Sequence[BestKernel]) -> Markup:
    shown = [kernel for kernel in kernels if kernel.source][:MOST_SOURCES]
    if not shown:
        return Markup("")
    parts = [_source(kernel, is_open=number == 0) for number, kernel in enumerate(shown)]
    return element("h3", "Source beside the reference") + join(parts)


def _source(kernel: BestKernel, *, is_open: bool) -> Markup:
    said = f"{numbers.times(kernel.speedup)}  ({_between(kernel)})"
    head = element("summary", element("b", kernel.problem_id), " ", element("small", said))
    sides = [
        _side("kernel" + (f", in {kernel.file}" if kernel.file else ""), kernel.source),
        _side("reference", kernel.reference),
    ]
    limits = [element("h4", "what limits it"), element("pre", kernel.profile)] if kernel.profile else []
    if kernel.workloads:
        limits = [element("h4", "by workload"), element("pre", "\n".join(kernel.workloads)), *limits]
    return element("details", head, *limits, element("div", *sides, class_="pair"), open=is_open)


def _side(title: str, text: str) -> Markup:
    return element("div", element("h4", title), source(text))
