"""Published policy versions: `policy-v{n}/` folders that samplers load.

::

    policy-v17/  manifest.json   PolicyVersion: parent, step, SHA-256 of the weights, canary log-probs (I8)
                 model.safetensors + config.json           (kind "full")
                 adapter_model.safetensors + adapter_config.json   (kind "lora", as peft writes it)
                 tinker.json                               (kind "tinker": the path under which that service has them)
                 files.json      all of these with their SHA-256
                 COMPLETE        written last

Invariants: a version appears whole or not at all; it never changes; the newest complete one always survives collection.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from kbrl_async.durable import file_sha256, remove_leftovers, write_atomically, write_folder
from kbrl_async.errors import CheckpointError
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies.manifests import HELD as HELD
from kbrl_async.learning.policies.manifests import best as best
from kbrl_async.learning.policies.manifests import collect_garbage as collect_garbage
from kbrl_async.learning.policies.manifests import held as held
from kbrl_async.learning.policies.manifests import hold as hold
from kbrl_async.learning.policies.manifests import load_manifest as load_manifest
from kbrl_async.learning.policies.manifests import newest as newest
from kbrl_async.learning.policies.manifests import version_folder as version_folder
from kbrl_async.learning.policies.models import DTYPES, MAIN, active, adapter_names, causal_lm, is_lora
from kbrl_async.learning.policies.snapshot import HostCopy, Named, as_they_are, named_weights
from kbrl_async.weights import FILES, LISTED, Canaries, check_here, tensors
from kbrl_async.weights import MANIFEST as MANIFEST
from kbrl_async.weights import POLICY_PREFIX as POLICY_PREFIX
from kbrl_async.weights.groups import TensorEntry
from protocols.records import AdapterProof, CanaryPrompt, PolicyVersion
from protocols.transfer import PolicyFile

FIRST = "first.json"
"""The manifest of version 0, kept when its weights are collected: what a replay begins with is proven by it."""


class Pending(msgspec.Struct, frozen=True):
    """A version that is made and not yet on disk: the model is not needed any more, and may be trained on."""

    directory: Path
    manifest: PolicyVersion
    """Without hashes: they are made while the files are written."""
    fill: Callable[[Path], Mapping[str, str]]
    """Writes all weights; the SHA-256 of each file, by role ("" for the main one)."""
    weights: Mapping[str, torch.Tensor] | None = None
    """All weights of a full version, as they will be written; with an `index` this rank's rows of them."""
    index: Sequence[TensorEntry] | None = None
    """Of the whole weights, where ranks hold rows."""

    def write(self) -> PolicyVersion:
        """In any thread; makes the folder appear."""
        made: list[PolicyVersion] = []

        def fill(folder: Path) -> None:
            digests = self.fill(folder)
            made.append(_hashed(self.manifest, digests))
            (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(made[0]), indent=1))
            (folder / LISTED).write_bytes(msgspec.json.encode(_listed(folder, self.manifest.kind, digests)))

        remove_leftovers(self.directory, POLICY_PREFIX)
        write_folder(version_folder(self.directory, self.manifest.version), fill)
        if self.manifest.version == 0:
            write_atomically(self.directory / FIRST, msgspec.json.encode(made[0]).decode())
        return made[0]


def _listed(folder: Path, kind: str, digests: Mapping[str, str]) -> list[PolicyFile]:
    """The large ones were hashed while they were written."""
    known = {folder / role / FILES[kind]: digest for role, digest in digests.items()}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        PolicyFile(str(path.relative_to(folder)), known.get(path) or file_sha256(path), path.stat().st_size)
        for path in files
    ]


def _hashed(manifest: PolicyVersion, digests: Mapping[str, str]) -> PolicyVersion:
    adapters = {
        role: msgspec.structs.replace(proof, weights_sha256=digests[role]) for role, proof in manifest.adapters.items()
    }
    return msgspec.structs.replace(manifest, weights_sha256=digests[""], adapters=adapters)


