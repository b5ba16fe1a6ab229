"""What a candidate claims that its calls take, against our own clock and against what its reference's take."""

from __future__ import annotations

import math
import statistics

from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cuda.session import TimedCall, TimedSide
from kbrl_async.kernels.verify.cuda.sides import Sides
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Fault

_AUDIT_NS = 5e6
_LONG_NS = 1_500_000.0
"""A batch this long is audited well enough by the calls that timed it."""
_EXTRA_SHARE, _EXTRA_NS = 0.10, 20_000.0
_EVENT_SHARE, _EVENT_NS = 0.25, 60_000.0
_ORDINARY_NS = 400_000.0
"""What an ordinary forward takes with its flushes."""
_TRUSTED_NS = 50_000.0
"""Allowed beside the claims of a process that no candidate's host code runs in, before longer calls are taken."""
_BESIDE_RATIO = 1.5
_CALLS = 3
_OUTSIDE_NS = 1_000_000.0
"""Two processes' calls may differ by so much at least in each pair."""


class Claims:
    """Of one measurement; evidence goes to `checker`."""

    def __init__(self, checker: Checker, sides: Sides) -> None:
        self._checker, self._sides = checker, sides
        self._pairs: list[tuple[TimedCall, TimedCall]] = []
        """The reference's call and the candidate's."""
        self._grown = math.inf
        """What a call of an audit took by the candidate's own word beyond those of the pairs, and the reference's did
        not."""
        self.is_disturbed = False
        """Whether others were at work in each of its calls, so that nothing can be said of their times."""
        self.hidden = 0.0
        """Nanoseconds of each forward that lie outside of a candidate's events."""

    def __len__(self) -> int:
        return len(self._pairs)

    def note(self, reference: TimedCall, candidate: TimedCall) -> None:
        """One pair."""
        self._pairs.append((reference, candidate))

    @property
    def _claim(self) -> float:
        return statistics.median(max(one.elapsed_ns for one in pair) for pair in self._pairs)

    @property
    def _outside(self) -> list[tuple[float, float]]:
        """What the calls of a pair took beyond their claims: the candidate's, the reference's."""
        return [(_beyond(candidate), _beyond(reference)) for reference, candidate in self._pairs]

    def audit(self) -> None:
        """Times that lie outside of claims: accused, or counted as the candidate's."""
        self._compare_calls()
        if not self._sides.candidate.is_trusted:
            self.hidden = max(self.hidden, self._untold())

    def _untold(self) -> float:
        """Of each forward, whatever was told in an audit, which a candidate may know from a pair: what each pair took
        at least beyond its claim, and what an audit's calls took beyond the pairs'. Nobody is accused of either.
        """
        claim, outside = self._claim, min(ours - theirs for ours, theirs in self._outside)
        found = [0.0]
        if outside > _EXTRA_SHARE * claim + _OUTSIDE_NS:
            found.append(outside)
        if _EVENT_SHARE * claim + _EVENT_NS < self._grown < math.inf:
            found.append(self._grown)
        return max(found) / self._sides.batch

    def _compare_calls(self) -> None:
        """What the candidate's calls take beyond their claims, against what the reference's take. A first suspicion is
        looked into with longer calls: a noisy host must not make a cheat of anybody.
        """
        if self._sides.refused:
            self._refuse_side_stream()
        claim = self._claim
        extra = statistics.median(ours - theirs for ours, theirs in self._outside)
        allowed = _EXTRA_SHARE * claim + _EXTRA_NS
        if self._sides.refused:
            allowed = _EVENT_SHARE * claim + _EVENT_NS
            extra = self.hidden = self._repeated(claim, _AUDIT_NS)
        elif self._sides.candidate.is_trusted:
            ours, theirs = map(min, zip(*self._outside, strict=True))  # of two or three pairs one may be disturbed
            if ours - theirs <= allowed + _TRUSTED_NS:
                return
            extra = self._repeated(claim, _AUDIT_NS)
        elif claim < _LONG_NS or extra > allowed:
            extra = self._repeated(claim, _AUDIT_NS)
        if extra > allowed:
            extra = self._repeated(claim, 4 * _AUDIT_NS)
        if extra <= allowed:
            return
        if self._sides.candidate.is_trusted:  # nobody forges its times: what the driver does for it (`printf`) counts
            self.hidden = extra / self._sides.batch
            return
        self._checker.evidence = f"claimed {claim / 1000:.0f} µs, {extra / 1000:.0f} µs more by the bench's own clock"
        text = "a timed call keeps the device busy for longer than between its events: work outside of the timed stream"
        raise CandidateFault(Fault.CHEATING, text, "side_stream" if self._sides.refused else "forged_time")

    def _refuse_side_stream(self) -> None:
        """Its time counts on whatever stream it works; that nobody waits for that stream is no honest kernel either."""
        everywhere = statistics.median(candidate.elapsed_ns for _, candidate in self._pairs)
        own = statistics.median(candidate.stream_ns for _, candidate in self._pairs)
        if everywhere > _BESIDE_RATIO * own and everywhere - own > _EXTRA_NS:
            self._checker.evidence = f"{own / 1000:.0f} µs on torch's stream, {everywhere / 1000:.0f} µs on all streams"
            text = "forward returns before its work on another stream is waited for"
            raise CandidateFault(Fault.CHEATING, text, "side_stream")

    def _repeated(self, claim: float, enough_ns: float) -> float:
        """The same from many replays in each call, where a short batch would drown in the noise of calling; the least
        of several calls, because a host only ever adds to them.
        """
        times = max(2, min(200, math.ceil(enough_ns / max(claim, _ORDINARY_NS if self._sides.refused else 1.0))))
        both = (self._sides.reference, self._sides.candidate)
        least, told = {id(session): math.inf for session in both}, {id(session): math.inf for session in both}
        in_turns = self._sides.places.takes_turns  # then each is moved once
        for session in [one for one in both for _ in range(_CALLS)] if in_turns else both * _CALLS:
            many = self._many(session, times)
            if many is not None:
                least[id(session)] = min(least[id(session)], _beyond(many) / times)
                told[id(session)] = min(told[id(session)], many.elapsed_ns / times)
        if math.inf in least.values():
            self.is_disturbed = True
            return 0.0
        claims = [statistics.median(call.elapsed_ns for call in calls) for calls in zip(*self._pairs, strict=True)]
        grown = [told[id(side)] - claim for side, claim in zip(both, claims, strict=True)]
        self._grown = min(self._grown, grown[1] - max(0.0, grown[0]))
        return least[id(self._sides.candidate)] - least[id(self._sides.reference)]

    def _many(self, session: TimedSide, times: int) -> TimedCall | None:
        """None where others were at work meanwhile."""
        places = self._sides.places
        places.was_busy()
        self._sides.bring(session)
        limit = max(self._sides.limit_s, times * self._sides.limit_s / 10)
        many = session.events(times, limit) if self._sides.refused else session.replay(times, limit)
        places.look()  # what it leaves behind is its own
        return None if places.was_busy() else many


def _beyond(call: TimedCall) -> float:
    return call.wall_ns - call.elapsed_ns
