"""The files of a published policy version's weights, and the proof that they are those of its manifest (I8)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kbrl_async.durable import file_sha256
from kbrl_async.errors import CheckpointError
from protocols.records import PolicyVersion

POLICY_PREFIX = "policy-v"
"""Before the number of a version, in the name of its folder."""
MANIFEST = "manifest.json"
MADE = "sft.json"
"""In the folder of a policy that was made here, written last: its report and the settings it was made by."""
LISTED = "files.json"
"""All files of a version with their hashes, for samplers that share no disk with the learner."""
MEETING = "meeting.json"
"""In the folder of policies: where the learner of this run sends weights from, while it does."""
FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors", "tinker": "tinker.json"}
"""By kind of policy; an adapter of a role lies in a folder of its name, and weights at Tinker under the path that the
file names."""


LOCAL = frozenset({"full", "lora"})
"""Kinds whose weights are in the folder."""


class Canaries(NamedTuple):
    """What a policy version is published with, whoever publishes it, so that samplers can prove it (I8)."""

    ids: list[int]
    """A fixed prompt of at least two tokens."""
    texts: list[tuple[str, list[int]]]
    """Further ones, with their first ids."""


def check_here(folder: Path, manifest: PolicyVersion) -> None:
    """CheckpointError where the version's folder names weights that a service holds."""
    if manifest.kind not in LOCAL:
        cure = f"Sample from them with sampler.engine=tinker, or: tinker checkpoint download (see {FILES['tinker']})"
        raise CheckpointError(f"the weights of {folder} are held at Tinker", cure)


def proven(folder: Path, manifest: PolicyVersion, role: str = "") -> Path:
    """The file of the weights, of one role where there are several adapters. CheckpointError unless it has the
    manifest's SHA-256.
    """
    path = folder / role / FILES[manifest.kind]
    digest = manifest.adapters[role].weights_sha256 if role else manifest.weights_sha256
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "Delete the version's folder and publish it again")
    if file_sha256(path) != digest:
        cause = f"{path} differs from its manifest's SHA-256"
        raise CheckpointError(cause, "Delete the version's folder and publish it again")
    return path


def prove(folder: Path, manifest: PolicyVersion) -> None:
    """The same of all its files."""
    for role in ("", *manifest.adapters):
        proven(folder, manifest, role)
