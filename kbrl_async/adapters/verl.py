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

from kbrl_async.adapters.verdicts import DEADLINE_S, Options, reward_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    server: str = "",
    key: str = "",
    preset: str = "",
    timing: bool = True,
    backend: str = "",
    deadline_s: float = DEADLINE_S,
    **_: Any,
) -> dict[str, float]:
    """`score`, which is trained on.

    :raises InfraError: the host failed; a reward of zero would teach something that is not so.
    """
    options = Options(server=server, key=key, preset=preset, timing=timing, backend=backend, deadline_s=deadline_s)
    return {"score": await reward_of(solution_str, ground_truth, options)}
