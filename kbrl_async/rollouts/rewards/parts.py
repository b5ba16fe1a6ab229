"""What a rollout's record is worth, part by part, before any weights: each part a function of the record.

Adding one is one function and its name in `settings.REWARD_PARTS`; a user's own is named as `package.module:object`.

Invariants
* Infrastructure's faults, and records that end without a reason of the candidate's own, earn nothing: no reward (I4).
* `correctness` is 1 only for a verdict `OK`; `speed` is above 0 only for a correct kernel. It goes by the lower end of
  the speedup's interval (I7), and pays below 1 too: a third of it at half of the reference's speed. `speed_above_1`
  does not.
* Cheating has no parts: whatever it passed, it passed by fraud.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from kbrl_async.rollouts.settings import REWARD_PARTS
from protocols.records import VERIFIER, Fault
from protocols.rollout import Record

RewardPart = Callable[[Record], float]
SPEED_FLOOR, SPEED_CAP = 0.125, 8.0
"""Speedups up to which the `speed` part is nothing, and that earns all of it."""
SPEEDUP_CAP = 10.0
"""Bound of the raw `speedup` part (Kevin's cap)."""
LENGTH_BUFFER = 0.2
"""Share of max_tokens over which `length` falls from 1 to 0 (DAPO's overlong shaping)."""
_THOUGHT = re.compile(r"<think>\s*\S.*?</think>", re.DOTALL)


def earns(record: Record) -> bool:
    """Whether it is rewarded at all: infrastructure did not fail, and a kernel was asked for."""
    return record.generation is not None and record.is_scorable and record.request.role != VERIFIER


def part_of(record: Record, name: str) -> float:
    """The part `name` of a record that `earns`; 0 of one that cheats.

    :raises UserError: no part has that name.
    """
    part: RewardPart = REWARD_PARTS.load(name)
    return 0.0 if record.fault is Fault.CHEATING else float(part(record))


def has_format(record: Record) -> float:
    """A kernel could be extracted."""
    return float(record.generation is not None and record.generation.fault is Fault.OK)


def is_clean(record: Record) -> float:
    """The static check passed, too."""
    return has_format(record) * (record.build is not None and record.build.fault is not Fault.STATIC_VIOLATION)


def is_built(record: Record) -> float:
    """Format, static check and compilation all passed."""
    return is_clean(record) * (record.build is not None and record.build.fault is Fault.OK)


def correctness(record: Record) -> float:
    """Share of secret input sets passed, or nearly so where the curriculum counts that."""
    verdict = record.verdict
    if verdict.fault is Fault.OK:
        return 1.0
    if verdict.total < 1 or verdict.fault is Fault.UNPROVEN:
        return 0.0
    # A kernel that passes every set and then crashes or times out has not earned the last one.
    return max(0, min(verdict.passed + verdict.near, verdict.total - 1)) / verdict.total


def is_correct(record: Record) -> float:
    """All passed."""
    return float(record.fault is Fault.OK)


def speed(record: Record) -> float:
    """`log_speed` of the lower end of the speedup's interval."""
    return log_speed(_lo(record))


def log_speed(lo: float) -> float:
    """clip(log(lo / floor) / log(cap / floor), 0, 1): doubling the speed is always worth the same.

    Below 1 too, down to `SPEED_FLOOR`: on the way from a tenth of the reference's speed to all of it a policy must be
    paid, or it never gets there.
    """
    clipped = min(max(lo, SPEED_FLOOR), SPEED_CAP)
    return max(0.0, math.log(clipped / SPEED_FLOOR) / math.log(SPEED_CAP / SPEED_FLOOR))


def speedup(record: Record) -> float:
    """The lower end itself, at most `SPEEDUP_CAP`, of a correct kernel; else 0."""
    return min(_lo(record), SPEEDUP_CAP)


def speedup_gain(record: Record) -> float:
    """(speedup − 1)⁺."""
    return max(0.0, speedup(record) - 1.0)


def speed_above_1(record: Record) -> float:
    """clip(log(lo) / log(cap), 0, 1): nothing at the reference's speed, all at `SPEED_CAP` times it."""
    lo = _lo(record)
    return min(1.0, math.log(lo) / math.log(SPEED_CAP)) if lo > 1.0 else 0.0


def coverage(record: Record) -> float:
    """Share of a correct kernel's device time that its own code has, as far as it keeps up with the reference; 0 where
    that is not known.

    Own code that wastes time has a larger share: without the second factor a policy would be paid for slowing it down.
    """
    keeps_up = 1.0 if record.timing is None else min(1.0, _lo(record))
    return is_correct(record) * (record.verdict.own_share or 0.0) * keeps_up


def length(record: Record) -> float:
    """1, falling to 0 over the last fifth of max_tokens; 0 for an answer that was cut."""
    generation = record.generation
    if generation is None or generation.finish_reason == "length":
        return 0.0
    limit = record.request.sampling.max_tokens
    exceeded = len(generation.token_ids) - limit * (1.0 - LENGTH_BUFFER)
    return min(1.0, max(0.0, 1.0 - exceeded / max(1.0, limit * LENGTH_BUFFER)))


def has_thought(record: Record) -> float:
    """A closed thought with content."""
    return float(record.generation is not None and _THOUGHT.search(record.generation.text) is not None)


def _lo(record: Record) -> float:
    timing = record.timing
    return max(0.0, timing.lo) if timing is not None and math.isfinite(timing.lo) else 0.0
