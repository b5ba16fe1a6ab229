"""TRL (run with 1.16): a reward function for `GRPOTrainer`, `RLOOTrainer` and their like.

::

    GRPOTrainer(model, reward_funcs=kernel_reward, train_dataset=rows with `prompt` and `problem`)
    GRPOTrainer(model, reward_funcs=rewards(preset="correct", server="http://127.0.0.1:8470"), …)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

from kbrl_async.adapters.verdicts import RewardOptions, reward_or_none, run

RewardFunc = Callable[..., list[float | None]]


def kernel_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    problem: Sequence[str],
    *,
    options: RewardOptions | None = None,
    **_: Any,
) -> list[float | None]:
    """One reward for each completion, a text or a list of messages; None where the host failed, which TRL leaves out.

    :param problem: the data set's column: ids, or sources.
    """
    answers = [completion if isinstance(completion, str) else _last(completion) for completion in completions]

    async def all_of() -> list[float | None]:
        return await asyncio.gather(
            *(reward_or_none(answer, asked, options) for answer, asked in zip(answers, problem, strict=True))
        )

    return run(all_of())


def rewards(**options: Any) -> RewardFunc:
    """`kernel_reward` with options of its own, see `verdicts.RewardOptions`."""
    made = functools.partial(kernel_reward, options=RewardOptions(**options))
    return functools.update_wrapper(made, kernel_reward)


def _last(messages: Sequence[dict[str, Any]]) -> str:
    """What the assistant said."""
    return str(messages[-1].get("content") or "") if messages else ""
