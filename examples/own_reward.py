"""A reward of your own, in a file of your own: a part, and a preset that pays for it.

    python examples/own_reward.py                                                          # one update that is paid so
    PYTHONPATH=examples kbrl train reward.preset=own_reward:SHORT name=short       # a run that is

A part is a function of a rollout's record; it is asked only where the candidate itself is to be paid, so never for a
fault of the infrastructure, and never for cheating.
"""

from __future__ import annotations

import rl_loop

from kbrl_async.rollouts.rewards.presets import Preset
from protocols.rollout import Record

LINES = 80
"""A kernel of so many lines, or more, earns nothing for its length."""


def brevity(record: Record) -> float:
    """1 for an empty kernel, 0 for one of `LINES` lines, linear between."""
    return max(0.0, 1.0 - record.source.count("\n") / LINES)


SHORT = Preset({"compile": 0.1, "correct": 0.5, "speed": 0.3, "own_reward:brevity": 0.1}, gate="valid")
"""Behind a gate: what does not compile earns nothing, however short it is."""

if __name__ == "__main__":
    rl_loop.main("reward.preset=own_reward:SHORT")
