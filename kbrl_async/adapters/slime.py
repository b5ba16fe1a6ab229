"""slime (as of its rm_hub): `--custom-rm-path kbrl_async.adapters.slime.custom_rm`.

A sample's `label` is the problem's id, or its source. `--rm-type remote_rm --rm-url http://HOST:8470/v1/remote_rm` does
the same without this package at slime's end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kbrl_async.adapters.verdicts import RewardOptions, reward_of


async def custom_rm(args: Any, sample: Any, **_: Any) -> float | list[float]:
    """The reward of one sample, or of a list of them, by `args.kbrl_preset` and the like where they are set.

    :raises InfraError: the host failed.
    """
    options = RewardOptions.among(
        {name.removeprefix("kbrl_"): value for name, value in vars(args).items() if name.startswith("kbrl_")}
    )
    if isinstance(sample, list):
        return list(await asyncio.gather(*(_of(one, options) for one in sample)))
    return await _of(sample, options)


async def _of(sample: Any, options: RewardOptions) -> float:
    return await reward_of(sample.response, sample.label, options)
