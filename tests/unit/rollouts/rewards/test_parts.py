"""Rewards: what a record is worth under each preset."""

from __future__ import annotations

import math

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.rollouts.rewards import presets
from kbrl_async.rollouts.rewards.parts import earns, log_speed, part_of
from kbrl_async.rollouts.rewards.presets import Preset, find_presets, reward_of
from kbrl_async.rollouts.settings import REWARD_PRESETS, Reward
from kbrl_async.runs.config import load
from protocols.records import (
    OBSERVED,
    REPLAYED,
    BenchReport,
    BuildReport,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    Timing,
    Verdict,
)
from protocols.rollout import Frame, Record

REQUEST = RolloutRequest("r", "g", Problem("p", 1, "n", "s"), "prompt", "c", SamplingParams(100))


def generation(fault: Fault = Fault.OK, tokens: int = 10, text: str = "", finish: str = "stop") -> Generation:
    return Generation(0, [1], [1] * tokens, [-1.0] * tokens, text, finish, fault=fault)


def timing(lo: float) -> Timing:
    return Timing(n=50, speedup=lo * 1.1, lo=lo, hi=lo * 1.2, candidate_ms=1.0, reference_ms=lo)


def record(
    written: Fault = Fault.OK,
    built: Fault | None = Fault.OK,
    verdict: Fault | None = Fault.OK,
    passed: int = 5,
    lo: float | None = None,
) -> Record:
    frames: list[Frame] = [REQUEST, generation(written)]
    if built is not None:
        frames.append(BuildReport(built))
    if verdict is not None:
        frames.append(BenchReport(Verdict(verdict, passed, 5), None if lo is None else timing(lo)))
    return Record.of(*frames)


NO_CODE = record(written=Fault.FORMAT_ERROR, built=None, verdict=None)
NO_COMPILE = record(built=Fault.COMPILE_ERROR, verdict=None)
STATIC = record(built=Fault.STATIC_VIOLATION, verdict=None)
WRONG = record(verdict=Fault.INCORRECT, passed=2)
SLOW = record(lo=0.8)
FAST = record(lo=2.0)
SLOW_PART = math.log(0.8 * 8) / math.log(64)
FAST_PART = 2 / 3


def reward(found: Record, preset: str) -> float:
    assert earns(found)
    return reward_of(found, find_presets(Reward(preset=preset))[0])


@pytest.mark.parametrize(
    ("preset", "no_code", "no_compile", "wrong", "slow", "fast"),
    [
        ("stage1", 0.0, 0.3, 0.3 + 0.5 + 0.2 * 0.4, 1.0, 1.0),
        ("stage2", 0.0, 0.1, 0.1 + 0.2 + 0.7 * 0.4, 1.0, 1.0),
        ("stage3", 0.0, 0.05, 0.15 + 0.5 * 0.4, 0.65 + 0.35 * SLOW_PART, 0.65 + 0.35 * FAST_PART),
        ("kevin", 0.0, 0.0, 0.0, 1.1, 2.3),
        ("kevin_offset", 0.0, 0.0, 0.0, 0.3, 1.3),
        ("hierarchical", 0.0, 0.0, 0.0, 0.7 + 0.3 * SLOW_PART, 0.7 + 0.3 * FAST_PART),
        ("funnel", 0.0, 0.3, 0.5, 0.7 + 0.3 * SLOW_PART, 0.7 + 0.3 * FAST_PART),
        ("fork", -2.0, -1.0, 0.3 * 0.4, 0.3 + SLOW_PART, 0.3 + FAST_PART),
    ],
)
def test_each_preset_pays_what_its_table_says(
    preset: str, no_code: float, no_compile: float, wrong: float, slow: float, fast: float
) -> None:
    found = [reward(r, preset) for r in (NO_CODE, NO_COMPILE, WRONG, SLOW, FAST)]
    assert found == pytest.approx([no_code, no_compile, wrong, slow, fast])


@pytest.mark.parametrize("preset", ["stage1", "stage2", "stage3"])
def test_staged_weights_pay_before_the_kernel_is_correct(preset: str) -> None:
    crashing = record(verdict=Fault.RUNTIME_ERROR, passed=0)
    assert 0 < reward(NO_COMPILE, preset) < reward(crashing, preset) < reward(WRONG, preset) < reward(SLOW, preset)


