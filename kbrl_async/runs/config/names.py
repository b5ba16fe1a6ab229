"""Other names of keys: those of the last release, those that users of such tools know, and what a misspelt one meant.

Invariant: a hint names a key that does what was asked for, or none.
"""

from __future__ import annotations

import difflib

from kbrl_async.runs.config.keys import KEYS

ALIASES = {
    "checkpoint_path": "model_name",
    "load_checkpoint_path": "model_name",
    "output_path": "log_path",
    "measure_performance": "timing_bench.timed",
    "tensorboard_enabled": "tensorboard.enabled",
    "tensorboard_log_dir": "tensorboard.log_dir",
    "tensorboard_log_histograms_every": "tensorboard.histograms_every",
    "tensorboard_log_per_level": "tensorboard.per_level",
}
"""Names that users of such tools know, taken for ours."""


RENAMED = {
    "dataset_builder.prompt_option": "prompt.option",
    "dataset_builder.prompt_file": "prompt.file",
    "dataset_builder.prompt_hardware": "prompt.hardware",
    "dataset_builder.chat_template": "prompt.chat_template",
    "dataset_builder.thinking": "prompt.thinking",
    "dataset_builder.rag_index_path": "prompt.index",
    "dataset_builder.raicl_k": "prompt.examples",
    "dataset_builder.raicl_tokens": "prompt.max_tokens",
    "dataset_builder.raicl_live": "prompt.live_examples",
    "dataset_builder.reward_preset": "reward.preset",
    "dataset_builder.reward_format_weight": "reward.format_weight",
    "dataset_builder.reward_compile_weight": "reward.compile_weight",
    "dataset_builder.reward_correctness_weight": "reward.correctness_weight",
    "dataset_builder.reward_speed_weight": "reward.speed_weight",
    "dataset_builder.reward_plan_part": "reward.plan_part",
    "dataset_builder.reward_plan_weight": "reward.plan_weight",
}
"""Names until the last release, still read, with a warning, in this one; `config_hash` goes by them."""


OTHER_NAMES = {
    "adapter": "lora_rank",
    "api_key": "sampler.api_key_env",
    "base_model": "model_name",
    "beta": "learner.kl_weight",
    "clip_eps": "learner.clip_low or learner.clip_high",
    "clip_range": "learner.clip_low or learner.clip_high",
    "cliprange": "learner.clip_low or learner.clip_high",
    "dataset": "problems",
    "dataset_name": "problems",
    "discount": "gamma",
    "epsilon": "learner.clip_low or learner.clip_high",
    "gpus": "placement",
    "groups_per_batch": "batch_size",
    "heldout": "heldout_share or evaluation.split",
    "kl_coef": "learner.kl_weight",
    "kl_penalty_coef": "learner.kl_weight",
    "levels": "level",
    "logging_dir": "tensorboard.log_dir",
    "lr": "learning_rate",
    "lr_schedule": "learner.schedule",
    "lr_scheduler_type": "learner.schedule",
    "max_completion_length": "max_tokens",
    "max_grad_norm": "learner.grad_clip",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "model": "model_name",
    "model_path": "model_name",
    "num_epochs": "learner.epochs",
    "num_generations": "group_size",
    "num_gpus": "placement",
    "num_samples": "eval_samples or evaluation.samples",
    "num_substeps": "learner.minibatches",
    "num_train_epochs": "learner.epochs",
    "num_workers": "processes.compile_farm or processes.timing_bench",
    "output_dir": "log_path",
    "problem_ids": "evaluation.ids",
    "rank": "lora_rank",
    "resume_from_checkpoint": "resume",
    "run_dir": "log_path or name",
    "run_name": "name",
    "save_dir": "log_path",
    "save_every": "learner.checkpoint_every",
    "save_steps": "learner.checkpoint_every",
    "steps": "max_steps",
    "temp": "temperature",
    "test_every": "eval_every",
    "train_batch_size": "batch_size",
    "workers": "processes.compile_farm or processes.timing_bench",
}
"""What some keys are called elsewhere, where the spelling alone would lead astray; they are hints only."""
ALIKE = 0.85
"""Of the letters: a slip of the fingers, not another word that shares some."""


def nearest(name: str) -> str:
    """The key that `name` was meant to be: known by another name, right but for its section, or misspelt; or empty."""
    wanted = name.lower().replace("-", "_")
    leaf = wanted.rpartition(".")[2]
    if known := OTHER_NAMES.get(wanted) or OTHER_NAMES.get(leaf):
        return known
    if same := [key for key in KEYS if key.rpartition(".")[2] == leaf]:
        return " or ".join(same)
    names = {**ALIASES, **RENAMED, **{key: key for key in KEYS}}
    spelt = {_letters(name): key for name, key in names.items()}
    leaves = {_letters(name.rpartition(".")[2]): key for name, key in names.items()}
    return _alike(_letters(wanted), spelt) or _alike(_letters(leaf), leaves)


def _letters(name: str) -> str:
    return name.replace("_", "").replace(".", "")


def _alike(letters: str, keys: dict[str, str]) -> str:
    return next((keys[match] for match in difflib.get_close_matches(letters, keys, n=1, cutoff=ALIKE)), "")
