"""What an evaluation says about its policy, which stands where samplers look for it afterwards.

Torch is imported only where there are weights: an endpoint needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbrl_async.evaluation.targets import Target
from kbrl_async.runs.config import Config

Told = Callable[[str, float], None]


def publish(target: Target, directory: Path, config: Config, told: Told = lambda _what, _share: None) -> dict[str, Any]:
    """Publishes `target` unless it stands there already; returns what the evaluation says about its policy.

    :raises KbrlError: it can't be loaded.
    """
    facts = {"kind": target.kind, "label": target.label, "name": target.name, "version": target.version}
    if target.kind == "endpoint":
        return {**facts, "model": config.model_name}
    from kbrl_async.evaluation.weights import published

    manifest = published(target, directory, config, told)
    return {**facts, "base_model": manifest.base_model, "weights_sha256": manifest.weights_sha256}