def publish(
    directory: Path,
    model: torch.nn.Module,
    version: int,
    parent: int | None,
    step: int,
    canary: list[int],
    base_model: str = "",
    clock: Callable[[], float] = time.time,
    texts: Sequence[tuple[str, list[int]]] = (),
    logprobs_of: Callable[[list[int]], list[float]] | None = None,
    rounded_to: str = "fp32",
    gathered: Named | None = None,
) -> PolicyVersion:
    """`prepare`, written at once; full weights rounded to a key of `DTYPES`."""
    copied = as_they_are if rounded_to == "fp32" else HostCopy(DTYPES[rounded_to]).of
    proof = Canaries(canary, list(texts))
    made = prepare(directory, model, version, parent, step, proof, base_model, clock, logprobs_of, copied, gathered)
    return made.write()


def prepare(
    directory: Path,
    model: torch.nn.Module,
    version: int,
    parent: int | None,
    step: int,
    canaries: Canaries,
    base_model: str = "",
    clock: Callable[[], float] = time.time,
    logprobs_of: Callable[[list[int]], list[float]] | None = None,
    copied: Callable[[Named], dict[str, torch.Tensor]] = as_they_are,
    gathered: Named | None = None,
) -> Pending:
    """`policy-v{version}`, proven by the canaries' log-probs. `logprobs_of` computes the policy's of a prompt, where
    the model can't be asked directly: `Trainer.sequence_logprobs`. `copied` holds the weights until they are written:
    a `HostCopy` where the model is trained on meanwhile. `gathered`: the trained weights, where `model` holds a share
    of them only (`Trainer.gathered_weights`).

    Publishing a version again replaces it: after a crash between publishing and checkpoint the learner does so.
    """
    score = logprobs_of or (lambda ids: sequence_logprobs(causal_lm(model), ids))
    if is_lora(model):
        fill, weights = _adapters(model, copied, gathered), None
    else:
        weights = copied(named_weights(model) if gathered is None else gathered)
        fill = functools.partial(_write_full, weights, model.config)
    made = prepare_as(
        directory, "lora" if is_lora(model) else "full", fill, score, version, parent, step, canaries, base_model, clock
    )
    adapters = {name: AdapterProof("", _logprobs(model, name, score, canaries)) for name in adapter_names(model)[1:]}
    rounded = weights is not None and any(tensor.dtype is torch.bfloat16 for tensor in weights.values())
    manifest = msgspec.structs.replace(made.manifest, adapters=adapters, dtype="bf16" if rounded else "fp32")
    return msgspec.structs.replace(made, manifest=manifest, weights=weights)


def prepare_parts(
    directory: Path,
    config: Any,
    rows: Mapping[str, torch.Tensor],
    shapes: Mapping[str, list[int]],
    collected: Callable[[list[TensorEntry]], Named],
    score: Callable[[list[int]], list[float]],
    version: int,
    parent: int | None,
    step: int,
    canaries: Canaries,
    base_model: str = "",
) -> Pending:
    """`prepare` of full weights whose rows lie on several ranks, `rows` here. `shapes` are those of the whole ones,
    which `collected` gives one after the other when the file is written."""
    order = tensors.in_order((name, tensor.element_size()) for name, tensor in rows.items())
    index = [TensorEntry(name, tensors.NAMES[rows[name].dtype], shapes[name]) for name in order]

    def fill(folder: Path) -> Mapping[str, str]:
        places = [(entry.name, entry.dtype, entry.shape) for entry in index]
        digest = tensors.write_as_they_come(folder / FILES["full"], places, collected(index))
        config.save_pretrained(str(folder))
        return {"": digest}

    made = prepare_as(directory, "full", fill, score, version, parent, step, canaries, base_model)
    rounded = any(entry.dtype == tensors.NAMES[torch.bfloat16] for entry in index)
    manifest = msgspec.structs.replace(made.manifest, dtype="bf16" if rounded else "fp32")
    return msgspec.structs.replace(made, manifest=manifest, weights=rows, index=index)


