"""How much faster a replay is where the way between the bench and its kernels hardly counts: one order, many forwards.

::

    fresh inputs in K slots ─▶ one order to each side ─▶ K outputs, all of them compared · CPU time of each side

Compiled code can do what it likes in the replayer that it is called in, so also answer orders in its place, with less
to do than Python has: a short kernel looked two to five times as fast. In a burst that way is gone once for K forwards,
and what is left of it (the order, and a call of each step) is held against the candidate as if it had not done it. CPU
time counts up to where a process stands still, so that nothing is done unseen after its answer.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
import time
from collections.abc import Sequence

import torch

from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu.replay import CpuReplaySession
from kbrl_async.kernels.verify.session import ForwardOutcome, Session

_ROUNDS = 3
"""The first finds no memory prepared."""
_MOST = 16
_LONG_NS = 5e6
"""Beside this the way does not count."""
_ROOM = 32 << 20
_TIMES = 1000
_COLD = 2.0
"""How much longer Python needs there than where it does one thing a thousand times."""


def forwards(bytes_each: int, candidate_ns: float) -> int:
    """In one burst; below 2 there is none. `bytes_each`: of the inputs and outputs of one forward.

    >>> forwards(1 << 16, 50_000), forwards(1 << 16, 2e6), forwards(64 << 20, 50_000)
    (16, 3, 0)
    """
    wanted = min(_MOST, math.ceil(_LONG_NS / max(1.0, candidate_ns)))
    return min(wanted, _ROOM // max(1, bytes_each))


@functools.cache
def _each_ns() -> tuple[float, float]:
    """What Python needs for a step that does nothing (memory for a result, the call of a C function), and for telling
    where an output lies."""
    nothing, tensor = ctypes.CDLL(None).abs, torch.empty(1)
    begun = time.thread_time_ns()
    for _ in range(_TIMES):
        nothing(torch.empty_like(tensor).data_ptr() & 1)
    between = time.thread_time_ns()
    found: list[torch.Tensor] = []
    tree = values.flatten([tensor] * _TIMES, found)
    wire.encode(wire.Done(0, tree, [values.describe(one, one.data_ptr()) for one in found]))
    return (between - begun) / _TIMES, (time.thread_time_ns() - between) / _TIMES


def most(checker: Checker, twin: Session, candidate_ns: float, order_ns: float, rng: random.Random) -> float:
    """How much faster than its reference a candidate surely is in bursts; infinite where there are none. `order_ns`:
    CPU time of an order to do nothing. 1 where an answer in a burst is wrong: what one forward leaves to the next is
    put back between single calls, so that nobody is accused.

    :raises CandidateFault: a process fails.
    """
    reference, candidate = checker.reference, checker.session
    assert isinstance(candidate, CpuReplaySession)
    count = forwards(_size((*reference.examples, *reference.wanted)), candidate_ns)
    if count < 2:
        return math.inf
    try:
        for session in (twin, candidate):
            session.attach(reference.tree, reference.examples, count, reference.copies)
        rounds = [one_round(checker, twin, candidate, rng) for _ in range(_ROUNDS)]
        reference.attach(candidate)  # who was spared sets sees them next, in as many places as before
    finally:
        reference.attach(twin)  # whatever became of this candidate: it is kept for the next one
    if None in rounds:
        return 1.0
    step_ns, output_ns = _each_ns()
    spared = order_ns + count * (candidate.steps * step_ns + len(reference.wanted) * output_ns)
    reference_ns, candidate_ns = (min(both) for both in zip(*filter(None, rounds), strict=True))
    return float(reference_ns / (candidate_ns + _COLD * spared))


def one_round(checker: Checker, twin: Session, candidate: Session, rng: random.Random) -> tuple[int, int] | None:
    """CPU time of both; None where the candidate is wrong."""
    for places in zip(twin.slots, candidate.slots, strict=True):
        checker.reference.renew()
        checker.reference.pool.mix(list(places), rng)
    limit_s = len(twin.slots) * checker.one_call_s
    wanted, got = (session.call(wire.OP_BURST, 0, limit_s) for session in (twin, candidate))
    if len(got.tensors) != len(wanted.tensors):
        raise candidate.forged("a burst was answered for another number of forwards")
    for expected, answer in zip(_forwards(wanted, checker), _forwards(got, checker), strict=True):
        outputs = [twin.read(meta) for meta in expected.tensors]
        if checker.compare(checker.outputs(answer), outputs, checker.reference.sets[0].tolerances).wrong:
            return None
    return wanted.worked_ns, got.worked_ns


def _forwards(outcome: ForwardOutcome, checker: Checker) -> list[ForwardOutcome]:
    """The single ones, of the reference's structure."""
    tensors, each = outcome.tensors, len(checker.reference.wanted)
    parts = [tensors[first : first + each] for first in range(0, len(tensors), max(1, each))]
    return [ForwardOutcome(0, 0, 0, checker.reference.out_tree, part) for part in parts]


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
