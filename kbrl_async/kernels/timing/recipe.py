"""A timed run: pairs of reference and candidate until the speedup is known well enough, or the cap.

::

    sample() ─▶ Pair ─▶ polluted? set aside ─▶ every `looks` pairs: interval (all looks hold together), widened by what
                        the bench can't resolve at this length ─▶ resolved · decided · slower · faster · cap ─▶ Measured

The same for CPU and GPU: the sampler knows how a pair is taken, the clock says what is spent (wall or GPU seconds).

Invariants
* When to look depends on counts and on time, never on the ratios; so the interval's confidence survives the looking.
* Sampling always ends: by pairs, by time, and by polluted pairs.
* A measurement whose pairs were mostly polluted claims no speedup.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing.statistics import Interval, Sequential, few, stop_reason, widened
from protocols.records import CLEARLY_SLOWER, DISTURBED, TIMING_CONFIDENCE

PLACEMENT = 0.02
SLOWER, FASTER = "slower", "faster"
_LONE = 1.5
"""By this factor at most, either way, one pair of long calls is off: assumed, and many times what such pairs scatter by
on a GPU that is theirs alone (1 to 2 %)."""
CAREFUL_PAIRS_A_PLACE = 4
"""`Recipe.pairs_a_place` of a careful measurement: a move costs about as much as a pair or two."""


class Point(msgspec.Struct, frozen=True):
    """What the bench can't tell apart at a kernel's length, however many pairs it takes: a relative share."""

    ms: float
    share: float


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `of`; what has a default here is no setting. Tuned for training throughput; an evaluation wants
    `max_pairs=200, cap_s=5, resolution=0.01`.
    """

    warmup: int = 2
    """Pairs thrown away at the start, at least."""
    warmup_s: float = 0.0
    """… and for at least so long; §5 of a careful timing asks for 0.025. Never more than half of `cap_s`."""
    min_pairs: int
    max_pairs: int
    cap_s: float
    """Of the clock, for one measurement; `min_pairs` are taken even so, unless four times the cap is used up."""
    resolution: float = 0.03
    """Stop when the interval's relative half width is at most this."""
    margin: float = 0.05
    """… or when the interval is this far away from 1 and at most three times as wide."""
    enough_below: float = CLEARLY_SLOWER
    """A few pairs are enough where all of the interval is below this: how much slower a slow kernel is earns little.
    0: never.
    """
    enough_above: float = math.inf
    """And where all of it is above this, and three times as narrow as `resolution` asks for: a kernel that is clearly
    faster. For a device whose pairs hardly scatter.
    """
    few: tuple[int, ...] = (4,)
    """Numbers of pairs after which these two are asked; the intervals of all of them hold together."""
    lone_ms: float = math.inf
    """A candidate whose call takes at least so long is told from one pair, where that leaves no doubt that it is slower
    (`enough_below`); the interval is then a fixed factor wide."""
    confidence: float = TIMING_CONFIDENCE
    placement: float = PLACEMENT
    """What two processes of the same code differ by, because of where their memory lies, where `resolved` is empty."""
    resolved: tuple[Point, ...] = ()
    """The same as measured on this host, by length; see `timing.resolution` and `kbrl bench --aa`."""
    flush_bytes: int
    """0: twice the L2 cache."""
    suspicious: float = 10.0
    """A speedup above this is measured a second time, independently, and the lower one counts."""
    looks: int = 5
    """Pairs between two looks at the interval."""
    pairs_a_place: int = 0
    """On a GPU: pairs after which both sides get other memory, because where memory lies is a bias that more pairs do
    not remove; 0: never. It costs a hundredth of a second."""
    patience_s: float = 0.25
    """How long disturbed pairs may wait, in all, until others leave the core; not charged to `cap_s`."""
    reject_cap: int = 4
    """Sampling ends after `reject_cap × max_pairs` pairs, polluted ones included, and after `reject_cap × cap_s`."""

    @classmethod
    def of(cls, settings: TimingBench, **more: Any) -> Recipe:
        """The recipe that the settings ask for. `more` are fields that are no settings."""
        named = {name: getattr(settings, name) for name in ("min_pairs", "max_pairs", "cap_s", "flush_bytes")}
        return cls(**named, **more)


class Pair(msgspec.Struct, frozen=True):
    """One time of reference and candidate each, overhead subtracted (means where the sampler calls them in
    both orders). `waited`: share of the time others had the core.
    """

    reference_ns: float
    candidate_ns: float
    waited: float = 0.0
    polluted: bool = False
    """Others disturbed it, or its clock was too low: counted, not used."""
    mhz: float | None = None
    """The clock while it ran, where that is known."""


class Measured(msgspec.Struct, frozen=True):
    interval: Interval
    """Widened by `share` on both sides; its lower end is at most 1 where `stopped` is `DISTURBED`."""
    n: int
    rejected: int
    reference_ms: float
    candidate_ms: float
    load: float
    stopped: str
    share: float = 0.0
    """What was added for the bench's own resolution at this length."""
    spent_s: float = 0.0
    mhz: float | None = None
    ratios: tuple[float, ...] = ()
    """Of the pairs that were used."""


def share_at(ms: float, points: tuple[Point, ...], fallback: float) -> float:
    """Relative resolution at a length: between measured lengths by the logarithm, above the longest as there; below
    the shortest the same absolute time, which is a growing share.
    """
    if not points:
        return fallback
    ordered = sorted(points, key=lambda point: point.ms)
    if ms <= ordered[0].ms:
        return ordered[0].share * ordered[0].ms / max(ms, 1e-6)
    for low, high in itertools.pairwise(ordered):
        if ms <= high.ms:
            weight = math.log(ms / low.ms) / math.log(high.ms / low.ms)
            return low.share + weight * (high.share - low.share)
    return ordered[-1].share


