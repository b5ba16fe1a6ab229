"""From what a person names to one policy: a run, a published policy, a checkpoint, an adapter, a model, an endpoint.

::

    runs/default, default ─▶ its newest (or best, or numbered) policy ─▶ policy-v14/    step-000014/ ─▶ checkpoint
    folder with adapter_config.json ─▶ adapter      config.json, owner/name, small ─▶ model     http://… ─▶ endpoint

Only names and small files are looked at here; `publishing` loads weights, and torch for them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from kbrl_async.durable import numbered
from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.runs.config import CONFIG_FILE

Kind = Literal["policy", "checkpoint", "adapter", "model", "endpoint"]
SMALL = "small"
"""The project's own policy before any training."""
NEWEST, BEST = "newest", "best"
FINAL = ("checkpoints", "final")
"""How others call the newest checkpoint of a run."""


class Target(msgspec.Struct, frozen=True):
    """One policy."""

    kind: Kind
    name: str
    """Folder, name that transformers can load, or address."""
    label: str
    """Short, for folders and headings."""
    run: str | None = None
    """The training run it belongs to, whose configuration an evaluation inherits."""
    version: int = 0
    identity: str = ""
    """Differs where the weights differ, as far as that is known without reading them."""


def resolve(what: str, log_path: Path, wanted: str = NEWEST) -> Target:
    """`wanted` chooses among the policies of a run: newest, best, or a version.

    :raises UserError: it names nothing.
    :raises CheckpointError: the run has no such policy.
    """
    if re.match(r"https?://", what):
        return Target("endpoint", what, _label(re.sub(r"^https?://|/v1/?$", "", what)), identity=what)
    if what == SMALL:
        return Target("model", SMALL, SMALL, identity=SMALL)
    final = Path(what).expanduser()
    if final.parts[-2:] == FINAL and not final.exists() and (found := _final_checkpoint(final.parent)) is not None:
        return _checkpoint(found)
    for path in (Path(what).expanduser(), log_path / what):
        if path.is_dir():
            return of_folder(path.resolve(), wanted)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", what):
        return Target("model", what, _label(what), identity=what)
    cure = "Give a run, a folder of a policy, checkpoint, adapter or model, an owner/name, or an endpoint's http://…"
    raise UserError(f"there is no policy {what}, neither a folder nor a run in {log_path}/", cure)


def _final_checkpoint(folder: Path) -> Path | None:
    from kbrl_async.learning import checkpoints

    return checkpoints.latest(folder) if folder.is_dir() else None


def of_folder(folder: Path, wanted: str) -> Target:
    from kbrl_async.learning import checkpoints
    from kbrl_async.learning.policies import versions

    if (folder / versions.MANIFEST).is_file():
        return _published(folder)
    if (folder / checkpoints.STATE).is_file():
        return _checkpoint(folder)
    if (folder / CONFIG_FILE).is_file():
        return of_run(folder, wanted)
    if (folder / "adapter_config.json").is_file():
        return Target("adapter", str(folder), _label(folder.name), identity=str(folder))
    if (folder / "config.json").is_file():
        return Target("model", str(folder), _label(folder.name), identity=str(folder))
    cure = "It needs config.yaml (a run), manifest.json, state.json, adapter_config.json or config.json"
    raise UserError(f"{folder} is no run, policy, checkpoint, adapter or model", cure)


def of_run(run: Path, wanted: str) -> Target:
    from kbrl_async.learning import checkpoints
    from kbrl_async.learning.policies import versions

    published = dict(numbered(run / "policies", versions.POLICY_PREFIX))
    if wanted == NEWEST and not published:
        newest = checkpoints.latest(run / "checkpoints")
        if newest is None:
            raise CheckpointError(f"{run} has neither policies nor checkpoints", "Train it for an update at least")
        return _checkpoint(newest)
    if wanted == NEWEST:
        return _published(published[max(published)])
    version = versions.best(run / "policies") if wanted == BEST else _number(wanted)
    if version is None:
        raise CheckpointError(f"nobody has said which policy of {run} is best", "Train with eval_every=…, or take one")
    if version not in published:
        kept = ", ".join(map(str, sorted(published))) or "none"
        raise CheckpointError(f"{run} has no policy of version {version} any more", f"It keeps: {kept}")
    return _published(published[version])


def _number(wanted: str) -> int:
    digits = wanted.removeprefix("v")
    if not digits.isdigit():
        raise UserError(f"--version {wanted} is no version", "Give newest, best, or a number")
    return int(digits)


def _published(folder: Path) -> Target:
    from kbrl_async.learning.policies import versions

    manifest = versions.load_manifest(folder)
    run = _run_around(folder)
    name = run.name if run else folder.parent.name
    label = _label(f"{name}-v{manifest.version}")
    return Target(
        "policy", str(folder), label, str(run) if run else None, manifest.version, manifest.weights_sha256[:12]
    )


def _checkpoint(folder: Path) -> Target:
    from kbrl_async.learning import checkpoints

    version, digest = checkpoints.describe(folder)
    run = _run_around(folder)
    label = _label(f"{run.name if run else folder.parent.name}-step{version}")
    return Target("checkpoint", str(folder), label, str(run) if run else None, version, digest[:12])


def _run_around(folder: Path) -> Path | None:
    run = folder.parent.parent
    return run if (run / CONFIG_FILE).is_file() else None


def _label(text: str) -> str:
    """Fit for the name of a run folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "policy"
