"""Do two reports on one candidate say the same? What honest workers may find differently is allowed for, a lie is not.

* Benches: they end alike, and their timing intervals meet within the tolerance.
* Farms: they end alike; where both have built it, the same units, and with the same C toolchain the same bytes. The
  name of a C toolchain holds the hash of a probe that it has built, so honest farms of one name build the same bytes.
  Other toolchains are not compared by bytes: their builds hold paths or depend on the host's GPU.

A report that can't be read agrees with nothing, nor does a speedup outside of its own interval or a figure that is no
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from protocols.records import CLEARLY_SLOWER, SPARED_SETS, BenchReport, BuildReport, Fault, Timing, Verdict

_CRASHES = frozenset({Fault.RUNTIME_ERROR, Fault.TIMEOUT, Fault.OUT_OF_MEMORY, Fault.ILLEGAL_ACCESS})
"""An endless loop or a wild pointer ends one way here and another way there."""
_PASSED_APART = 0.5
"""Secret inputs differ between two verifications, so does how many of them a wrong kernel passes by luck."""
BY_BYTES = "gcc "
"""How the names of toolchains begin whose builds of one name are equal byte by byte."""
Report = BenchReport | BuildReport
_decode: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


def agreeing(opinions: Sequence[Sequence[bytes]], tolerance: float) -> list[tuple[int, int]]:
    """Pairs of opinions, each the payload of a bench's or a farm's result, that agree."""
    reports = [_read(opinion) for opinion in opinions]
    return [
        (i, j)
        for j, second in enumerate(reports)
        for i, first in enumerate(reports[:j])
        if first is not None and second is not None and agree(first, second, tolerance)
    ]


def timings(opinions: Sequence[Sequence[bytes]]) -> list[Timing | None]:
    """The timing in each opinion; None where there is none."""
    reports = [_read(opinion) for opinion in opinions]
    return [report.timing if isinstance(report, BenchReport) else None for report in reports]


def _read(opinion: Sequence[bytes]) -> Report | None:
    if len(opinion) != 1:
        return None
    try:
        return _decode(opinion[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def agree(first: Report, second: Report, tolerance: float) -> bool:
    if isinstance(first, BuildReport) or isinstance(second, BuildReport):
        return isinstance(first, BuildReport) and isinstance(second, BuildReport) and _same_build(first, second)
    if _is_spared(first, second) or _is_spared(second, first):
        return True
    return _same_verdict(first.verdict, second.verdict) and _same_timing(first.timing, second.timing, tolerance)


def _same_build(first: BuildReport, second: BuildReport) -> bool:
    if first.fault is not second.fault or first.artifacts.keys() != second.artifacts.keys():
        return False
    is_comparable = first.toolchain == second.toolchain and first.toolchain.startswith(BY_BYTES)
    return not is_comparable or first.artifacts == second.artifacts


def _same_verdict(first: Verdict, second: Verdict) -> bool:
    if first.fault is not second.fault:
        return first.fault in _CRASHES and second.fault in _CRASHES
    return first.fault is Fault.OK or abs(_share(first) - _share(second)) <= _PASSED_APART


def _is_spared(right: BenchReport, wrong: BenchReport) -> bool:
    """Whether one was right to call a slow kernel right by few sets, of which the other drew one that it fails."""
    timing, of_right, of_wrong = right.timing, right.verdict, wrong.verdict
    is_slow = timing is not None and _is_sound(timing) and timing.hi < CLEARLY_SLOWER
    is_right = is_slow and of_right.fault is Fault.OK and of_right.total <= SPARED_SETS
    return is_right and of_wrong.fault is Fault.INCORRECT and _share(of_wrong) >= _PASSED_APART


def _share(verdict: Verdict) -> float:
    return verdict.passed / verdict.total if verdict.total > 0 else 0.0


def _same_timing(first: Timing | None, second: Timing | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    if not (_is_sound(first) and _is_sound(second)):
        return False
    reach = 1.0 + tolerance
    return first.lo <= second.hi * reach and second.lo <= first.hi * reach


def _is_sound(timing: Timing) -> bool:
    return 0.0 < timing.lo <= timing.speedup <= timing.hi < float("inf")
