"""What each policy version wrote, for TensorBoard, as soon as all of its answers are in: a curve that grows. Pure.

::

    commands ─ Tally ─▶ VersionCurve ─ newest version ─▶ versions that nobody writes for any more ─▶ tags at their steps

Invariants
* A version is told once, whole, and in the order of versions: never by its quick answers, which are the failures.
* What was told is forgotten, so memory is as large as what is open (I10).
"""

from __future__ import annotations

from collections.abc import Mapping

from kbrl_async.runs.telemetry.by_version import Part, Tally, points, settled

VERSION = "version/"
"""Begins the tags of figures by policy version; their step is the version."""
OVERVIEW = "_overview/"
"""Begins the tags that TensorBoard shows first: it sorts groups by name."""
FIRST = {
    f"{OVERVIEW}1_heldout_correct": "eval/correct_rate",
    f"{OVERVIEW}2_correct": f"{VERSION}correct_rate",
    f"{OVERVIEW}3_reward": f"{VERSION}reward_mean",
    f"{OVERVIEW}4_speedup": f"{VERSION}speedup_mean",
    f"{OVERVIEW}5_rollouts_per_s": "throughput/rollouts_per_s",
}
"""Each of them is another tag, shown where it is seen without looking for it."""


class VersionCurve:
    """Told of all answers by its tally, which others may fill."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._next = 0

    def ended(self, newest: int | None) -> list[Part]:
        """Versions that were not told yet and have all of their answers, one a part.

        :param newest: what is asked from now on is written by this version, or by one that is as much older as answers
            of this run were; None: nothing is asked any more.
        """
        answers = self.tally.answers()
        limit = None if newest is None else newest - self.tally.behind
        found = [
            part
            for part in points(settled(answers), most=max(1, len(answers.listed)))
            if part.first >= self._next and (limit is None or part.last < limit)
        ]
        if found:
            self._next = found[-1].last + 1
            self.tally.forget({stats.rollout_id for part in found for stats in part.stats})
        return found


def scalars(part: Part) -> dict[str, float]:
    """TensorBoard tag → value of one version, with the ends of the intervals."""
    values: dict[str, float] = {}
    for name, figure in part.figures().items():
        values[f"{VERSION}{name}"] = figure.value
        if figure.interval is not None:
            values |= {
                f"{VERSION}{name}_{end}": bound for end, bound in zip(("lo", "hi"), figure.interval, strict=True)
            }
    return values


def with_overview(values: Mapping[str, float]) -> dict[str, float]:
    """And those of them that are shown first, under the names that make them so."""
    return {**values, **{first: values[tag] for first, tag in FIRST.items() if tag in values}}
