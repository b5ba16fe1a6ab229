"""`policy.json` of an evaluation's run folder: what is evaluated. The command writes it, the evaluator reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbrl_async.durable import write_atomically
from kbrl_async.errors import CheckpointError

POLICY_FILE = "policy.json"


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
