"""Where rollouts grow old: how many versions had passed at the end of each stage. Pure.

Versions are dated by the learner's clock and stages by their workers'; between hosts that is as good as their clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocols.records import BenchReport, BuildReport, Frame, Generation

REMEMBERED = 1024
"""Versions whose time of making is kept."""
STAGES = {Generation: "generate", BuildReport: "compile", BenchReport: "bench"}


def ages_by_stage(record: Sequence[Frame], published: Iterable[tuple[float, int]]) -> dict[str, int]:
    """By stage: the newest version at its end, minus the one that wrote the answer. `published`: (time, version)."""
    known = list(published)
    written = next((frame.policy_version for frame in record if isinstance(frame, Generation)), None)
    if written is None or not known:
        return {}
    return {
        STAGES[type(frame)]: max([written, *(version for at, version in known if at <= frame.finished_at)]) - written
        for frame in record
        if isinstance(frame, Generation | BuildReport | BenchReport)
    }
