"""Timing a correct candidate against its reference, in the processes that were just checked.

::

    fresh mixture ─▶ both arenas (next slot) ─▶ in random order: flush ─▶ go … done (timed) ─▶ freeze, read
                 both outputs compared: a timed call that is wrong is a fault of the candidate

The clock runs in this trusted process, from the send of `go` to the arrival of `done`; the cost of an empty call, measured
for both children, is subtracted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import msgspec

from kbrl_async.timing import Measured, Pair, measure
from kbrl_async.timing.host import Flush, Waited, clock_mhz, hardware
from kbrl_async.verifying import compare, wire
from kbrl_async.verifying.checks import Checker
from kbrl_async.verifying.options import BenchOptions
from kbrl_async.verifying.session import CandidateFault, Outcome, Session
from protocols.records import Timing

_EMPTY_CALLS = 7
_FLOOR_NS = 200.0
_POLLUTED_SHARE = 0.1
_POLLUTED_NS = 20_000


class _Sample(msgspec.Struct, frozen=True):
    outcome: Outcome
    waited_ns: int


class Stopwatch:
    """Measures one candidate; `run` gives None and sets `checker.fault` where a timed call fails or is wrong."""

    def __init__(
        self, checker: Checker, options: BenchOptions, rng: random.Random, tick: Callable[[], None]
    ) -> None:
        assert checker.session is not None
        self._checker, self._options, self._rng, self._tick = checker, options, rng, tick
        self._reference = checker.reference.session
        self._candidate = checker.session
        self._flush = Flush(options.recipe.flush_bytes)
        self._waits = {id(s): Waited(s.host_pid) for s in (self._reference, self._candidate)}
        self._slot = 0
        nominal = checker.reference.sets[0]
        self._tolerances = nominal.tolerances

    def close(self) -> None:
        for waited in self._waits.values():
            waited.close()

    def run(self) -> Timing | None:
        try:
            self._pair()  # both have run once before the empty calls, which answer with the last output
            self._empty = {id(s): self._empty_ns(s) for s in (self._reference, self._candidate)}
            measured = measure(self._pair_of_times, self._options.recipe)
        except CandidateFault as fault:
            if self._checker.fault is None:
                raise
            assert fault is self._checker.fault
            return None
        return self._timing(measured)

    def _empty_ns(self, session: Session) -> float:
        calls = [session.call(wire.OP_EMPTY, 0, self._checker.one_call_s) for _ in range(_EMPTY_CALLS)]
        return statistics.median(call.elapsed_ns for call in calls)

    def _pair_of_times(self) -> Pair:
        self._tick()
        reference, candidate = self._pair()
        times, waited = [], 0
        for session, sample in ((self._reference, reference), (self._candidate, candidate)):
            times.append(max(_FLOOR_NS, sample.outcome.elapsed_ns - self._empty[id(session)]))
            waited += sample.waited_ns
        share = waited / (reference.outcome.elapsed_ns + candidate.outcome.elapsed_ns)
        return Pair(times[0], times[1], share, waited > _POLLUTED_NS and share > _POLLUTED_SHARE)

    def _pair(self) -> tuple[_Sample, _Sample]:
        self._slot = (self._slot + 1) % self._options.slots
        arenas = [self._reference.slots[self._slot], self._candidate.slots[self._slot]]
        self._rng.shuffle(arenas)
        self._checker.reference.pool.mix(arenas, self._rng)
        candidate_first = self._rng.random() < 0.5
        if candidate_first:
            candidate = self._call_candidate()
            reference = self._call(self._reference)
        else:
            reference = self._call(self._reference)
            candidate = self._call_candidate()
        self._compare(reference, candidate)
        return reference, candidate

    def _call(self, session: Session) -> _Sample:
        waits = self._waits[id(session)]
        self._flush()
        before = waits.ns()
        outcome = session.call(wire.OP_RUN, self._slot, self._checker.one_call_s)
        return _Sample(outcome, waits.ns() - before)

    def _call_candidate(self) -> _Sample:
        try:
            return self._call(self._candidate)
        except CandidateFault as fault:
            self._checker.fault = fault
            raise

    def _compare(self, reference: _Sample, candidate: _Sample) -> None:
        expected = self._checker.reference.read(reference.outcome)
        scaled = [
            msgspec.structs.replace(tolerance, absolute=max(tolerance.absolute, tolerance.honest))
            for tolerance in self._tolerances
        ]
        try:
            found: compare.Difference = self._checker.compare(self._checker.outputs(candidate.outcome), expected, scaled)
            if found.wrong:
                text = f"a timed call gave {found.wrong} wrong values of {found.total}, though the checked calls were right"
                raise CandidateFault("cheating", text, "wrong_when_timed")
        except CandidateFault as fault:
            self._checker.fault = fault
            raise

    def _timing(self, measured: Measured) -> Timing:
        interval, cores = measured.interval, self._options.cores
        overhead = self._empty[id(self._candidate)] / 1000
        way = "copied outputs" if self._candidate.copies else "frozen child"
        method = f"paired, cold L2, {way}, {overhead:.0f} µs call overhead subtracted, {measured.rejected} rejected"
        return Timing(
            measured.n,
            interval.median,
            interval.lo,
            interval.hi,
            measured.candidate_ms,
            measured.reference_ms,
            self._options.recipe.confidence,
            method,
            measured.stopped,
            hardware(),
            clock_mhz(cores[0] if cores else 0),
            load=measured.load,
        )
