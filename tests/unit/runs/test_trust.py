"""What the verdicts of a run rest on, in its summary."""

from __future__ import annotations

from kbrl_async.runs import summary
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry.by_version import Answers, ScoredAnswer
from protocols.records import OBSERVED, REPLAYED
from tests.records import stats

COUNTERS = RunCounters(
    groups_admitted=1, groups_trained=1, groups_filtered=0, groups_dropped_stale=0, groups_failed=0, rollouts=4,
    updates=1, max_staleness=0,
)  # fmt: skip


def test_correct_answers_are_counted_by_what_their_verdicts_rest_on() -> None:
    answers = [
        stats(correct=True, trust=REPLAYED, speedup=2.0, speedup_lo=1.5, speedup_hi=2.5),
        stats(correct=True, trust=REPLAYED),
        stats(correct=True, trust=OBSERVED, speedup=2.0, speedup_lo=1.5, speedup_hi=2.5),
        stats(trust=OBSERVED),
        stats(correct=True),
    ]
    made = summary.build(
        counters=COUNTERS,
        answers=Answers([ScoredAnswer(f"g{place}", one) for place, one in enumerate(answers)]),
        wall_s=60.0,
        busy={},
    )
    assert made["trust"] == {
        OBSERVED: {"correct": 1, "fast_1_proven": 1},
        REPLAYED: {"correct": 2, "fast_1_proven": 1},
    }
