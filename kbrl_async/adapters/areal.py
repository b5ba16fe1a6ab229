"""AReaL (run with 1.0): `reward_fn` of `RLVRWorkflow` and `MultiTurnWorkflow`, `"kbrl_async.adapters.areal.reward_fn"`.

The data set has a column `problem`: ids, or sources. AReaL calls it in processes of its own, takes 15 seconds for too
long, and then tries again, three times, before it counts the answer as worth 0. So this function raises before: with a
service the next try finds the work done.
"""

from __future__ import annotations

from typing import Any

from kbrl_async.adapters.verdicts import RewardOptions, reward_of, run

DEADLINE_S = 12.0


def reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    problem: str,
    **given: Any,
) -> float:
    """`given`: columns of the data set; among them may be options, see `verdicts.RewardOptions`.

    :raises InfraError: the host failed, or there is no verdict yet; never 0 for that.
    """
    return run(reward_of(completions, problem, RewardOptions.among(given, deadline_s=DEADLINE_S)))
