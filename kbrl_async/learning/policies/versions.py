"""Published policy versions: `policy-v{n}/` folders that samplers load.

::

    policy-v17/  manifest.json   PolicyVersion: parent, step, SHA-256 of the weights, canary log-probs (I8)
                 model.safetensors + config.json           (kind "full")
                 adapter_model.safetensors + adapter_config.json   (kind "lora", as peft writes it)
                 tinker.json                               (kind "tinker": the path under which that service has them)
                 COMPLETE        written last

Invariants: a version appears whole or not at all; it never changes; the newest complete one always survives collection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from kbrl_async.durable import (
    file_sha256,
    is_complete,
    numbered,
    remove_folder,
    remove_leftovers,
    write_atomically,
    write_folder,
)
from kbrl_async.errors import CheckpointError
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies.models import active, adapter_names, causal_lm, is_lora
from kbrl_async.weights import FILES, POLICY_PREFIX, Canaries, check_here, prove
from kbrl_async.weights import MANIFEST as MANIFEST
from protocols.records import AdapterProof, CanaryPrompt, PolicyVersion

PREFIX = POLICY_PREFIX
FIRST = "first.json"
"""The manifest of version 0, kept when its weights are collected: what a replay begins with is proven by it."""
HELD = "held.json"


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
    gathered: dict[str, torch.Tensor] | None = None,
) -> PolicyVersion:
    """Writes `policy-v{version}` and returns its manifest. `canary` is a fixed prompt of at least two token ids.
    `texts` are further ones, with their first token ids. `logprobs_of` computes the policy's log-probs of such a
    prompt, where the model can't be asked directly: `Trainer.sequence_logprobs`; `gathered` are the trained weights,
    where `model` holds a share of them only.

    Publishing a version again replaces it: after a crash between publishing and checkpoint the learner does so.
    """
    kind = "lora" if is_lora(model) else "full"
    score = logprobs_of or (lambda ids: sequence_logprobs(causal_lm(model), ids))

    def adapters(folder: Path) -> dict[str, AdapterProof]:
        return {name: _prove(model, name, folder, canary, score) for name in adapter_names(model)[1:]}

    def write(folder: Path) -> None:
        _save_weights(model, kind, folder, gathered)

    proof = Canaries(canary, list(texts))
    return publish_as(directory, kind, write, score, version, parent, step, proof, base_model, clock, adapters)


def publish_as(
    directory: Path,
    kind: str,
    write: Callable[[Path], None],
    score: Callable[[list[int]], list[float]],
    version: int,
    parent: int | None,
    step: int,
    canaries: Canaries,
    base_model: str,
    clock: Callable[[], float] = time.time,
    adapters: Callable[[Path], dict[str, AdapterProof]] = lambda _: {},
) -> PolicyVersion:
    """`publish`, of weights that `write` puts into a folder, as a `kind` of `weights.FILES`."""
    assert len(canaries.ids) >= 2, "a canary needs a token to predict"
    logprobs = score(canaries.ids)
    more = tuple(CanaryPrompt(text, ids, score(ids)) for text, ids in canaries.texts)
    made: list[PolicyVersion] = []

    def fill(folder: Path) -> None:
        write(folder)
        digest = file_sha256(folder / FILES[kind])
        manifest = PolicyVersion(
            version, parent, step, kind, digest, canaries.ids, logprobs, base_model, clock(), adapters(folder), more
        )
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        made.append(manifest)

    remove_leftovers(directory, PREFIX)
    write_folder(version_folder(directory, version), fill)
    if version == 0:
        write_atomically(directory / FIRST, msgspec.json.encode(made[0]).decode())
    return made[0]


def _prove(
    model: torch.nn.Module, adapter: str, folder: Path, canary: list[int], score: Callable[[list[int]], list[float]]
) -> AdapterProof:
    with active(model, adapter):
        logprobs = score(canary)
    return AdapterProof(file_sha256(folder / adapter / FILES["lora"]), logprobs)


def version_folder(directory: Path, version: int) -> Path:
    return directory / f"{PREFIX}{version}"


def load_manifest(folder: Path) -> PolicyVersion:
    """The manifest of a complete version; CheckpointError where it is missing, unreadable or half-written."""
    if not is_complete(folder):
        state = "is half-written" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"policy {folder} {state}", "Use a folder with a COMPLETE marker; the learner makes them")
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PolicyVersion)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} can't be read: {error}", "Delete the folder") from error


@torch.no_grad()
def load_weights(folder: Path, model: torch.nn.Module) -> PolicyVersion:
    """Puts a version's weights into `model`, which is of its kind; returns its manifest. Raises CheckpointError."""
    manifest = load_manifest(folder)
    check_here(folder, manifest)
    prove(folder, manifest)
    if manifest.kind == "lora":
        from peft import set_peft_model_state_dict

        for name in adapter_names(model):
            part = folder if name == adapter_names(model)[0] else folder / name
            set_peft_model_state_dict(model, load_file(str(part / FILES["lora"])), adapter_name=name)
        return manifest
    stored = load_file(str(folder / FILES["full"]))
    if unique_tensors(model).keys() != stored.keys():
        raise CheckpointError(f"{folder} is of another model", "Use the run's own model")
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in stored:
            tensor.copy_(stored[name])
    return manifest


def newest(directory: Path) -> tuple[PolicyVersion, Path] | None:
    """The newest complete version, or None."""
    found = numbered(directory, PREFIX)
    return (load_manifest(found[-1][1]), found[-1][1]) if found else None


def hold(directory: Path, best: int | None, evaluated: int | None) -> None:
    """Says which versions must stay: the best so far, and the one that is being evaluated."""
    found = {"best": best, "evaluated": evaluated}
    write_atomically(directory / HELD, json.dumps({name: n for name, n in found.items() if n is not None}) + "\n")


def held(directory: Path) -> dict[str, int]:
    """What `hold` said last: versions under `best` and `evaluated`."""
    try:
        return msgspec.json.decode((directory / HELD).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}


def best(directory: Path) -> int | None:
    """The version that evaluations found best so far, or None."""
    return held(directory).get("best")


def collect_garbage(directory: Path, keep: int, protected: Iterable[int] = ()) -> list[int]:
    """Deletes all but the newest `keep` (≥ 1) versions and those in `protected`; returns what it deleted."""
    held = set(protected)
    old = numbered(directory, PREFIX)[: -max(1, keep)]
    doomed = [(number, path) for number, path in old if number not in held]
    for _, path in doomed:
        remove_folder(path)
    return [number for number, _ in doomed]


def unique_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without tied duplicates (safetensors stores no aliases), contiguous and on the CPU."""
    seen: set[int] = set()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        out[name] = tensor.detach().cpu().contiguous()
    return out


def _save_weights(
    model: torch.nn.Module, kind: str, folder: Path, gathered: dict[str, torch.Tensor] | None = None
) -> None:
    if kind == "lora":
        model.save_pretrained(str(folder), safe_serialization=True, state_dict=gathered)  # type: ignore[operator]
        for card in folder.rglob("README.md"):
            card.unlink()  # peft's empty model card
        return
    save_file(gathered or unique_tensors(model), str(folder / FILES["full"]), metadata={"format": "pt"})
    model.config.save_pretrained(str(folder))  # type: ignore[operator, union-attr]