@pytest.mark.parametrize("preset", sorted(REWARD_PRESETS.ours))
@pytest.mark.parametrize("stage", ["static", "bench"])
def test_cheating_never_beats_an_honest_failure(preset: str, stage: str) -> None:
    cheat = record(built=Fault.CHEATING, verdict=None) if stage == "static" else record(verdict=Fault.CHEATING, lo=9.0)
    honest = [NO_CODE, NO_COMPILE, STATIC, WRONG, SLOW, FAST]
    assert all(reward(cheat, preset) <= reward(r, preset) for r in honest)


@pytest.mark.parametrize("fault", [Fault.WORKER_LOST, Fault.INFRA_ERROR, Fault.STALE])
def test_infrastructure_faults_at_any_stage_give_no_reward(fault: Fault) -> None:
    assert not earns(record(written=fault, built=None, verdict=None))
    assert not earns(record(built=fault, verdict=None))
    assert not earns(record(verdict=fault))


def test_a_record_that_stops_without_a_reason_gives_no_reward() -> None:
    assert not earns(Record.of(REQUEST))
    assert not earns(record(built=None, verdict=None))
    assert not earns(record(verdict=None))


def test_correctness_is_whole_only_for_an_ok_verdict() -> None:
    found = record(verdict=Fault.TIMEOUT, passed=5)
    assert (part_of(found, "correctness"), part_of(found, "correct")) == (0.8, 0.0)


def test_a_speedup_whose_interval_includes_one_is_no_gain() -> None:
    found = record(lo=0.99)
    assert part_of(found, "speedup_gain") == 0.0
    assert part_of(found, "speed") < 0.51


def test_the_way_up_to_the_references_speed_is_paid_too() -> None:
    assert 0 < part_of(record(lo=0.2), "speed") < part_of(record(lo=0.8), "speed")


def test_a_wrong_kernel_has_no_speed_however_fast() -> None:
    found = record(verdict=Fault.INCORRECT, passed=4, lo=7.0)
    assert (part_of(found, "speed"), part_of(found, "speedup")) == (0.0, 0.0)


def test_doubling_the_speed_is_always_worth_the_same_up_to_the_cap() -> None:
    assert [log_speed(x) for x in (0, 0.125, 0.5, 1, 4, 8, 100)] == pytest.approx([0, 0, 1 / 3, 1 / 2, 5 / 6, 1, 1])


@pytest.mark.parametrize(("tokens", "expected"), [(10, 1.0), (80, 1.0), (90, 0.5), (100, 0.0)])
def test_length_falls_over_the_last_fifth(tokens: int, expected: float) -> None:
    found = Record.of(REQUEST, generation(tokens=tokens), BuildReport(Fault.COMPILE_ERROR))
    assert part_of(found, "length") == pytest.approx(expected)


def test_thinking_needs_a_closed_thought_with_content() -> None:
    def thinking(text: str) -> float:
        return part_of(Record.of(REQUEST, generation(text=text), BuildReport(Fault.COMPILE_ERROR)), "thinking")

    assert [thinking(t) for t in ("<think>tile it</think>", "<think> </think>", "<think>cut")] == [1.0, 0.0, 0.0]


def test_weights_can_be_overridden_one_by_one() -> None:
    (preset,) = find_presets(Reward(preset="stage1", compile_weight=0.0))
    assert reward_of(NO_COMPILE, preset) == pytest.approx(0.3)
    assert reward_of(WRONG, preset) == pytest.approx(0.3 + 0.2 * 0.4)
    assert presets.STAGE1.weights["compile"] == 0.5


def test_a_wrong_part_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'compile'"):
        find_presets(Reward(preset=f"{__name__}:MISSPELT"))


def test_presets_are_plain_data() -> None:
    assert msgspec.json.decode(msgspec.json.encode(presets.FORK), type=Preset) == presets.FORK


# ── a user's own ──────────────────────────────────────────────────────────────────────────────────────────────────


def brevity(found: Record) -> float:
    assert found.generation is not None
    return 1.0 / len(found.generation.token_ids)


MISSPELT = Preset({"compiles": 1.0})
BRIEF = Preset({"correct": 1.0, f"{__name__}:brevity": 2.0})
NO_PRESET = "stage1"


