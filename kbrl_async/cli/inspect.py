"""`kbrl inspect`: one rollout from prompt to gradient, as the run's archive has it.

::

    ROLLOUT ─ exact id, else the one id that begins so ─▶ turns ─▶ prompt · answer · stages · reward · group
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kbrl_async.cli.shared import add_old_run, add_run, facts, print_json, run_of
from kbrl_async.errors import UserError
from kbrl_async.rollouts.curriculum import STAGES
from kbrl_async.rollouts.rewards.parts import earns, part_of
from kbrl_async.rollouts.rewards.presets import Preset, find_presets, reward_of
from kbrl_async.rollouts.settings import REWARD_PARTS
from kbrl_async.runs.archive.archive import FILE, ArchiveReader, GroupEnd, TurnRow
from kbrl_async.runs.config import Config
from kbrl_async.runs.folder import load_run
from protocols.records import BenchReport, BuildReport, Generation, RolloutRequest, StageReport, Timing, Verdict
from protocols.rollout import Record

SHOWN = 12
"""Ids that are named where several begin as asked."""


class PaidPart(msgspec.Struct, frozen=True):
    """One part of a turn's reward: it pays weight × value."""

    name: str
    value: float
    weight: float


class InspectedTurn(msgspec.Struct, frozen=True):
    """One turn: its columns, and its record as far as that was kept."""

    row: TurnRow
    prompt: str = ""
    answer: str = ""
    candidate: str = ""
    request: RolloutRequest | None = None
    generation: Generation | None = None
    build: BuildReport | None = None
    bench: BenchReport | None = None
    preset: str = ""
    parts: tuple[PaidPart, ...] = ()


class Rollout(msgspec.Struct, frozen=True):
    """What is printed."""

    rollout_id: str
    turns: tuple[InspectedTurn, ...]
    mates: tuple[TurnRow, ...]
    """All turns of its group, its own too."""
    group: GroupEnd | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_old_run(parser)
    parser.add_argument("rollout", metavar="ROLLOUT", help="id of a rollout or turn, or how it begins: g000012.r3")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = run_of(args)
    with ArchiveReader(run_dir / FILE) as archive:
        found = inspect(archive, args.rollout, load_run(run_dir))
    if args.json:
        print_json(found, pretty=True)
    else:
        show(found, Console())
    return 0


def inspect(archive: ArchiveReader, wanted: str, config: Config | None = None) -> Rollout:
    """Everything about the rollout `wanted`. UserError where none, or several, begin so."""
    rows = _turns(archive, wanted)
    first = rows[0]
    mates = tuple(archive.rows(group_id=first.group_id, problem_id=first.problem_id))
    turns = tuple(_turn(row, archive.record(row.task_id), config) for row in rows)
    return Rollout(first.rollout_id, turns, mates, archive.groups().get(first.group_id))


def _turns(archive: ArchiveReader, wanted: str) -> list[TurnRow]:
    exact = list(archive.rows(rollout_id=wanted)) or list(archive.rows(task_id=wanted))
    if exact:
        return exact
    rows = list(archive.rows(prefix=wanted))
    names = list(dict.fromkeys(row.rollout_id for row in rows))
    if not names:
        raise UserError(f"no rollout begins with {wanted!r}", "Ids look like g000012.r3, or eval-before.L1/03_relu.0")
    if len(names) > 1:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(f"{len(names)} rollouts begin with {wanted!r}", f"One of {', '.join(names[:SHOWN])}{more}")
    return [row for row in rows if row.rollout_id == names[0]]


def _turn(row: TurnRow, record: Record | None, config: Config | None) -> InspectedTurn:
    if record is None:
        return InspectedTurn(row)
    generation = record.generation
    return InspectedTurn(
        row,
        record.request.prompt,
        generation.text if generation is not None else "",
        record.source,
        record.request,
        generation,
        record.build,
        record.bench,
        *_parts(row, record, config),
    )


def _parts(row: TurnRow, record: Record, config: Config | None) -> tuple[str, tuple[PaidPart, ...]]:
    """The preset that the turn was paid by, and its parts; nothing where it wrote no kernel or failed by our fault."""
    if row.reward is None or not earns(record):
        return "", ()
    for name, preset in _presets(config):
        if abs(reward_of(record, preset) - row.reward) < 1e-9:
            paid = {part: weight for part, weight in preset.weights.items() if weight}
            return name, tuple(PaidPart(part, part_of(record, part), weight) for part, weight in paid.items())
    return "", tuple(PaidPart(name, part_of(record, name), 0.0) for name in REWARD_PARTS.ours)


