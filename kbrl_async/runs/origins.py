"""The policy that a configuration begins with: the project's own small one (made now, if need be), or a named model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbrl_async.doors import Door
from kbrl_async.kernels.problems import load_problems
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.runs.config import Config
from kbrl_async.weights import MADE, MANIFEST, Canaries

SMALL = "small"
CANARY_TOKENS = 32
CANARY_TEXTS = (
    "for (long i = 0; i < n; i++) {\n    y[i] = x[i] > 0.0f ? x[i] : 0.0f;\n}\n",
    "class ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.softmax(x, dim=-1)\n",
    "The sum over 1,024 columns is 3.5e-2; café, naïve, Σ and ≥ are not ASCII.",
)

POLICIES = Door("policies", {SMALL: "kbrl_async.lab.small_policy.configured:ensure"})
"""Policies that are made here and now: `(config, cache folder, progress, device) -> folder`."""


def base_model(config: Config, told: Callable[[str, float], None]) -> Path | str:
    """A folder, or a name that transformers can load. `told(what, share)` hears of the making, and may raise.

    :raises CheckpointError: it is a policy of a run, and damaged.
    """
    if (Path(config.model_name) / MANIFEST).is_file():
        return _as_model(Path(config.model_name), cache_folder(config) / "policies")
    if config.model_name != SMALL:
        return config.model_name
    import torch  # the rest of this module is asked by commands that must answer at once

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    return Path(POLICIES.load(SMALL)(config, cache_folder(config), told, device))


def base_beside(config: Config) -> str | None:
    """The folder of the base that version 0 will be of, where a sampler need not wait for it to start its engine: vLLM
    on a GPU without the learner, which replaces all weights in place. None where only the learner knows its base."""
    folder = Path(config.model_name)
    is_full = not config.lora_rank and config.learner.engine == "torch" and config.sampler.update != "adapter"
    if not (config.learner_is_apart and is_full and config.sampler.engine == "vllm") or (folder / MANIFEST).is_file():
        return None
    is_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return config.model_name if is_model else None


def cut(base: Path | str) -> str:
    """How far a policy that was made here had come when `sft.max_seconds` ended it, such as `step 134 of 300`.

    Empty for a whole one, and for any other model.
    """
    try:
        made = json.loads((Path(base) / MADE).read_text())
        steps, wanted = int(made["report"]["steps"]), int(made["options"]["sft"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"step {steps} of {wanted}" if steps < wanted else ""


def _as_model(policy: Path, cache: Path) -> Path:
    """The policy of a run as a model's folder, its adapter merged; made once for each weights."""
    from kbrl_async.learning.policies import versions  # torch
    from kbrl_async.learning.policies.exporting import export

    manifest = versions.load_manifest(policy)
    folder = cache / f"{policy.parent.parent.name}-v{manifest.version}-{manifest.weights_sha256[:12]}"
    if not folder.is_dir():
        export(policy, folder, merge=manifest.kind == "lora")
    return folder


def cache_folder(config: Config) -> Path:
    """`cache_path`, else our folder in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(config.cache_path) if config.cache_path else users / "kbrl-async"


def canaries(config: Config, tokenizer: Any) -> Canaries:
    return Canaries(_canary_ids(config, tokenizer), _canary_texts(tokenizer))


def _canary_ids(config: Config, tokenizer: Any) -> list[int]:
    """The fixed prompt whose log-probs prove the policy: the start of the first problem's prompt."""
    problem = load_problems(config.problems or "")[0]
    prompt = render_prompt(config.prompt_option, problem, config.backend)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    return ids[:CANARY_TOKENS]


def _canary_texts(tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Fixed texts with their first ids: what a policy reads and writes, so that other weights or tokenizers show."""
    encoded = [(text, tokenizer.encode(text, add_special_tokens=False)[:CANARY_TOKENS]) for text in CANARY_TEXTS]
    return [(text, ids) for text, ids in encoded if len(ids) > 1]
