"""Which policy versions are published, and which must stay: what actors without torch know of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kbrl_async.durable import is_complete, numbered, remove_folder, write_atomically
from kbrl_async.errors import CheckpointError
from kbrl_async.weights import MANIFEST, POLICY_PREFIX
from protocols.records import PolicyVersion

HELD = "held.json"


def version_folder(directory: Path, version: int) -> Path:
    return directory / f"{POLICY_PREFIX}{version}"


def load_manifest(folder: Path) -> PolicyVersion:
    """The manifest of a complete version; CheckpointError where it is missing, unreadable or half-written."""
    if not is_complete(folder):
        state = "is half-written" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"policy {folder} {state}", "Use a folder with a COMPLETE marker; the learner makes them")
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PolicyVersion)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} can't be read: {error}", "Delete the folder") from error


def newest(directory: Path) -> tuple[PolicyVersion, Path] | None:
    """The newest complete version, or None."""
    found = numbered(directory, POLICY_PREFIX)
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
    old = numbered(directory, POLICY_PREFIX)[: -max(1, keep)]
    doomed = [(number, path) for number, path in old if number not in held]
    for _, path in doomed:
        remove_folder(path)
    return [number for number, _ in doomed]
