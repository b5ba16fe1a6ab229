"""A published policy as a plain Hugging Face folder, which anything that knows `from_pretrained` loads.

::

    policy-v17/ (full, or a LoRA adapter) ─▶ DIR/ config.json  model.safetensors  tokenizer…   (full, or merged)
                                                  adapter_config.json  adapter_model.safetensors  (adapter as it is)
                                                  kbrl_export.json: what it is, SHA-256 of each file

Invariants
* The folder appears whole or not at all, and nothing that exists is overwritten.
* What was written is loaded again and must give the version's canary log-probs (I8), to the precision of its dtype.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from kbrl_async.durable import MARKER, file_sha256, write_folder
from kbrl_async.errors import CheckpointError, ConfigError, PolicyMismatch
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import DTYPES, MAIN, causal_lm, load_model, load_tokenizer
from kbrl_async.weights import FILES, MADE, check_here, prove
from protocols.records import PolicyVersion

ABOUT = "kbrl_export.json"
TOLERANCE = {"fp32": 1e-3, "bf16": 0.5, "fp16": 0.1}
"""Largest difference of a canary log-prob, by the precision of the weights."""


class Exported(msgspec.Struct, frozen=True):
    """What stands in the folder."""

    policy_version: int
    kind: str
    """`full`, `merged` or `adapter`."""
    role: str
    base_model: str
    dtype: str
    canary_difference: float
    """Largest difference of a canary log-prob between the published policy and this folder."""
    sha256: dict[str, str]
    created_at: float = 0.0


def export(
    policy: Path,
    target: Path,
    *,
    merge: bool = False,
    dtype: str = "fp32",
    role: str = MAIN,
    clock: Callable[[], float] = time.time,
) -> Exported:
    """Writes `target`. `merge` adds a LoRA adapter to its base; `role` chooses among several adapters.

    :raises ConfigError: `target` is taken, or the arguments do not go together.
    :raises CheckpointError: the policy or its base can't be read.
    """
    manifest = versions.load_manifest(policy)
    check_here(policy, manifest)
    prove(policy, manifest)
    _check(manifest, target, merge, dtype, role)
    made: list[Exported] = []

    def fill(folder: Path) -> None:
        if manifest.kind == "lora" and not merge:
            _copy_adapter(policy if role == MAIN else policy / role, manifest.base_model, folder)
        else:
            _save_model(_whole(policy, manifest, dtype, role), folder)
        _save_tokenizer(manifest.base_model or str(policy), folder)
        difference = _prove(folder, manifest, dtype, role)
        kind = "full" if manifest.kind == "full" else "merged" if merge else "adapter"
        sums = {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
        about = Exported(manifest.version, kind, role, manifest.base_model, dtype, difference, sums, created_at=clock())
        (folder / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1))
        made.append(about)

    write_folder(target, fill)
    (target / MARKER).unlink()  # who reads the folder knows nothing of our markers
    return made[0]


def _check(manifest: PolicyVersion, target: Path, merge: bool, dtype: str, role: str) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty", "Name a folder that does not exist")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", f"Known dtypes: {', '.join(DTYPES)}")
    if role != MAIN and role not in manifest.adapters:
        known = ", ".join([MAIN, *manifest.adapters])
        raise ConfigError(f"the policy has no adapter {role!r}", f"It has {known}")
    if merge and manifest.kind != "lora":
        raise ConfigError("the policy has no adapter to merge: all its weights were trained", "Leave out --merge")
    if manifest.kind == "lora" and not merge and dtype != "fp32":
        raise ConfigError(f"an adapter alone is not converted to {dtype}", "Add --merge, or leave out --dtype")


def _whole(policy: Path, manifest: PolicyVersion, dtype: str, role: str) -> torch.nn.Module:
    """The model with the adapter added in fp32, converted last."""
    if manifest.kind == "full":
        model = load_model(str(policy))
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            from peft import PeftModel

            base = load_model(manifest.base_model)
            model = PeftModel.from_pretrained(base, str(policy if role == MAIN else policy / role)).merge_and_unload()
    return model.to(DTYPES[dtype])


def _save_model(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(str(folder), safe_serialization=True)  # type: ignore[operator]


def _copy_adapter(source: Path, base_model: str, folder: Path) -> None:
    shutil.copy(source / FILES["lora"], folder)
    settings: dict[str, Any] = msgspec.json.decode((source / "adapter_config.json").read_bytes())
    settings["base_model_name_or_path"] = base_model
    (folder / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(settings)))


def _save_tokenizer(base_model: str, folder: Path) -> None:
    """The base's tokenizer as it stands there, or from the hub, none where the base has none; and how one that was made
    here is asked."""
    local = Path(base_model).expanduser()
    if not local.is_dir():
        load_tokenizer(base_model).save_pretrained(str(folder))
        return
    names = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
    for path in (path for name in (*names, "generation_config.json", MADE) for path in local.glob(name)):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)


def _prove(folder: Path, manifest: PolicyVersion, dtype: str, role: str) -> float:
    """Loads what was written as anybody would, and compares it with the published policy."""
    from transformers import AutoModelForCausalLM

    try:
        loaded = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"what was exported can't be loaded: {error}", "Check the base model's folder") from error
    expected = manifest.canary_logprobs if role == MAIN else manifest.adapters[role].canary_logprobs
    found = sequence_logprobs(causal_lm(loaded.eval()), manifest.canary_ids)
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if difference > max(TOLERANCE[dtype], TOLERANCE[manifest.dtype]):
        raise PolicyMismatch(
            f"canary log-probs of the export differ by {difference:.3g} from those of version {manifest.version}",
            "Export with --dtype fp32, and check that the base model is the one that was trained",
        )
    return difference
