"""What TensorBoard is told of each version: whole, once, in order, and the same as at the end."""

from __future__ import annotations

import pytest

from kbrl_async.runs import run_journal
from kbrl_async.runs.telemetry.by_version import Part, Tally, settled
from kbrl_async.runs.telemetry.version_curve import FIRST, VersionCurve, scalars, with_overview
from tests.slow_bench import CORRECT, SlowBench


@pytest.fixture(scope="module")
def slow() -> SlowBench:
    return SlowBench(updates=14)


def lived(slow: SlowBench) -> tuple[VersionCurve, list[Part]]:
    """As a run tells of its versions, update by update."""
    curve, told, version = VersionCurve(Tally()), [], 0
    for entry in slow.entries:
        run_journal.count(curve.tally, entry)
        if type(entry).__name__ == "BatchTrained":
            version += 1
            told += curve.ended(version)
    return curve, told + curve.ended(None)


def test_every_version_is_told_once_in_order_and_as_at_the_end(slow: SlowBench) -> None:
    whole = Tally()
    for entry in slow.entries:
        run_journal.count(whole, entry)
    found = settled(whole.answers())
    _, told = lived(slow)
    assert [part.first for part in told] == list(found.versions)
    assert [len(part.answers) for part in told] == [len(answers) for answers in found.versions.values()]


def test_a_policy_that_never_changes_does_not_rise(slow: SlowBench) -> None:
    """By batch it would: the first ones have the quickest groups, which are the failures."""
    _, told = lived(slow)
    shares = [scalars(part)["version/correct_rate"] for part in told]
    early, late = shares[: len(shares) // 2], shares[len(shares) // 2 :]
    assert abs(sum(late) / len(late) - sum(early) / len(early)) < 0.1
    assert all(abs(share - CORRECT) < 0.25 for share in shares)


def test_what_was_told_is_forgotten(slow: SlowBench) -> None:
    curve, _ = lived(slow)
    assert not curve.tally.answers().listed


def test_a_version_that_is_still_written_is_not_told(slow: SlowBench) -> None:
    curve, version = VersionCurve(Tally()), 0
    for entry in slow.entries[: len(slow.entries) // 2]:
        run_journal.count(curve.tally, entry)
        version += type(entry).__name__ == "BatchTrained"
    told = curve.ended(version)
    open_ = min(curve.tally.answers().unfinished.values())
    assert told
    assert told[-1].last < open_ <= version


def test_what_is_shown_first_is_there_under_both_names() -> None:
    values = with_overview({"version/correct_rate": 0.5, "loss": 1.0})
    assert values == {"version/correct_rate": 0.5, "loss": 1.0, "_overview/2_correct": 0.5}
    assert sorted(FIRST) == list(FIRST)