def prepare_as(
    directory: Path,
    kind: str,
    fill: Callable[[Path], Mapping[str, str]],
    score: Callable[[list[int]], list[float]],
    version: int,
    parent: int | None,
    step: int,
    canaries: Canaries,
    base_model: str,
    clock: Callable[[], float] = time.time,
) -> Pending:
    """`prepare`, of weights that `fill` puts into a folder, as a `kind` of `weights.FILES`."""
    assert len(canaries.ids) >= 2, "a canary needs a token to predict"
    logprobs = score(canaries.ids)
    more = tuple(CanaryPrompt(text, ids, score(ids)) for text, ids in canaries.texts)
    manifest = PolicyVersion(
        version, parent, step, kind, "", canaries.ids, logprobs, base_model, clock(), canaries=more
    )
    return Pending(directory, manifest, fill)


def _logprobs(
    model: torch.nn.Module, adapter: str, score: Callable[[list[int]], list[float]], canaries: Canaries
) -> list[float]:
    with active(model, adapter):
        return score(canaries.ids)


def _write_full(weights: Mapping[str, torch.Tensor], config: Any, folder: Path) -> Mapping[str, str]:
    digest = tensors.write(folder / FILES["full"], weights)
    config.save_pretrained(str(folder))
    return {"": digest}


def _adapters(
    model: torch.nn.Module, copied: Callable[[Named], dict[str, torch.Tensor]], gathered: Named | None
) -> Callable[[Path], Mapping[str, str]]:
    """All adapters as peft writes them, each beside its settings."""
    from peft import get_peft_model_state_dict

    held = None if gathered is None else dict(gathered)
    named = {
        f"{name}/{key}": tensor
        for name in adapter_names(model)
        for key, tensor in get_peft_model_state_dict(
            model, state_dict=held, adapter_name=name, save_embedding_layers=False
        ).items()
    }
    weights = copied((key, tensor.detach()) for key, tensor in named.items())
    settings = {name: _adapter_settings(model, name) for name in adapter_names(model)}

    def fill(folder: Path) -> Mapping[str, str]:
        digests: dict[str, str] = {}
        for name, one in settings.items():
            role = "" if name == MAIN else name
            (folder / role).mkdir(exist_ok=True)
            one.save_pretrained(str(folder / role))
            mine = {key.removeprefix(f"{name}/"): t for key, t in weights.items() if key.startswith(f"{name}/")}
            digests[role] = tensors.write(folder / role / FILES["lora"], mine)
        return digests

    return fill


def _adapter_settings(model: Any, name: str) -> Any:
    """A copy for who loads it: nothing is trained there."""
    settings = copy.deepcopy(model.peft_config[name])
    settings.inference_mode = True
    settings.base_model_name_or_path = settings.base_model_name_or_path or causal_lm(model).name_or_path or None
    return settings


@torch.no_grad()
def load_weights(folder: Path, model: torch.nn.Module) -> PolicyVersion:
    """Puts a version's weights into `model`, which is of its kind; returns its manifest. Raises CheckpointError."""
    manifest = load_manifest(folder)
    check_here(folder, manifest)
    if manifest.kind == "lora":
        from peft import set_peft_model_state_dict

        for name in adapter_names(model):
            role = "" if name == MAIN else name
            digest = manifest.adapters[role].weights_sha256 if role else manifest.weights_sha256
            set_peft_model_state_dict(model, tensors.read(folder / role / FILES["lora"], digest), adapter_name=name)
        return manifest
    held = dict(model.state_dict(keep_vars=True))
    stored = tensors.read(folder / FILES["full"], manifest.weights_sha256)
    if {name for name, _ in named_weights(model)} != stored.keys():
        raise CheckpointError(f"{folder} is of another model", "Use the run's own model")
    for name, tensor in stored.items():
        _put(tensor.to(held[name].device), held[name])
    return manifest


def _put(stored: torch.Tensor, held: torch.Tensor) -> None:
    """`held` becomes `stored`, where it does not round to it already: a rounded version takes no precision away."""
    held.copy_(torch.where(held.to(stored.dtype) == stored, held, stored.to(held.dtype)))
