"""Named algorithms as settings that lie below all others. To add one: one entry here and its name in the schema.

Only what makes the algorithm is set: sizes, rates and rewards stay those of the run. Below even these lie those that a
model of its own has instead of the defaults, which suit a policy of a few million parameters. Sources: GRPO (Shao et
al. 2024), Dr. GRPO (Liu et al. 2025), DAPO (Yu et al. 2025), RLOO (Ahmadian et al. 2024), GSPO (Zheng et al. 2025),
CISPO (MiniMax-M1), decoupled PPO (Hilton et al. 2022; AReaL), A-3PO, truncated importance sampling (IMPALA).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbrl_async.runs.config.sources import Setting

_PLAIN: dict[str, Any] = {"learner.negative_scale": 1.0, "learner.scale_advantages": False}
REAL_MODEL: dict[str, Any] = {**_PLAIN, "learner.epochs": 1, "learner.minibatches": 1}
"""A model that was not made here learns from all advantages as they are, once."""
_CORRECT: dict[str, Any] = {"reward.preset": "best_of_n"}
"""What is imitated has to be correct."""
_CLIPPED: dict[str, Any] = {**_PLAIN, "learner.clip_low": 0.2, "learner.clip_high": 0.2}

PRESETS: dict[str, dict[str, Any]] = {
    "dppo_tv": {"loss": "dppo_tv", "advantage": "leave_one_out", "learner.normalise": "token_mean"},
    "grpo": {**_CLIPPED, "loss": "grpo", "advantage": "mean_std", "learner.normalise": "sequence_mean"},
    "dr_grpo": {**_CLIPPED, "loss": "grpo", "advantage": "mean", "learner.normalise": "dr_grpo"},
    "dapo": {
        **_CLIPPED,
        "loss": "grpo",
        "advantage": "mean_std",
        "learner.normalise": "token_mean",
        "learner.clip_high": 0.28,
        "learner.truncated": "penalise",
    },
    "ppo": {**_CLIPPED, "loss": "ppo", "advantage": "mean_std", "learner.normalise": "token_mean"},
    "rloo": {**_PLAIN, "loss": "reinforce", "advantage": "leave_one_out", "corrections": ["tis"]},
    "reinforce": {**_PLAIN, "loss": "reinforce", "advantage": "running_mean"},
    "gspo": {**_PLAIN, "loss": "gspo", "advantage": "mean_std", "learner.normalise": "sequence_mean"},
    "cispo": {**_PLAIN, "loss": "cispo", "advantage": "mean_std", "learner.normalise": "token_mean"},
    "decoupled": {**_CLIPPED, "loss": "decoupled", "advantage": "leave_one_out", "learner.normalise": "token_mean"},
    "a3po": {**_CLIPPED, "loss": "a3po", "advantage": "leave_one_out", "learner.normalise": "token_mean"},
    "kevin": {
        **_PLAIN,
        "mode": "multi_turn",
        "gamma": 0.4,
        "turns.returns": "sum",
        "turns.stop": "correct",
        "reward.preset": "kevin",
    },
    "tis": {**_PLAIN, "loss": "tis", "advantage": "leave_one_out", "learner.normalise": "token_mean"},
}


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reinforce": PRESETS["reinforce"],
    "best_of_n": {**_PLAIN, "loss": "reinforce", "advantage": "best_of_n", "group_size": 10, **_CORRECT},
    "reward_weighted_sft": {**_PLAIN, "loss": "reinforce", "advantage": "reward_weight", **_CORRECT},
    "sft": {**_PLAIN, "loss": "reinforce", "advantage": "reward_weight", "learner.epochs": 1},
}
"""Other ways to learn from the same rollouts; `sft` learns from demonstrations, which have the weight 1."""


PLACEMENTS: dict[str, dict[str, Any]] = {
    "one_gpu": {"device": "cuda", "timing_bench.shares_with": ["sampler", "learner"], "sampler.memory_share": 0.35},
    "two_gpus": {"device": "cuda", "timing_bench.shares_with": [], "sampler.memory_share": 0.5},
    "learner_apart": {"device": "cuda", "timing_bench.shares_with": ["sampler"], "sampler.memory_share": 0.6},
    "split": {
        "device": "cuda",
        "timing_bench.shares_with": [],
        "sampler.memory_share": 0.9,
        "processes.sampler": 1,
        "processes.timing_bench": 2,
    },
}
"""What each `placement` stands for beside the GPUs themselves, for which see `config.placement`."""


def preset_settings(settings: Sequence[Setting]) -> list[Setting]:
    """What the last `method`, `preset` and `placement` among `settings` stand for; nothing for an unknown name."""
    found = []
    for kind, table in (("method", METHODS), ("preset", PRESETS), ("placement", PLACEMENTS)):
        named = [str(setting.value) for setting in settings if setting.key == kind]
        chosen = table.get(named[-1], {}) if named else {}
        found += [Setting(key, value, f"{kind} {named[-1]}") for key, value in chosen.items()]
    return found
