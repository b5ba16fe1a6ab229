"""The table that every operator enters."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kbrl_async.kernels.generator.draft import HEADS, IMAGE, ROWS, SEQUENCE, ProblemDraft

Write = Callable[[ProblemDraft], None]
VECTOR = "vector"
ANY = (ROWS, SEQUENCE, IMAGE, HEADS, VECTOR)
TABLES = (ROWS, SEQUENCE, HEADS)
"""Layouts whose last dimension holds the features."""
FULL = (*TABLES, IMAGE)


class DrawnOperator(msgspec.Struct, frozen=True):
    name: str
    group: str
    layouts: tuple[str, ...]
    write: Write
    """Raises `Unfit` where it can't follow."""
    cost: float
    """Its part of a problem's difficulty; 1 is an element-wise operation."""
    starts: bool
    """Whether a problem may begin with it."""


OPERATORS: dict[str, DrawnOperator] = {}


def operator(
    group: str, layouts: tuple[str, ...] = ANY, *, cost: float = 1.0, starts: bool = True, name: str = ""
) -> Callable[[Write], Write]:
    def enter(write: Write) -> Write:
        own = name or write.__name__
        OPERATORS[own] = DrawnOperator(own, group, layouts, write, cost, starts)
        return write

    return enter