def test_a_users_own_preset_and_part_are_named_by_their_place_in_the_setting() -> None:
    config = load(overrides=[f"reward.preset={__name__}:BRIEF"])
    (preset,) = find_presets(config.reward)
    assert reward_of(FAST, preset) == pytest.approx(1.0 + 2.0 / 10)
    assert reward_of(record(verdict=Fault.CHEATING), preset) == 0.0


def test_what_is_no_preset_is_refused_with_the_configuration() -> None:
    with pytest.raises(ConfigError, match="is no Preset"):
        load(overrides=[f"reward.preset={__name__}:NO_PRESET"])


def test_a_name_that_is_nearly_right_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean stage3"):
        load(overrides=["reward.preset=stge3"])


def with_trust(trust: str, lo: float) -> Record:
    right = record(lo=lo)
    assert right.bench is not None
    verdict = msgspec.structs.replace(right.verdict, trust=trust)
    return msgspec.structs.replace(right, bench=msgspec.structs.replace(right.bench, verdict=verdict))


@pytest.mark.parametrize("name", [name for name in REWARD_PRESETS.ours if name != "auto"])
def test_a_speed_that_was_only_observed_pays_no_more_than_the_cap(name: str) -> None:
    (capped,) = find_presets(Reward(preset=name, observed_speedup=1.0))
    assert reward_of(with_trust(OBSERVED, 6.0), capped) == reward_of(with_trust(OBSERVED, 1.0), capped)
    assert reward_of(with_trust(REPLAYED, 6.0), capped) == reward_of(record(lo=6.0), capped)
    assert reward_of(with_trust(OBSERVED, 0.5), capped) == reward_of(with_trust(REPLAYED, 0.5), capped)


def test_the_cap_holds_for_the_tokens_around_the_kernel_too() -> None:
    (capped,) = find_presets(Reward(preset="plan_code", observed_speedup=1.0))
    assert presets.plan_reward_of(with_trust(OBSERVED, 6.0), capped) == 1.0
    assert presets.plan_reward_of(with_trust(REPLAYED, 6.0), capped) == 6.0


@pytest.mark.parametrize("name", [name for name in REWARD_PRESETS.ours if name != "auto"])
def test_a_kernel_that_nothing_proves_gets_its_share_of_what_a_right_one_without_a_time_gets(name: str) -> None:
    unproven = record(verdict=Fault.UNPROVEN)
    (none,), (half,), (whole,) = (find_presets(Reward(preset=name, unproven=share)) for share in (0.0, 0.5, 1.0))
    right = reward_of(record(), whole)
    assert reward_of(unproven, none) == none.floor == reward_of(record(verdict=Fault.CHEATING), none)
    assert reward_of(unproven, half) == pytest.approx((none.floor + right) / 2)
    assert reward_of(unproven, whole) == pytest.approx(right)
    assert part_of(unproven, "correct") == part_of(unproven, "correctness") == 0.0


def test_nothing_wrong_is_imitated_and_what_is_right_goes_by_its_speed() -> None:
    """Nine of ten sets passed paid .93 under stage2, and everything above .5 was imitated."""
    preset = presets.BEST_OF_N
    assert reward_of(record(verdict=Fault.INCORRECT, passed=4), preset) == 0.0
    assert reward_of(record(), preset) == 1.0
    assert reward_of(record(lo=2.0), preset) == pytest.approx(1.6)


def test_the_raw_speedup_is_paid_as_the_fusion_notes_have_it() -> None:
    assert reward_of(record(lo=2.0), presets.HIERARCHICAL_RAW) == pytest.approx(0.7 + 0.3 * 2.0)
    assert reward_of(NO_COMPILE, presets.HIERARCHICAL_RAW) == 0.0


@pytest.mark.parametrize(("tokens", "off"), [(80, 0.0), (90, 0.5), (100, 1.0)])
def test_answers_near_the_limit_lose_up_to_one(tokens: int, off: float) -> None:
    """DAPO: nothing before 4/5 of max_tokens (100 here), linear to 1 from there."""
    long = Record.of(
        REQUEST, generation(tokens=tokens), BuildReport(Fault.OK), BenchReport(Verdict(Fault.OK, 5, 5), None)
    )
    (plain,), (punished,) = find_presets(Reward()), find_presets(Reward(), overlong=True)
    assert reward_of(long, plain) - reward_of(long, punished) == pytest.approx(off)


