"""Other names of keys: those of the last release, those that users of such tools know, and what a misspelt one meant.

Invariant: a hint names a key that does what was asked for, or none. A name of another system's that has no counterpart
says what does its work here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

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
    "base_url": "sampler.base_url",
    "kl_penalty_coef": "learner.kl_weight",
    "loss_fn": "loss",
    "num_substeps": "learner.minibatches",
    "save_every": "learner.checkpoint_every",
    "wandb_project": "metrics.wandb_project",
}
"""Names that users of such tools know, taken for ours, with a line that says which."""


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


_BUILDERS = ("dataset_builder", "multiturn_dataset_builder")
_OF_BUILDERS = {
    "backend": "backend",
    "batch_size": "batch_size",
    "gamma": "gamma",
    "group_size": "group_size",
    "level": "level",
    "levels": "level",
    "max_turns": "max_turns",
    "measure_performance": "timing_bench.timed",
    "modal_timeout": "timing_bench.deadline_s",
    "precision": "precision",
    "prompt_include_hardware": "prompt.hardware",
    "prompt_precision": "precision",
    "seed": "seed",
    "speedup_threshold": "turns.stop_speedup",
    "test_fraction": "heldout_share",
}
"""What a trainer with a builder of data sets says there, and has a place of its own here."""
ALIASES |= {f"{builder}.{leaf}": key for builder in _BUILDERS for leaf, key in _OF_BUILDERS.items()}
ALIASES |= {old.replace(*_BUILDERS): new for old, new in RENAMED.items()}
ALIASES |= {
    "multiturn.aggregation": "turns.returns",
    "multiturn.gamma": "gamma",
    "multiturn.n": "max_turns",
    "multiturn.speedup_threshold": "turns.stop_speedup",
}


class Translated(NamedTuple):
    """A name whose values are other words here."""

    key: str
    values: Mapping[str, str]


_STOP = Translated("turns.stop", {"true": "correct", "false": "never"})
_SOURCE = Translated("problems", {"huggingface": "ScalingIntelligence/KernelBench", "local": "kernelbench"})
TRANSLATED = {
    **{f"{builder}.dataset_src": _SOURCE for builder in _BUILDERS},
    **{f"{section}.early_stop_on_correct": _STOP for section in (*_BUILDERS, "multiturn")},
    "multiturn.enabled": Translated("mode", {"true": "multi_turn", "false": "single_turn"}),
}


_ELSEWHERE = {
    "end_problem": "Put the files into a folder, problems=FOLDER; an evaluation has evaluation.ids",
    "kl_discount_factor": "The penalty is of each token; see learner.kl",
    "modal_gpu_type": "Kernels run on the GPUs of this host, or of workers: docs/hosts.md",
    "num_correct_trials": "A kernel meets all secret input sets; curriculum.strictness=rising has fewer of them early",
    "num_epochs": "Problems are drawn as long as a run lasts: max_steps, max_minutes",
    "num_perf_trials": "Pairs are timed until the interval is narrow: timing_bench.min_pairs, timing_bench.max_pairs",
    "prompt_gpu_name": "A prompt names the GPU that kernels run on: prompt.hardware",
    "remove_constant_reward_groups": "Groups of equal rewards are left out wherever their mean is the baseline",
    "reward_enable_static_checker": "Static checks are always made: docs/verification.md",
    "renderer_name": "The model's own chat template is used: prompt.chat_template",
    "resume_from_batch": "A run goes on where it stopped: resume=runs/NAME",
    "reward_length_weight": "Weigh the part 'length' in a preset of yours: docs/howto-reward.md",
    "reward_thinking_weight": "Weigh the part 'thinking' in a preset of yours: docs/howto-reward.md",
    "shuffle": "Problems are drawn at random, by seed; curriculum.kind says from which",
    "start_problem": "Put the files into a folder, problems=FOLDER; an evaluation has evaluation.ids",
    "timing_method": "Medians of paired ratios are taken: docs/timing.md",
    "use_modal": "Kernels run confined on this host, or on workers: docs/hosts.md",
    "wandb_name": "A run is called there as it is here: name",
}


def instead_of(name: str) -> str:
    """What does the work of another system's setting that has no counterpart; empty for any other name."""
    section, _, leaf = name.rpartition(".")
    return _ELSEWHERE.get(leaf, "") if section in ("", *_BUILDERS) else ""


def is_foreign(name: str) -> bool:
    """Whether it is only known to another system, where null says that nothing was said."""
    section = name.partition(".")[0]
    return name not in RENAMED and (section in (*_BUILDERS, "multiturn") or bool(instead_of(name)))


OTHER_NAMES = {
    "adapter": "lora_rank",
    "api_key": "sampler.api_key_env",
    "base_model": "model_name",
    "beta": "learner.kl_weight",
    "clip_eps": "learner.clip_low or learner.clip_high",
    "clip_range": "learner.clip_low or learner.clip_high",
    "clip_epsilon_high": "learner.clip_high",
    "clip_epsilon_low": "learner.clip_low",
    "cliprange": "learner.clip_low or learner.clip_high",
    "constant_length_norm": "learner.normalise",
    "dataset": "problems",
    "dataset_name": "problems",
    "discount": "gamma",
    "epsilon": "learner.clip_low or learner.clip_high",
    "gpus": "placement",
    "groups_per_batch": "batch_size",
    "heldout": "heldout_share or evaluation.split",
    "kl_coef": "learner.kl_weight",
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
    "num_train_epochs": "learner.epochs",
    "num_workers": "processes.compile_farm or processes.timing_bench",
    "output_dir": "log_path",
    "problem_ids": "evaluation.ids",
    "rank": "lora_rank",
    "resume_from_checkpoint": "resume",
    "run_dir": "log_path or name",
    "run_name": "name",
    "save_dir": "log_path",
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
