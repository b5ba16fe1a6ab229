"""Which workloads a problem has: those that it names, its input groups, secret tails of shapes that it leaves free."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from kbrl_async.kernels.problems.declared import Declared, declared
from kbrl_async.kernels.problems.workloads import INPUTS, Bound, Workload, bind, tails
from protocols.records import Problem

MOST_GROUPS = 16
"""Of `get_input_groups()`: each call of it makes all of them."""


def named(problem: Problem) -> tuple[Workload, ...]:
    """What a problem says of its workloads, for whoever shows it; of input groups only the first is known."""
    return _named(declared(problem.source, problem.problem_id))


def cases(problem: Problem, rng: random.Random) -> Sequence[Bound]:
    """Every workload with the problem that it is. Empty: the problem as it stands is the only one. Groups and tails
    are proposals: those whose inputs nobody makes or takes are dropped by whoever tries.
    """
    found = declared(problem.source, problem.problem_id)
    if found.is_single:
        return ()
    secret = tails(found.free, INPUTS, rng)
    drawn = [msgspec.structs.replace(workload, dtype=found.dtype) for workload in secret]
    groups = [_group(number, found) for number in range(1, MOST_GROUPS)] if found.has_groups else []
    return [bind(problem, workload) for workload in (*_named(found), *groups, *drawn)]


def _named(found: Declared) -> tuple[Workload, ...]:
    rows = found.workloads or ((_group(0, found),) if found.has_groups else (Workload("nominal"),))
    return tuple(msgspec.structs.replace(row, dtype=row.dtype or found.dtype) for row in rows)


def _group(number: int, found: Declared) -> Workload:
    return Workload(f"group {number}", group=number, dtype=found.dtype)
