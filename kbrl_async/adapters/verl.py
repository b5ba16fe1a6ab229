"""verl (run with 0.9): a custom reward function.

::

    reward.custom_reward_function.path=pkg://kbrl_async.adapters.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.preset=stage3
    reward.reward_manager.name=naive        # asynchronous: it awaits the function, so many answers are verified at once

`ground_truth` of a row's `reward_model` is the problem's id, or its source.
"""

from __future__ import annotations

from typing import Any

from kbrl_async.adapters.verdicts import RewardOptions, reward_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **given: Any,
) -> dict[str, float]:
    """`score`, which is trained on. `given`: `reward_kwargs`, see `verdicts.RewardOptions`, and what else verl passes.

    :raises InfraError: the host failed; a reward of zero would teach something that is not so.
    """
    return {"score": await reward_of(solution_str, ground_truth, RewardOptions.among(given))}