def test_an_answer_that_was_cut_loses_one_however_short_it_is() -> None:
    cut = Record.of(REQUEST, generation(Fault.FORMAT_ERROR, tokens=5, finish="length"))
    assert reward_of(cut, *find_presets(Reward(), overlong=True)) == -1.0


def test_the_spread_of_a_reward_is_what_its_interval_leaves_open() -> None:
    stage3 = presets.STAGE3
    expected = 0.35 * (log_speed(2.0 * 1.2) - log_speed(2.0))
    assert presets.spread_of(record(lo=2.0), stage3) == pytest.approx(expected)
    assert presets.spread_of(record(), stage3) == presets.spread_of(WRONG, stage3) == 0.0
    assert presets.spread_of(record(lo=2.0), presets.STAGE1) == 0.0


def with_share(made: Record, share: float | None) -> Record:
    assert made.bench is not None
    verdict = msgspec.structs.replace(made.verdict, own_share=share)
    return msgspec.structs.replace(made, bench=msgspec.structs.replace(made.bench, verdict=verdict))


@pytest.mark.parametrize(("lo", "part"), [(0.5, 0.0), (1.0, 0.0), (math.sqrt(8), 0.5), (8.0, 1.0), (30.0, 1.0)])
def test_speed_above_1_pays_nothing_for_what_is_no_faster(lo: float, part: float) -> None:
    assert part_of(record(lo=lo), "speed_above_1") == pytest.approx(part)


def test_coverage_is_the_own_share_of_a_right_kernel_where_it_is_known() -> None:
    assert part_of(with_share(record(), 0.4), "coverage") == 0.4
    assert part_of(with_share(record(), None), "coverage") == 0.0
    assert part_of(with_share(WRONG, 1.0), "coverage") == 0.0
    (preset,) = find_presets(Reward(preset="correct", coverage_weight=0.5, above_1_weight=2.0))
    assert reward_of(with_share(record(lo=8.0), 0.4), preset) == pytest.approx(1 + 0.2 + 2.0)


@pytest.mark.parametrize(("share", "lo", "paid"), [(0.5, 1.0, 0.5), (0.8, 0.4, 0.32), (0.5, 3.0, 0.5)])
def test_own_code_that_wastes_time_earns_no_coverage(share: float, lo: float, paid: float) -> None:
    """Own kernels that take four times as long would else raise a share of .5 to .8, and the reward with it."""
    assert part_of(with_share(record(lo=lo), share), "coverage") == pytest.approx(paid)


def test_own_shares_that_measuring_cannot_tell_apart_are_equal() -> None:
    (preset,) = find_presets(Reward(preset="correct", coverage_weight=0.5))
    known = with_share(record(lo=2.0), 0.4)
    assert presets.spread_of(known, preset) == pytest.approx(0.5 * presets.SHARE_NOISE)
    assert presets.spread_of(with_share(record(lo=2.0), 1.0), preset) == 0.0
    (least,) = find_presets(Reward(preset="correct", least_coverage=0.3))
    assert presets.spread_of(with_share(record(lo=2.0), 0.28), least) == 1.0, "it may be above the threshold"


def test_who_lets_others_work_is_paid_as_a_wrong_kernel_and_the_unknown_is_not() -> None:
    (preset,) = find_presets(Reward(preset="stage3", least_coverage=0.3))
    wrong = reward_of(record(verdict=Fault.INCORRECT, passed=0), preset)
    assert reward_of(with_share(record(lo=8.0), 0.29), preset) == wrong
    for share in (0.3, None):
        assert reward_of(with_share(record(lo=8.0), share), preset) == reward_of(record(lo=8.0), preset) > wrong


@pytest.mark.parametrize(("passed", "near", "part"), [(1, 2, 0.6), (1, 4, 0.8), (0, 0, 0.0)])
def test_near_sets_are_partial_credit_and_never_all_of_it(passed: int, near: int, part: float) -> None:
    made = record(verdict=Fault.INCORRECT, passed=passed)
    assert made.bench is not None
    verdict = msgspec.structs.replace(made.verdict, near=near)
    made = msgspec.structs.replace(made, bench=msgspec.structs.replace(made.bench, verdict=verdict))
    assert part_of(made, "correctness") == pytest.approx(part)
