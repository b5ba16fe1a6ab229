"""Cheats that public collections describe, each written anew as a candidate of ours, with the rule that refuses it.

Where they are described: KernelBench's checker and its hostile unit tests, robust-kbench, reports on Sakana's
engineer, Kevin, METR, CUDA-L1, DR.Kernel, GPU MODE's leaderboards and pygpubench, KernelArena's field guide, Makora's
KernelHacks.

A cheat is here only if it is refused where it is found out: one that is right all the same when its trick leads nowhere
(a clock replaced beside an honest kernel) is judged as the honest kernel that it is.
"""

from __future__ import annotations

import textwrap

import msgspec


class Cheat(msgspec.Struct, frozen=True):
    """`rules`: any of these is the right reason; a fault where it has no rule of its own."""

    source: str
    problem: str
    rules: tuple[str, ...]
    told_by: str


def indented(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * 8)
