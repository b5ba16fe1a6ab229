"""How `kbrl inspect` looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kbrl_async.runs.archive.archive import Row
from protocols.records import BenchReport, BuildReport, StageReport, Timing, Verdict

if TYPE_CHECKING:
    from kbrl_async.cli.inspect import Rollout, Turn


def show(rollout: Rollout, console: Console) -> None:
    for turn in rollout.turns:
        _turn(turn, console)
    _group(rollout, console)


def _turn(turn: Turn, console: Console) -> None:
    row = turn.row
    console.rule(f"[bold]{row.task_id}[/]  {row.problem_id}", align="left")
    console.print(_pairs(_facts(turn)))
    if turn.request is None:
        console.print("\nits record was not kept (archive.keep), or has been evicted (archive.max_bytes)", style="dim")
        return
    _text("prompt", turn.prompt, console)
    _text("answer", turn.answer, console)
    if turn.candidate and turn.candidate.strip() not in turn.answer:
        console.print("\n[bold]kernel[/]")
        console.print(Syntax(turn.candidate, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print("\n[bold]stages[/]")
    console.print(_spans(row))
    if turn.build is not None:
        _build(turn.build, console)
    if turn.bench is not None:
        _bench(turn.bench, console)
    if turn.parts:
        _reward(turn, console)


def _facts(turn: Turn) -> Iterable[tuple[str, str]]:
    row = turn.row
    yield "group", f"{row.group_id} ({row.purpose}, turn {row.turn + 1}, {row.role})"
    yield (
        "policy",
        f"version {row.policy_version}"
        + (
            f", trained on by version {row.trained_on} ({row.trained_on - row.policy_version} old), {row.batch_id}"
            if row.trained_on is not None
            else ""
        ),
    )
    yield "ended", row.fault if row.status == "ok" else f"{row.status}: never scored"
    if row.rule:
        yield "rule", row.rule
    if row.reward is not None:
        yield "reward", f"{row.reward:.4f}"
    if row.turn_return is not None and row.advantage is not None:
        yield "return", f"{row.turn_return:.4f}, advantage {row.advantage:+.4f}"
    if turn.request is not None and turn.request.examples:
        yield "examples", f"{', '.join(turn.request.examples)} of index {turn.request.index_version}"
    if turn.generation is not None:
        yield "tokens", f"{len(turn.generation.prompt_ids)} asked, {row.tokens} written, ended by {_end(turn)}"


def _end(turn: Turn) -> str:
    assert turn.generation is not None
    return "itself" if turn.generation.finish_reason == "stop" else "max_tokens"


def _spans(row: Row) -> Table:
    table = Table("stage", "waited, s", "worked, s", "by", box=None, padding=(0, 2))
    for span in row.spans:
        table.add_row(span.stage, f"{span.waited:.3f}", f"{span.seconds:.3f}", span.worker)
    return table


def _build(build: BuildReport, console: Console) -> None:
    console.print("\n[bold]static check and compile[/]")
    console.print(_steps(build.stages))
    cached = ", from the cache" if build.cached else ""
    console.print(_pairs([("result", f"{build.fault}{cached}"), ("toolchain", build.toolchain), ("rule", build.rule)]))
    _text("compiler", "\n".join(filter(None, (build.message, build.hint))), console)
    if build.kernels:
        console.print(_pairs([("kernels", ", ".join(build.kernels))]))


def _bench(bench: BenchReport, console: Console) -> None:
    console.print("\n[bold]correctness and timing[/]")
    console.print(_steps(bench.stages))
    console.print(_pairs(_verdict(bench.verdict)))
    if bench.timing is not None:
        console.print(_pairs(_timing(bench.timing)))


def _verdict(verdict: Verdict) -> Iterable[tuple[str, str]]:
    yield "verdict", f"{verdict.fault}, {verdict.passed} of {verdict.total} secret input sets"
    if verdict.max_abs_error is not None:
        allowed = f", {verdict.tolerance:.3g} allowed there" if verdict.tolerance is not None else ""
        yield "error", f"{verdict.max_abs_error:.3g} at most{allowed} {verdict.tolerance_note}".rstrip()
    for name in ("rule", "message", "hint", "evidence"):
        yield name, getattr(verdict, name)
    missing = f" (missing: {', '.join(verdict.isolation_missing)})" if verdict.isolation_missing else ""
    yield "isolation", verdict.isolation + missing


def _timing(timing: Timing) -> Iterable[tuple[str, str]]:
    share = f"{timing.confidence:.0%} interval {timing.lo:.3f} … {timing.hi:.3f}"
    yield "speedup", f"{timing.speedup:.3f}, {share}{'' if timing.is_faster else ': not proven faster'}"
    yield "times", f"{timing.candidate_ms:.4g} ms against {timing.reference_ms:.4g} ms, {timing.n} pairs"
    yield "stopped", f"{timing.stopped} ({timing.method})"
    for name, (speedup, lo, hi) in timing.baselines.items():
        yield f"over {name}", f"{speedup:.3f}, {lo:.3f} … {hi:.3f}"
    if timing.roofline is not None:
        yield "roofline", f"{timing.roofline:.0%} of what this hardware can do"
    yield "hardware", timing.hardware


def _steps(stages: Iterable[StageReport]) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    for stage in stages:
        table.add_row(stage.name, str(stage.fault), f"{stage.seconds:.3f} s", Text(stage.detail))
    return table


def _reward(turn: Turn, console: Console) -> None:
    console.print(f"\n[bold]reward[/] {f'(preset {turn.preset})' if turn.preset else ''}")
    table = Table("part", "value", "weight", "pays", box=None, padding=(0, 2))
    for part in turn.parts:
        table.add_row(part.name, f"{part.value:.3f}", f"{part.weight:g}", f"{part.value * part.weight:.4f}")
    console.print(table)


def _group(rollout: Rollout, console: Console) -> None:
    end = f": {rollout.group.outcome} {rollout.group.reason}".rstrip() if rollout.group else ""
    console.rule(f"group {rollout.turns[0].row.group_id}{end}", align="left")
    table = Table("turn", "ended", "reward", "return", "advantage", "speedup", "policy", box=None, padding=(0, 2))
    for row in rollout.mates:
        interval = f"{row.speedup:.2f} [{row.lo:.2f}, {row.hi:.2f}]" if row.speedup is not None else ""
        style = "bold" if row.rollout_id == rollout.rollout_id else ""
        table.add_row(
            row.task_id,
            row.fault or row.status,
            _number(row.reward),
            _number(row.turn_return),
            _number(row.advantage),
            Text(interval),
            str(row.policy_version),
            style=style,
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(value))
    return table


def _text(title: str, content: str, console: Console) -> None:
    if content:
        console.print(f"\n[bold]{title}[/]")
        console.print(Text(content.rstrip()))
