"""Puts the policy to be evaluated where samplers look for one: `policies/policy-v{n}` of the evaluation's run folder.

Its canaries are published with it, the same as in training, so that the sampler proves what it serves (I8).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from kbrl_async.durable import MARKER, write_folder
from kbrl_async.errors import CheckpointError
from kbrl_async.learning import checkpoints
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config
from kbrl_async.runs.targets import Target
from kbrl_async.weights import prove
from protocols.records import PolicyVersion

Told = Callable[[str, float], None]


def published(target: Target, directory: Path, config: Config, told: Told) -> PolicyVersion:
    """The manifest of what stands in `directory`, which is `target` afterwards if nothing stood there.

    :raises KbrlError: it can't be loaded.
    """
    found = versions.newest(directory)
    return found[0] if found else _publish(target, directory, config, told)


def _publish(target: Target, directory: Path, config: Config, told: Told) -> PolicyVersion:
    if target.kind == "policy":
        return adopt(Path(target.name), directory)
    model, base = _loaded(target, config, told)
    proof = origins.canaries(config, load_tokenizer(base))
    return versions.publish(directory, model, target.version, None, target.version, proof.ids, base, texts=proof.texts)


def _loaded(target: Target, config: Config, told: Told) -> tuple[torch.nn.Module, str]:
    """The policy, and the name of its base."""
    folder = Path(target.name)
    if target.kind == "adapter":
        return _load_adapter(folder, config)
    if target.kind == "checkpoint":
        base = _base_of(target, config, told)
        model = load_model(base, lora_rank=config.lora_rank, adapters=checkpoints.adapters_in(folder))
        checkpoints.load_weights(folder, model)
        return model, base
    base = str(origins.base_model(config, told)) if target.name == origins.SMALL else target.name
    return load_model(base), base


def _base_of(target: Target, config: Config, told: Told) -> str:
    """The base that the checkpoint's run began with."""
    if target.run is not None and (found := versions.newest(Path(target.run) / "policies")) is not None:
        return found[0].base_model
    return str(origins.base_model(config, told))


def _load_adapter(folder: Path, config: Config) -> tuple[torch.nn.Module, str]:
    from peft import PeftConfig, PeftModel

    named = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    base = config.model_name if config.model_name != origins.SMALL else str(named or "")
    if not base:
        raise CheckpointError(f"{folder} does not say its base model", "Add model_name=… of the base")
    plain = load_model(base)
    with warnings.catch_warnings():
        # peft asks transformers for a property by its deprecated name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        return PeftModel.from_pretrained(plain, str(folder)).eval(), base


def adopt(folder: Path, directory: Path) -> PolicyVersion:
    """A published version of another run, as it is: linked where the file system allows, else copied."""
    manifest = versions.load_manifest(folder)
    prove(folder, manifest)

    def fill(target: Path) -> None:
        for path in sorted(folder.rglob("*")):
            place = target / path.relative_to(folder)
            if path.is_dir():
                place.mkdir()
            elif path.name != MARKER:
                _link(path, place)

    write_folder(versions.version_folder(directory, manifest.version), fill)
    return manifest


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place)
    except OSError:
        shutil.copy2(path, place)
