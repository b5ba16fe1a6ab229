"""What an evaluation says about its policy, which stands where samplers look for it afterwards.

Torch is imported only where there are weights: an endpoint needs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbrl_async.durable import write_atomically
from kbrl_async.errors import CheckpointError
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config
from kbrl_async.runs.targets import Target

POLICY_FILE = "policy.json"
"""In the run folder of an evaluation: what is evaluated. The command writes it, the evaluator reads it."""
Told = Callable[[str, float], None]


def publish(target: Target, directory: Path, config: Config, told: Told = lambda _what, _share: None) -> dict[str, Any]:
    """Publishes `target` unless it stands there already; returns what the evaluation says about its policy.

    :raises KbrlError: it can't be loaded.
    """
    facts = {"kind": target.kind, "label": target.label, "name": target.name, "version": target.version}
    if target.kind == "endpoint":
        return {**facts, "model": config.model_name}
    from kbrl_async.runs.target_weights import published

    manifest = published(target, directory, config, told)
    reached = origins.cut(manifest.base_model)
    made = {"base_model": manifest.base_model, "weights_sha256": manifest.weights_sha256}
    return {**facts, **made, **({"small_policy_cut": reached} if reached else {})}


def write_policy(run_dir: Path, policy: dict[str, Any]) -> None:
    """Puts down what is evaluated, for the evaluator and the document."""
    write_atomically(run_dir / POLICY_FILE, json.dumps(policy, indent=1) + "\n")


def read_policy(run_dir: Path) -> dict[str, Any]:
    """:raises CheckpointError: the command that prepares an evaluation has not written it."""
    try:
        policy: dict[str, Any] = json.loads((run_dir / POLICY_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run_dir / POLICY_FILE} can't be read: {error}", "Begin with 'kbrl eval'") from None
    return policy
