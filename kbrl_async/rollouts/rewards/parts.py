"""What a rollout's record is worth, part by part, before any weights.

::

    Record ─ parts_of ─▶ RewardParts | None

Invariants
* Infrastructure's faults, and records that end without a reason of the candidate's own, give None: never a reward (I4).
* `correctness` is 1 only for a verdict `OK`; `speed` is above 0 only for a correct kernel whose speedup's whole
  confidence interval lies above 1 (I7).
* Cheating has no parts: whatever it passed, it passed by fraud.
"""

from __future__ import annotations

import math
import re

import msgspec

from protocols.records import VERIFIER, Fault, Timing, Verdict
from protocols.rollout import Record

_THOUGHT = re.compile(r"<think>\s*\S.*?</think>", re.DOTALL)


class PartOptions(msgspec.Struct, frozen=True):
    speed_floor: float = 0.125
    """Speedup up to which the `speed` part is nothing."""
    speed_cap: float = 8.0
    """Speedup that earns the whole `speed` part."""
    speedup_cap: float = 10.0
    """Bound of the raw `speedup` part (Kevin's cap)."""
    length_buffer: float = 0.2
    """Share of max_tokens over which `length` falls from 1 to 0 (DAPO's overlong shaping)."""


class RewardParts(msgspec.Struct, frozen=True):
    """All in [0, 1] but `speedup` and `speedup_gain`."""

    fault: Fault
    format: float = 0.0
    static: float = 0.0
    compile: float = 0.0
    valid: float = 0.0
    """1 when format, static check and compilation all passed."""
    correctness: float = 0.0
    """Share of secret input sets passed."""
    correct: float = 0.0
    """1 when all passed."""
    speed: float = 0.0
    """`speed_part` of the lower end of the speedup's interval."""
    speedup: float = 0.0
    """lo, at most `speedup_cap`, of a correct kernel; else 0."""
    speedup_gain: float = 0.0
    """(speedup − 1)⁺."""
    length: float = 0.0
    thinking: float = 0.0


PART_NAMES = tuple(name for name in RewardParts.__struct_fields__ if name != "fault")


def parts_of(record: Record, options: PartOptions | None = None) -> RewardParts | None:
    """The parts of a finished record; None where infrastructure failed, or no kernel was asked for."""
    o = options or PartOptions()
    generation, build, fault = record.generation, record.build, record.fault
    if generation is None or not record.is_scorable or record.request.role == VERIFIER:
        return None
    if fault is Fault.CHEATING:
        return RewardParts(fault)
    written = generation.fault is Fault.OK
    clean = written and build is not None and build.fault is not Fault.STATIC_VIOLATION
    built = clean and build is not None and build.fault is Fault.OK
    lo = _speedup(record.timing)
    return RewardParts(
        fault=fault,
        format=float(written),
        static=float(clean),
        compile=float(built),
        valid=float(built),
        correctness=_correctness(record.verdict),
        correct=float(fault is Fault.OK),
        speed=speed_part(lo, o.speed_floor, o.speed_cap),
        speedup=min(lo, o.speedup_cap),
        speedup_gain=max(0.0, min(lo, o.speedup_cap) - 1.0),
        length=_length(record, o.length_buffer),
        thinking=float(_THOUGHT.search(generation.text) is not None),
    )


def speed_part(lo: float, floor: float, cap: float) -> float:
    """clip(log(lo / floor) / log(cap / floor), 0, 1): doubling the speed is always worth the same.

    Below 1 too, down to `floor`: on the way from a tenth of the reference's speed to all of it a policy must be paid,
    or it never gets there.
    """
    return max(0.0, math.log(min(max(lo, floor), cap) / floor) / math.log(cap / floor))


def _correctness(verdict: Verdict) -> float:
    if verdict.fault is Fault.OK:
        return 1.0
    if verdict.total < 1:
        return 0.0
    # A kernel that passes every set and then crashes or times out has not earned the last one.
    return max(0, min(verdict.passed, verdict.total - 1)) / verdict.total


def _speedup(timing: Timing | None) -> float:
    return max(0.0, timing.lo) if timing is not None and math.isfinite(timing.lo) else 0.0


def _length(record: Record, buffer: float) -> float:
    generation = record.generation
    if generation is None or generation.finish_reason == "length":
        return 0.0
    limit = record.request.sampling.max_tokens
    exceeded = len(generation.token_ids) - limit * (1.0 - buffer)
    return min(1.0, max(0.0, 1.0 - exceeded / max(1.0, limit * buffer)))
