"""Where rollouts grow old: how many versions had passed at the end of each stage. Pure.

Versions are dated by the learner's clock and stages by their workers'; between hosts that is as good as their clocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocols.rollout import Record

REMEMBERED = 1024
"""Versions whose time of making is kept."""


def ages_by_stage(record: Record, published: Iterable[tuple[float, int]]) -> dict[str, int]:
    """By stage: the newest version at its end, minus the one that wrote the answer. `published`: (time, version)."""
    known = list(published)
    if record.generation is None or not known:
        return {}
    written = record.generation.policy_version
    return {
        span.stage: max([written, *(version for at, version in known if at <= span.finished)]) - written
        for span in record.spans
    }
