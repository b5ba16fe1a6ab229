"""From a record's frames to a reward: the only place where that happens."""

from __future__ import annotations

import msgspec
import pytest

from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import received, score, score_prediction
from kbrl_async.runs.telemetry.training_metrics import outcome_rates
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    Timing,
    Verdict,
)
from protocols.rollout import Frame, Record

REQUEST = RolloutRequest("r", "g", Problem("L2/a", 2, "a", ""), "prompt", "c", SamplingParams(64))
WRITTEN = Generation(
    3, [1, 2], [3, 4], [-0.5, -0.25], "text", "stop", Candidate("src", "c"), started_at=1, finished_at=2
)
BUILT = BuildReport(Fault.OK, started_at=3.0, finished_at=3.5)
TIMED = BenchReport(
    Verdict(Fault.OK, passed=5, total=5), Timing(9, 2.2, 2.0, 2.4, 1.0, 2.2), started_at=4.0, finished_at=6.0
)


def reward(*frames: Frame) -> float:
    scored = score(Record.of(*frames), STAGE3)
    assert scored is not None
    return scored.sample.reward


def test_a_sample_carries_tokens_logprobs_and_the_version_that_wrote_it() -> None:
    scored = score(Record.of(REQUEST, WRITTEN, BUILT, TIMED), STAGE3)
    assert scored is not None
    sample = scored.sample
    assert (sample.token_ids, sample.logprobs, sample.policy_version) == ([3, 4], [-0.5, -0.25], 3)


def test_each_stage_that_is_passed_pays_more() -> None:
    nothing = msgspec.structs.replace(WRITTEN, candidate=None, fault=Fault.FORMAT_ERROR)
    broken = msgspec.structs.replace(BUILT, fault=Fault.COMPILE_ERROR)
    wrong = BenchReport(Verdict(Fault.INCORRECT, passed=1, total=5))
    slow = msgspec.structs.replace(TIMED, timing=msgspec.structs.replace(TIMED.timing, lo=0.5, speedup=0.6))
    ladder = [
        reward(REQUEST, nothing),
        reward(REQUEST, WRITTEN, broken),
        reward(REQUEST, WRITTEN, BUILT, wrong),
        reward(REQUEST, WRITTEN, BUILT, slow),
        reward(REQUEST, WRITTEN, BUILT, TIMED),
    ]
    assert ladder == sorted(ladder)
    assert len(set(ladder)) == len(ladder)


def test_how_extensions_were_built_is_kept_for_who_counts() -> None:
    built = msgspec.structs.replace(BUILT, toolchain="g++ 12 fast; g++ 12 full: symbol a")
    for build, ways in ((BUILT, ()), (built, ("fast", "symbol a"))):
        scored = score(Record.of(REQUEST, WRITTEN, build, TIMED), STAGE3)
        assert scored is not None
        assert scored.stats.built == ways


def test_a_lost_worker_is_no_reward_at_all() -> None:
    assert score(Record.of(REQUEST), STAGE3) is None
    assert score(Record.of(REQUEST, WRITTEN, BUILT, BenchReport(Verdict(Fault.INFRA_ERROR))), STAGE3) is None


def test_cheating_scores_the_floor_and_is_counted() -> None:
    cheat = BenchReport(Verdict(Fault.CHEATING, passed=5, total=5, rule="input_mutation"))
    scored = score(Record.of(REQUEST, WRITTEN, BUILT, cheat), STAGE3)
    assert scored is not None
    assert (scored.sample.reward, scored.stats.cheated, scored.stats.correct) == (STAGE3.floor, True, False)


def test_the_seconds_of_each_stage_and_of_waiting_between_them_are_kept() -> None:
    scored = score(Record.of(REQUEST, WRITTEN, BUILT, TIMED), STAGE3)
    assert scored is not None
    assert scored.stats.seconds == pytest.approx({"generate": 1.0, "compile": 0.5, "bench": 2.0, "queue": 1.5})


def test_frames_that_are_no_record_lose_their_rollout_and_nothing_else() -> None:
    sound = Record.of(REQUEST, WRITTEN, BUILT, TIMED)
    assert received(sound.encode(), "ok") == sound
    for frames in ([*sound.encode()[:3], b"garbage"], [*sound.encode(), sound.encode()[3]], sound.encode()[::2]):
        lost = received(frames, "ok")
        assert (lost.request, lost.lost_because, score(lost, STAGE3)) == (REQUEST, "infra_error", None)


def test_a_prediction_is_paid_by_the_real_verdict_and_counts_as_no_kernel() -> None:
    asked = msgspec.structs.replace(REQUEST, role="verifier", turn=1)
    said = msgspec.structs.replace(WRITTEN, candidate=None, text="compile\n")
    scored = score_prediction(Record.of(asked, said), "compile")
    assert scored is not None
    assert (scored.sample.reward, scored.sample.turn, scored.stats.role) == (1.0, 1, "verifier")
    assert score_prediction(Record.of(asked, said), "fast").sample.reward == 0.0  # type: ignore[union-attr]
    assert "correct_rate" not in outcome_rates([scored.stats])


def test_a_lost_prediction_is_no_reward() -> None:
    asked = msgspec.structs.replace(REQUEST, role="verifier", turn=1)
    lost = msgspec.structs.replace(WRITTEN, fault=Fault.INFRA_ERROR)
    assert score_prediction(Record.of(asked, lost), "fast") is None
    assert score_prediction(Record.of(asked), "fast") is None
