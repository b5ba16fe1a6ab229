"""What a run's configuration means for the small policy: how it is made, and the corpus that it can be taught by."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.lab.small_policy.author import CAREFUL
from kbrl_async.lab.small_policy.corpus import examples
from kbrl_async.lab.small_policy.making import Progress, SmallPolicyOptions, ensure_small_policy, folder_of
from kbrl_async.runs.config import Config
from kbrl_async.runs.origins import cache_folder


def ensure(config: Config, cache: Path, told: Progress, device: str) -> Path:
    """The small policy's folder, made now where the cache has none. `told(what, share)` hears of it, and may raise."""
    return ensure_small_policy(cache, small_options(config), told, device)


def is_made(config: Config) -> bool:
    """Whether the cache has it, so that `ensure` takes no time."""
    return folder_of(cache_folder(config), small_options(config)) is not None


def small_options(config: Config) -> SmallPolicyOptions:
    """The only place where they are put together."""
    turns = {"single_turn": 0.0, "multi_turn": 1.0, "agents": 0.5}[config.mode] * config.sft.turn_share
    shots = config.sft.shot_share if config.prompt.option == "raicl" else 0.0
    return SmallPolicyOptions(
        sft=msgspec.structs.replace(config.sft, turn_share=turns, shot_share=shots),
        prompt_option=config.prompt_option,
        backend=config.backend,
        verdict_share=turns if config.mode == "agents" else 0.0,
    )


def right_answers(config: Config) -> list[tuple[str, str]]:
    """Prompts with answers without a slip: to the suite's training problems and to ones like them."""
    count = config.demonstrations.examples
    seed, option = config.seed + 1, config.prompt_option
    drawn = examples(seed, count, habits=CAREFUL, prompt_option=option, backend=config.backend)
    return [(example.prompt, example.answer) for example in drawn]
