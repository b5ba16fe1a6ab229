"""Timing a correct candidate, in the process that was just checked, against a fresh twin of its reference.

::

    fresh mixture ─▶ both arenas (next slot) ─▶ in both orders: flush ─▶ go … done (timed) ─▶ freeze, read
                 both outputs compared: a timed call that is wrong is a fault of the candidate

The clock runs in this trusted process, from the send of `go` to the arrival of `done`; the cost of an empty
call, measured for both children, is subtracted.
"""

from __future__ import annotations

import functools
import math
import os
import random
import statistics
import time
from collections import deque

import msgspec

from kbrl_async.kernels.timing import Measured, Pair, measure
from kbrl_async.kernels.timing.cpu.host import (
    CacheFlush,
    CoreUse,
    clock_mhz,
    evict,
    hardware,
    keep_heap,
    process_time_ns,
    taken_by_others,
)
from kbrl_async.kernels.timing.load import CpuCounters, LoadWatch, snapshot
from kbrl_async.kernels.timing.statistics import Interval
from kbrl_async.kernels.verify import compare, wire
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu import bursts
from kbrl_async.kernels.verify.options import BenchOptions, Tick
from kbrl_async.kernels.verify.report import timing_of
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Session
from protocols.records import Fault, Timing

_EMPTY_CALLS = 11
_HELD = 2
"""Outputs of so many earlier calls are alive in a runner while it makes the next: nothing new can lie there."""
_FLOOR_NS = 200.0
_LOOKED_AT = 0.25
"""Of the timed calls: whether an output shares memory with an input."""
POLLUTED_SHARE = 0.1
_POLLUTED_NS = 5_000


