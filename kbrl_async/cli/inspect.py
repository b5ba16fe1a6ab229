"""`kbrl inspect`: one rollout from prompt to gradient, as the run's archive has it.

::

    ROLLOUT ─ exact id, else the one id that begins so ─▶ turns ─▶ prompt · answer · stages · reward · group
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from kbrl_async.cli.inspect_show import show
from kbrl_async.cli.summary import find
from kbrl_async.errors import UserError
from kbrl_async.rollouts.curriculum import STAGES
from kbrl_async.rollouts.rewards.parts import PART_NAMES, parts_of
from kbrl_async.rollouts.rewards.presets import Preset, find_preset, reward_of
from kbrl_async.runs.archive.archive import FILE, Archive, GroupEnd, Row
from kbrl_async.runs.config import Config
from kbrl_async.runs.folder import LATEST, load_run
from protocols.records import BenchReport, BuildReport, Frame, Generation, RolloutRequest

NAME = "inspect"
HELP = "print a rollout: prompt, answer, each stage's report, reward, advantage"
PIPED = 140
"""Width where there is no terminal to be as wide as."""
SHOWN = 12
"""Ids that are named where several begin as asked."""


class Part(msgspec.Struct, frozen=True):
    """One part of a turn's reward: it pays weight × value."""

    name: str
    value: float
    weight: float


class Turn(msgspec.Struct, frozen=True):
    """One turn: its columns, and its record as far as that was kept."""

    row: Row
    prompt: str = ""
    answer: str = ""
    candidate: str = ""
    request: RolloutRequest | None = None
    generation: Generation | None = None
    build: BuildReport | None = None
    bench: BenchReport | None = None
    preset: str = ""
    parts: tuple[Part, ...] = ()


class Rollout(msgspec.Struct, frozen=True):
    """What is printed."""

    rollout_id: str
    turns: tuple[Turn, ...]
    mates: tuple[Row, ...]
    """All turns of its group, its own too."""
    group: GroupEnd | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollout", metavar="ROLLOUT", help="id of a rollout or turn, or how it begins: g000012.r3")
    parser.add_argument("--run", metavar="RUN", default=LATEST, help="folder or name; default: the newest")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = find(args.run)
    with Archive(run_dir / FILE) as archive:
        found = inspect(archive, args.rollout, load_run(run_dir))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found, order="deterministic")).decode())
    else:
        console = Console()
        show(found, console if console.is_terminal else Console(width=max(console.width, PIPED)))
    return 0


def inspect(archive: Archive, wanted: str, config: Config | None = None) -> Rollout:
    """Everything about the rollout `wanted`. UserError where none, or several, begin so."""
    rows = _turns(archive, wanted)
    first = rows[0]
    mates = tuple(archive.rows(group_id=first.group_id, problem_id=first.problem_id))
    turns = tuple(_turn(row, archive.record(row.task_id), config) for row in rows)
    return Rollout(first.rollout_id, turns, mates, archive.groups().get(first.group_id))


def _turns(archive: Archive, wanted: str) -> list[Row]:
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


def _turn(row: Row, record: Sequence[Frame], config: Config | None) -> Turn:
    frames: dict[type, Any] = {type(frame): frame for frame in record}
    request, generation = frames.get(RolloutRequest), frames.get(Generation)
    name, parts = _parts(row, record, config)
    return Turn(
        row,
        request.prompt if request else "",
        generation.text if generation else "",
        generation.candidate.source if generation and generation.candidate else "",
        request,
        generation,
        frames.get(BuildReport),
        frames.get(BenchReport),
        name,
        parts,
    )


def _parts(row: Row, record: Sequence[Frame], config: Config | None) -> tuple[str, tuple[Part, ...]]:
    """The preset that the turn was paid by, and its parts; nothing where it wrote no kernel or failed by our fault."""
    parts = parts_of(record) if record and row.reward is not None and row.role != "verifier" else None
    if parts is None:
        return "", ()
    values = {name: float(getattr(parts, name)) for name in PART_NAMES}
    for name, preset in _presets(config):
        if abs(reward_of(parts, preset) - (row.reward or 0.0)) < 1e-9:
            paid = {part: weight for part, weight in preset.weights.items() if weight}
            return name, tuple(Part(part, values[part], weight) for part, weight in paid.items())
    return "", tuple(Part(name, value, 0.0) for name, value in values.items())


def _presets(config: Config | None) -> list[tuple[str, Preset]]:
    """Those that may have paid: the run's own, or each stage of reward_preset=auto."""
    if config is None:
        return []
    builder = config.dataset_builder
    names = STAGES if builder.reward_preset == "auto" else (builder.reward_preset,)
    return [(name, find_preset(name, builder.reward_weights)) for name in names]
