"""Which workloads a problem has: those that it names, its input groups, secret tails of shapes that it leaves free."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.backward import answered_by
from kbrl_async.kernels.problems.declared import Declared, declared
from kbrl_async.kernels.problems.model_contract import load
from kbrl_async.kernels.problems.workloads import INPUTS, Bound, Workload, bind, tails
from protocols.records import Fault, Problem, Timing, Verdict

FORWARD, BACKWARD = " forward", " backward"
"""What the names of passes end with."""
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


def described_text(source: str) -> str:
    """The same of a stranger's text: one that declares nothing that can be read has one workload."""
    try:
        return described(Problem("", 0, "", source)) or "1"
    except (ProblemError, SyntaxError, ValueError, RecursionError):
        return "1"


def asks(problem: Problem) -> str:
    """What a problem asks of a kernel beside its module's answer, for whoever writes one; empty: nothing."""
    found = declared(problem.source, problem.problem_id)
    said = {
        "One ModelNew has to be right on every workload, and is timed by their weights.": found.workloads
        or found.has_groups,
        f"Any sizes within FREE_SHAPES may come: odd ones, one{_or_none(found)}.": found.free,
        f"Gradients are asked for ({found.backward}): launch kernels within a torch.autograd.Function, whose backward "
        "launches kernels of your own, too.": found.backward,
        f"These operators of torch are forbidden: {', '.join(found.forbidden)}.": found.forbidden,
        "The same inputs have to give the same bits.": found.deterministic,
        "Inputs may be changed in place.": found.inputs_may_change,
    }
    return "\n".join(text for text, holds in said.items() if holds)


def _or_none(found: Declared) -> str:
    return ", none at all" if any(least == 0 for least, _ in found.free.values()) else ""


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
    asked = [msgspec.structs.replace(one, backward=found.backward) for one in (*_named(found), *groups, *drawn)]
    return [bind(problem, workload) for one in asked for workload in (one, *_forward_of(one))]


def _forward_of(workload: Workload) -> tuple[Workload, ...]:
    """What else is timed where gradients are asked for: beside the speedup, and no part of it."""
    if not (workload.backward and workload.is_timed):
        return ()
    return (msgspec.structs.replace(workload, name=workload.name + FORWARD, weight=0.0, backward="", role="timed"),)


def each(source: str, candidate: types.ModuleType, run: Callable[[types.ModuleType], None]) -> None:
    """In a confined child: `run` of a problem's module once for each workload, that of a proposal as far as it goes.
    Where a workload asks for gradients, the candidate's forward returns them meanwhile.
    """
    bounds = cases(Problem("", 0, "", source), random.Random(0))
    if not bounds:
        run(load("problem", source))
    for bound in bounds:
        is_proposal = bound.workload.is_tail or bound.workload.group > 0
        tolerated = contextlib.suppress(*([Exception] if is_proposal else []))
        with tolerated, answered_by(candidate, bound.workload.backward):
            run(load("problem", bound.problem.source))


def _named(found: Declared) -> tuple[Workload, ...]:
    rows = found.workloads or ((_group(0, found),) if found.has_groups else (Workload("nominal"),))
    return tuple(msgspec.structs.replace(row, dtype=row.dtype or found.dtype) for row in rows)


def _group(number: int, found: Declared) -> Workload:
    return Workload(f"group {number}", group=number, dtype=found.dtype)


def workload_lines(verdict: Verdict, timing: Timing | None) -> Iterator[str]:
    """How each workload ended, for a person; nothing for a problem with one."""
    timed = {} if timing is None else {one.name: one for one in timing.workloads}
    for one in verdict.workloads:
        said = "right" if one.fault is Fault.OK else one.fault.value.replace("_", " ")
        line = f"{one.name}: {said}, {one.passed} of {one.total} sets"
        if (t := timed.get(one.name)) is not None:
            line += f"; {t.speedup:.3f}× ({t.lo:.3f} … {t.hi:.3f}), weight {t.weight:.2g}"
            line += f"; {t.candidate_ms:.4g} ms, reference {t.reference_ms:.4g} ms"
        yield line
    judged = {one.name for one in verdict.workloads}
    for name, t in timed.items():
        if name not in judged:  # made of two others
            times = f"{t.candidate_ms:.4g} ms, reference {t.reference_ms:.4g} ms"
            yield f"{name}: {t.speedup:.3f}× ({t.lo:.3f} … {t.hi:.3f}); {times}"