class Stopwatch:
    """Measures one candidate; `run` gives None and sets `checker.fault` where a timed call fails or is wrong."""

    def __init__(self, checker: Checker, twin: Session, options: BenchOptions, rng: random.Random, tick: Tick) -> None:
        assert isinstance(checker.session, Session)
        self._checker, self._options, self._rng, self._tick = checker, options, rng, tick
        self._reference = twin
        self._candidate = checker.session
        keep_heap()
        self._flush = CacheFlush(options.recipe.flush_bytes)
        self._meters = {id(s): CoreUse(s.host_pid) for s in (self._reference, self._candidate)}
        self._slot = 0
        self._places: deque[tuple[set[int], set[int]]] = deque(maxlen=_HELD)
        nominal = checker.reference.sets[0]
        self._tolerances = nominal.tolerances

    def close(self) -> None:
        for meter in self._meters.values():
            meter.close()

    def prepare(self) -> None:
        """A core has nothing to prepare."""

    def run(self) -> Timing | None:
        try:
            self._pair(False)  # both have run once before the empty calls, which answer with the last output
            # One overhead for both, the trusted side's: two would turn into a speedup for short calls.
            self.empty, self.idle = self._empty_ns(self._reference)
            children = (self._reference.host_pid, self._candidate.host_pid)
            self._watch = LoadWatch(
                functools.partial(_snapshot, self._options.cores, children),
                cores=len(self._options.cores) or os.cpu_count() or 1,
                patience_s=self._options.recipe.patience_s,
            )
            measured = measure(self._pair_of_times, self._options.recipe, self._watch.clock)
            return self._timing(self.held_against_it(measured))
        except CandidateFault as fault:
            self._checker.accuse(fault)
            return None

    def _empty_ns(self, session: Session) -> tuple[float, float]:
        """Wall time of a call without any work, and CPU time of the child."""
        calls = [session.call(wire.OP_EMPTY, 0, self._checker.one_call_s) for _ in range(_EMPTY_CALLS)]
        return statistics.median(c.elapsed_ns for c in calls), statistics.median(c.worked_ns for c in calls)

    def _pair_of_times(self) -> Pair:
        """Both orders, one after the other: whoever comes second finds other caches, and that must not look
        like speed.
        """
        self._tick()
        candidate_first = self._rng.random() < 0.5
        rounds = [self._pair(candidate_first), self._pair(not candidate_first)]
        reference = sum(net_ns(both[0], self.empty, self.idle) for both in rounds) / 2
        candidate = sum(net_ns(both[1], self.empty, self.idle) for both in rounds) / 2
        samples = [sample for both in rounds for sample in both]
        others = [taken_by_others(s.elapsed_ns, s.waited_ns, s.used_ns) for s in samples]
        share = sum(others) / sum(s.elapsed_ns for s in samples)
        is_polluted = sum(others) > _POLLUTED_NS and share > POLLUTED_SHARE
        self._watch.pair(is_polluted)
        return Pair(reference, candidate, share, is_polluted)

    def _pair(self, candidate_first: bool) -> tuple[ForwardOutcome, ForwardOutcome]:
        self._slot = (self._slot + 1) % len(self._candidate.slots)
        arenas = [self._reference.slots[self._slot], self._candidate.slots[self._slot]]
        self._rng.shuffle(arenas)
        self._checker.reference.renew()
        self._checker.reference.pool.mix(arenas, self._rng)
        if candidate_first:
            candidate = self._call(self._candidate)
            reference = self._call(self._reference)
        else:
            reference = self._call(self._reference)
            candidate = self._call(self._candidate)
        self.compare_outputs(reference, candidate)
        self.refuse_in_place(reference, candidate)
        return reference, candidate

    def _call(self, session: Session) -> ForwardOutcome:
        self._flush()
        self._evicted = evict(session.slots[self._slot])
        return session.call(wire.OP_RUN, self._slot, self._checker.one_call_s, self._meters[id(session)])

    def compare_outputs(self, reference: ForwardOutcome, candidate: ForwardOutcome) -> None:
        expected = [self._reference.read(meta) for meta in reference.tensors]
        found = self._checker.compare(self._checker.outputs(candidate), expected, self._tolerances)
        if found.wrong:
            text = f"{found.wrong} of {found.total} values of a timed call are wrong; the checked calls were right"
            raise CandidateFault(Fault.CHEATING, text, "wrong_when_timed")

    def refuse_in_place(self, reference: ForwardOutcome, candidate: ForwardOutcome) -> None:
        """As in checked calls: inputs stay as they were, and no output lies where one of those before it still is; but
        for who may work in place, and has one place for inputs.
        """
        is_mutated = self._checker.reference.sets[0].mutated
        if not is_mutated:
            both = zip(self._candidate.slots[self._slot], self._reference.slots[self._slot], strict=True)
            if not all(compare.same_values(*two) for two in both):
                raise CandidateFault(Fault.CHEATING, "an input was changed by a timed call", "input_mutation")
        if self._rng.random() < _LOOKED_AT and not self._checker.reference.aliases:
            self._checker.refuse_aliasing(self._slot, candidate, self._checker.outputs(candidate))
        places = _places(reference), _places(candidate)
        reference_does, does = (any(now & one[side] for one in self._places) for side, now in enumerate(places))
        self._places.append(places)
        is_wanted = self._options.outputs == "fresh" and not (is_mutated and len(self._candidate.slots) == 1)
        if is_wanted and does and not reference_does and not self._candidate.copies:
            text = "a timed call wrote its output over one of the two before it: allocate a new output in each call"
            raise CandidateFault(Fault.INCORRECT, text, "output_overwritten")

    def held_against_it(self, measured: Measured) -> Measured:
        """A process that runs its candidate's own Python may answer with less to do than an empty call: the lower end
        holds even if it answered in no time at all. That of a replay holds in bursts, too."""
        if not self._checker.is_untrusted:
            return measured
        interval, candidate_ns = measured.interval, measured.candidate_ms * 1e6
        if self._checker.is_replayed:
            most = bursts.most(self._checker, self._reference, candidate_ns, self.idle, self._rng)
            lo = min(interval.lo, most * (1 + measured.share))
        else:
            lo = interval.lo / (1 + self.empty / candidate_ns)
        return msgspec.structs.replace(measured, interval=Interval(interval.median, lo, interval.hi))

    def _timing(self, measured: Measured) -> Timing:
        cores, overhead = self._options.cores, self.empty / 1000
        way = "copied outputs" if self._candidate.copies else "frozen child"
        way = "replayed" if self._checker.is_replayed else way
        cold = "cold caches" if self._evicted else "cold L2"
        method = f"paired, {cold}, {way}, {overhead:.0f} µs call overhead subtracted, {measured.rejected} rejected"
        timing = timing_of(measured, self._options.recipe, method, hardware(), clock_mhz(cores[0] if cores else 0))
        return msgspec.structs.replace(timing, load=max(measured.load, self._watch.load().share or 0.0))


def net_ns(sample: ForwardOutcome, empty: float, idle: float) -> float:
    """Of a call, without the wall time and the CPU time of an empty one. What a child works before its order or after
    its answer counts as time, too."""
    return max(_FLOOR_NS, sample.elapsed_ns - empty, sample.worked_ns - idle)


def _places(outcome: ForwardOutcome) -> set[int]:
    return {meta.place for meta in outcome.tensors if math.prod(meta.shape)}


def _snapshot(cores: tuple[int, ...], children: tuple[int, int]) -> CpuCounters:
    """Not a method: a stopwatch that holds itself is freed by the collector alone, some time, with all its tensors."""
    return snapshot(cores, own_s=lambda: time.process_time() + sum(map(process_time_ns, children)) / 1e9)