def _presets(config: Config | None) -> list[tuple[str, Preset]]:
    """Those that may have paid: the run's own, or each stage of reward.preset=auto."""
    if config is None:
        return []
    found = find_presets(config.reward, overlong=config.punishes_overlong)
    names = STAGES if len(found) > 1 else (config.reward.preset,)
    return list(zip(names, found, strict=True))


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


def show(rollout: Rollout, console: Console) -> None:
    for turn in rollout.turns:
        _show_turn(turn, console)
    _group(rollout, console)


def _show_turn(turn: InspectedTurn, console: Console) -> None:
    row = turn.row
    console.rule(f"[bold]{row.task_id}[/]  {row.problem_id}", align="left")
    console.print(facts(_of_turn(turn)))
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


def _of_turn(turn: InspectedTurn) -> Iterable[tuple[str, str]]:
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


def _end(turn: InspectedTurn) -> str:
    assert turn.generation is not None
    return "itself" if turn.generation.finish_reason == "stop" else "max_tokens"


def _spans(row: TurnRow) -> Table:
    table = Table("stage", "waited, s", "worked, s", "by", box=None, padding=(0, 2))
    for span in row.spans:
        table.add_row(span.stage, f"{span.waited:.3f}", f"{span.seconds:.3f}", span.worker)
    return table


def _build(build: BuildReport, console: Console) -> None:
    console.print("\n[bold]static check and compile[/]")
    console.print(_steps(build.stages))
    cached = ", from the cache" if build.cached else ""
    console.print(facts([("result", f"{build.fault}{cached}"), ("toolchain", build.toolchain), ("rule", build.rule)]))
    _text("compiler", "\n".join(filter(None, (build.message, build.hint))), console)
    if build.kernels:
        console.print(facts([("kernels", ", ".join(build.kernels))]))


def _bench(bench: BenchReport, console: Console) -> None:
    from kbrl_async.kernels.problems.cases import workload_lines

    console.print("\n[bold]correctness and timing[/]")
    console.print(_steps(bench.stages))
    console.print(facts(_of_verdict(bench.verdict)))
    console.print(facts([("workload", line) for line in workload_lines(bench.verdict, bench.timing)]))
    if bench.timing is not None:
        console.print(facts(_of_timing(bench.timing)))


def _of_verdict(verdict: Verdict) -> Iterable[tuple[str, str]]:
    yield "verdict", f"{verdict.fault}, {verdict.passed} of {verdict.total} secret input sets"
    if verdict.max_abs_error is not None:
        allowed = f", {verdict.tolerance:.3g} allowed there" if verdict.tolerance is not None else ""
        yield "error", f"{verdict.max_abs_error:.3g} at most{allowed} {verdict.tolerance_note}".rstrip()
    for name in ("rule", "message", "hint", "evidence"):
        yield name, getattr(verdict, name)
    missing = f" (missing: {', '.join(verdict.isolation_missing)})" if verdict.isolation_missing else ""
    yield "isolation", verdict.isolation + missing


def _of_timing(timing: Timing) -> Iterable[tuple[str, str]]:
    share = f"{timing.confidence:.0%} interval {timing.lo:.3f} … {timing.hi:.3f}"
    yield "speedup", f"{timing.speedup:.3f}, {share}: {timing.claim}"
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


def _reward(turn: InspectedTurn, console: Console) -> None:
    console.print(f"\n[bold]reward[/] {f'(preset {turn.preset})' if turn.preset else ''}")
    table = Table("part", "value", "weight", "pays", box=None, padding=(0, 2))
    for part in turn.parts:
        table.add_row(part.name, f"{part.value:.3f}", f"{part.weight:g}", f"{part.value * part.weight:.4f}")
    console.print(table)


def _group(rollout: Rollout, console: Console) -> None:
    end = f": {rollout.group.outcome} {rollout.group.reason}".rstrip() if rollout.group else ""
    console.rule(f"group {rollout.turns[0].row.group_id}{end}", align="left")
    table = Table("turn", "ended", "reward", "return", "advantage", "speedup", "policy", box=None, padding=(0, 1))
    for row in rollout.mates:
        interval = f"{row.speedup:.2f} [{row.lo:.2f}, {row.hi:.2f}]" if row.speedup is not None else ""
        style = "bold" if row.rollout_id == rollout.rollout_id else ""
        table.add_row(
            row.task_id.removeprefix(f"{row.group_id}."),
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


def _text(title: str, content: str, console: Console) -> None:
    if content:
        console.print(f"\n[bold]{title}[/]")
        console.print(Text(content.rstrip()), soft_wrap=True)  # code is copied from here
