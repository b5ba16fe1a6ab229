"""Which workloads a problem has: those that it names, its input groups, secret tails of shapes that it leaves free."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Sequence

import msgspec

from kbrl_async.kernels.problems.declared import Declared, declared
from kbrl_async.kernels.problems.model_contract import load
from kbrl_async.kernels.problems.workloads import INPUTS, Bound, Workload, bind, tails
from protocols.records import Problem

MOST_GROUPS = 16
"""Of `get_input_groups()`: each call of it makes all of them."""


def named(problem: Problem) -> tuple[Workload, ...]:
    """What a problem says of its workloads, for whoever shows it; of input groups only the first is known."""
    return _named(declared(problem.source, problem.problem_id))


def described(problem: Problem) -> str:
    """What there is besides one workload, in few words; empty: nothing."""
    found = declared(problem.source, problem.problem_id)
    if found.is_single:
        return ""
    words = "input groups" if found.has_groups else str(len(_named(found)))
    return words + (" and secret shapes" if found.free else "")


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


def each(source: str, run: Callable[[types.ModuleType], None]) -> None:
    """In a confined child: `run` of a problem's module once for each workload, that of a proposal as far as it goes."""
    bounds = cases(Problem("", 0, "", source), random.Random(0))
    if not bounds:
        run(load("problem", source))
    for bound in bounds:
        is_proposal = bound.workload.is_tail or bound.workload.group > 0
        with contextlib.suppress(*([Exception] if is_proposal else [])):
            run(load("problem", bound.problem.source))


def _named(found: Declared) -> tuple[Workload, ...]:
    rows = found.workloads or ((_group(0, found),) if found.has_groups else (Workload("nominal"),))
    return tuple(msgspec.structs.replace(row, dtype=row.dtype or found.dtype) for row in rows)


def _group(number: int, found: Declared) -> Workload:
    return Workload(f"group {number}", group=number, dtype=found.dtype)