def measure(sample: Callable[[], Pair], recipe: Recipe, clock: Callable[[], float] = time.monotonic) -> Measured:
    """Sample pairs until resolved, decided or capped. What `sample` raises passes through."""
    begin = clock()
    _warm_up(sample, recipe, clock, begin)
    run = _Run(recipe)
    while not run.stopped:
        run.take(sample(), clock() - begin)
    return run.summary(clock() - begin)


def _warm_up(sample: Callable[[], Pair], recipe: Recipe, clock: Callable[[], float], begin: float) -> None:
    enough = min(recipe.warmup_s, recipe.cap_s / 2)
    done = 0
    while done < recipe.warmup or clock() - begin < enough:
        sample()
        done += 1
        if clock() - begin > recipe.cap_s or done >= 50 * recipe.max_pairs:
            return


class _Run:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._watch = Sequential(recipe.confidence, recipe.max_pairs)
        self._kept: list[Pair] = []
        self._polluted: list[Pair] = []
        self._interval: Interval | None = None
        self._looked = 0
        self.stopped = ""

    def take(self, pair: Pair, spent: float) -> None:
        (self._polluted if pair.polluted else self._kept).append(pair)
        n = len(self._kept)
        if self._is_over(n, spent):
            self._interval, self.stopped = self._look(is_last=True), "cap"
        elif n == 1 and (lone := self._lone()) is not None:
            self._interval, self.stopped = lone, SLOWER
        elif not pair.polluted and n in self._recipe.few and (clear := self._clearly()) is not None:
            self._interval, self.stopped = clear
        elif not pair.polluted and n >= self._recipe.min_pairs and n % self._recipe.looks == 0:
            self._interval = self._look()
            if self._interval is not None:
                self.stopped = self._reason(self._interval, n)

    def _lone(self) -> Interval | None:
        """The interval of a single undisturbed pair, where it is enough."""
        recipe, pair = self._recipe, self._kept[0]
        ratio = _ratio(pair)
        interval = Interval(ratio, ratio / _LONE, ratio * _LONE)
        is_long = pair.candidate_ns >= 1e6 * recipe.lone_ms and not self._polluted
        return interval if is_long and widened(interval, self._share()).hi < recipe.enough_below else None

    def _clearly(self) -> tuple[Interval, str] | None:
        """The interval of a few pairs, by Student's t with half of the error for all such looks together, and what it
        says where all of it is low or high enough.
        """
        recipe, ratios = self._recipe, [_ratio(pair) for pair in self._kept]
        if max(ratios) >= recipe.enough_below and min(ratios) <= recipe.enough_above:
            return None
        interval = few(ratios, 1 - (1 - recipe.confidence) / (2 * len(recipe.few)))
        wide = widened(interval, self._share())
        if wide.hi < recipe.enough_below:
            return interval, SLOWER
        if wide.lo > recipe.enough_above and interval.half_width <= 3 * recipe.resolution:
            return interval, FASTER
        return None

    def _is_over(self, n: int, spent: float) -> bool:
        recipe = self._recipe
        if n >= recipe.max_pairs or n + len(self._polluted) >= recipe.reject_cap * recipe.max_pairs:
            return True
        # One pair gives no interval at all: a second is taken however slow it is.
        return (spent > recipe.cap_s and n >= recipe.min_pairs) or (
            spent > recipe.reject_cap * recipe.cap_s and n + len(self._polluted) >= 2
        )

    def _look(self, *, is_last: bool = False) -> Interval | None:
        return self._watch.look([_ratio(pair) for pair in self._used], is_last=is_last)

    @property
    def _used(self) -> list[Pair]:
        """Polluted pairs are better than one or none."""
        return self._kept if len(self._kept) >= 2 else [*self._kept, *self._polluted]

    def _share(self) -> float:
        reference = statistics.median(pair.reference_ns for pair in self._used) / 1e6
        candidate = statistics.median(pair.candidate_ns for pair in self._used) / 1e6
        # The shorter of the two is the one that is harder to time.
        return share_at(min(reference, candidate), self._recipe.resolved, self._recipe.placement)

    def _reason(self, interval: Interval, n: int) -> str:
        """Why to stop: precise enough without what no sampling removes, decided only with it."""
        recipe = self._recipe
        reason = stop_reason(interval, n, recipe.min_pairs, recipe.resolution, recipe.margin)
        if reason != "decided":
            return reason
        wide = widened(interval, self._share())
        return reason if wide.excludes(1.0) else ""

    def summary(self, spent: float) -> Measured:
        assert self._interval is not None
        share, used = self._share(), self._used
        every = [*self._kept, *self._polluted]
        clocks = [pair.mhz for pair in used if pair.mhz is not None]
        measured = Measured(
            widened(self._interval, share),
            len(used),
            len(self._polluted),
            statistics.median(pair.reference_ns for pair in used) / 1e6,
            statistics.median(pair.candidate_ns for pair in used) / 1e6,
            statistics.fmean(pair.waited for pair in every),
            self.stopped,
            share,
            spent,
            statistics.median(clocks) if clocks else None,
            tuple(map(_ratio, used)),
        )
        # What is left of a core that others mostly had is not an independent sample of anything.
        return as_disturbed(measured) if len(self._polluted) > len(self._kept) else measured


def as_disturbed(measured: Measured) -> Measured:
    """The same, which claims no speedup."""
    inside = measured.interval
    interval = Interval(inside.median, min(inside.lo, 1.0), inside.hi)
    return msgspec.structs.replace(measured, interval=interval, stopped=DISTURBED)


def _ratio(pair: Pair) -> float:
    return pair.reference_ns / pair.candidate_ns
