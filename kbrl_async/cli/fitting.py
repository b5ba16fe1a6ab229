"""`kbrl plan --model NAME --gpus N`: what fits on which GPU, part by part, and the settings for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from kbrl_async.cli.shared import print_json, say, table
from kbrl_async.errors import UserError
from kbrl_async.runs.config.loading import resolve
from kbrl_async.runs.config.sources import Setting
from kbrl_async.runs.sizing.advice import Advice, LayoutRow, Wish, as_tree, capacity_of, recommend
from kbrl_async.runs.sizing.footprint import BF16, GB
from kbrl_async.runs.sizing.layout import by_gpu, tenants
from kbrl_async.shapes import read_shape

RANK, LENGTH = 32, 8192


def add_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what fits, before any run (--model and --gpus)").add_argument
    add("--gpus", type=int, metavar="N", help="what of --model fits on N GPUs, and with which settings; nothing is run")
    add("--gpu-memory", type=float, metavar="GB", help="with --gpus: of one GPU, in 10^9 bytes, in place of --gpu NAME")
    add(
        "--lora-rank",
        type=int,
        default=RANK,
        metavar="R",
        help=f"with --gpus: of the adapter ({RANK}); 0: full weights",
    )
    add(
        "--length",
        type=int,
        default=LENGTH,
        metavar="L",
        help=f"with --gpus: longest prompt and answer ({LENGTH} tokens)",
    )


def run(args: argparse.Namespace) -> int:
    """:raises UserError: no model, no GPU, or sizes that are none."""
    if args.model is None:
        raise UserError("--gpus asks what of a model fits", "Add --model NAME or --model FOLDER")
    for name, least in (("gpus", 1), ("length", 1), ("lora_rank", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is too few", f"Give {least} or more")
    capacity = capacity_of(args.gpu, args.gpu_memory)
    wish = Wish(model=args.model, gpus=args.gpus, capacity=capacity, rank=args.lora_rank, length=args.length)
    advice = recommend(read_shape(args.model), wish)
    if args.json:
        print_json(_as_json(advice))
    else:
        show(advice, Console())
    return 0 if advice.settings else 1


def _as_json(advice: Advice) -> dict[str, Any]:
    shape = advice.shape
    rows = [
        {"name": row.name, "gpus": row.gpus, "fits": row.fits, "bytes": row.footprint.parts,
         "total": row.footprint.total, "largest": row.footprint.largest}
        for row in advice.rows
    ]  # fmt: skip
    counts = {"parameters": shape.parameters, "kv_bytes_per_token": shape.kv_bytes(BF16)}
    return {
        "shape": {**msgspec.to_builtins(shape), **counts},
        "wish": msgspec.to_builtins(advice.wish),
        "rows": rows,
        "settings": as_tree(advice.settings),
        "problem": advice.problem,
    }


def show(advice: Advice, console: Console) -> None:
    shape, wish = advice.shape, advice.wish
    say(
        f"{wish.model}: {shape.parameters / 1e9:.2f} billion weights ({shape.family}, {shape.layers} layers), "
        f"{shape.kv_bytes(BF16) / 1024:.0f} KiB of KV cache a token; {wish.length} tokens a sequence\n",
        console,
    )
    console.print(_table(advice.rows, wish))
    if advice.problem:
        say(f"does not fit: {advice.problem}", console)
        return
    say(
        f"for {wish.gpus} × {wish.capacity / GB:.0f} GB; save it as model.yaml, then kbrl train --config model.yaml",
        console,
    )
    say("\n".join(_together(advice)), console)
    say(yaml.safe_dump(as_tree(advice.settings), sort_keys=False).rstrip(), console)


def _together(advice: Advice) -> Iterator[str]:
    """What each GPU holds by these settings, all who share it; GPUs that hold the same in one line."""
    config = resolve([Setting(key, value, "plan") for key, value in advice.settings.items()])
    held: dict[str, list[int]] = {}
    for place, here in by_gpu(tenants(config, advice.shape, advice.wish.capacity)).items():
        parts = " + ".join(f"{t.name.partition('.')[0]} {t.footprint.total / GB:.1f}" for t in here)
        whole = f" = {sum(t.footprint.total for t in here) / GB:.1f}" if len(here) > 1 else ""
        held.setdefault(f"{parts}{whole} GB", []).append(place)
    for parts, places in held.items():
        yield f"# GPU {places[0]}{f' to {places[-1]}' if len(places) > 1 else ''}: {parts}"


SHOWN = 4
"""Parts that the table names; --json has all."""


def _table(rows: Sequence[LayoutRow], wish: Wish) -> Table:
    title = f"Memory of one GPU, {wish.capacity / GB:.0f} GB, for each alone"
    made = table(("", "GPUs", "GB on each", "fits", "largest parts, GB"), title, ("GPUs", "GB on each"))
    for row in rows:
        parts = sorted(row.footprint.parts, key=lambda name: -row.footprint.parts[name])[:SHOWN]
        told = ", ".join(f"{name} {row.footprint.gb(name):.1f}" for name in parts)
        made.add_row(row.name, str(row.gpus), f"{row.footprint.total / GB:.1f}", "yes" if row.fits else "no", told)
    return made
