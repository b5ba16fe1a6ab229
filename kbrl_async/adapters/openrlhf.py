"""OpenRLHF (run with 0.11): `--reward.remote_url PATH/openrlhf.py`, the path of this file (`python -m
kbrl_async.adapters.openrlhf` prints it), or `http://HOST:8470/v1/openrlhf`.

A label is the problem's id, or its source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kbrl_async.adapters.verdicts import RewardOptions, reward_of, run
from kbrl_async.serving.dialects import answer_in


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """`rewards` and `scores` of texts that are prompt and answer in one, as tensors.

    :raises InfraError: the host failed; OpenRLHF then has no reward for the sample.
    """
    import torch

    async def all_of() -> list[float]:
        return await asyncio.gather(
            *(
                reward_of(answer_in(query, prompt), label, RewardOptions())
                for query, prompt, label in zip(queries, prompts, labels, strict=True)
            )
        )

    found = torch.tensor(run(all_of()))
    return {"rewards": found, "scores": found, "extra_logs": {}}


if __name__ == "__main__":
    print(__file__)
