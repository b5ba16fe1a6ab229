"""The plan holds what the laws say: waits are those of Erlang's formula, and each bound is named when it binds."""

from __future__ import annotations

import math

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.plan import AdmissionWindow, RunObservation, StageWork, carried, observation_of, plan, wait_s

TIMES = {"generate": 0.02, "compile": 0.05, "bench": 0.2, "score": 0.001, "train": 0.03}
ROLLOUTS = 1000


def observed(**times: float) -> RunObservation:
    """A thousand rollouts, of which 700 came to the bench, in batches of 50."""
    tasks = {"bench": 700, "train": 20}
    work = {
        stage: StageWork(busy_s=s * ROLLOUTS, tasks=tasks.get(stage, ROLLOUTS), held_s=s * ROLLOUTS, processes=1)
        for stage, s in {**TIMES, **times}.items()
    }
    return RunObservation(200.0, ROLLOUTS, 20, work, broker_busy_s=2.0)


def erlang_wait(service_s: float, servers: int, utilisation: float) -> float:
    """The exact mean wait of M/M/m: Erlang's C formula."""
    load = servers * utilisation
    full = load**servers / math.factorial(servers) / (1 - utilisation)
    waits = full / (sum(load**k / math.factorial(k) for k in range(servers)) + full)
    return waits * service_s / (servers * (1 - utilisation))


def test_every_stage_gets_the_fewest_servers_that_stay_below_the_target() -> None:
    found = plan(observed(), 36_000, target=0.8)  # ten a second
    assert {r.name: r.servers for r in found.resources} == {
        "samplers": 1, "compile cores": 1, "timing benches": 3, "learner": 1, "aggregator": 1, "broker": 1,
    }  # fmt: skip
    benches = next(r for r in found.resources if r.stage == "bench")
    assert benches.load == pytest.approx(2.0)
    assert benches.load / (benches.servers - 1) > 0.8 >= benches.utilisation


def test_a_load_that_fits_the_target_exactly_needs_no_spare_server() -> None:
    found = plan(observed(), 4 * 0.8 / 0.2 * 3600, target=0.8)
    assert next(r.servers for r in found.resources if r.stage == "bench") == 4


@pytest.mark.parametrize("utilisation", [0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("servers", [1, 2, 3, 8, 24])
def test_the_wait_is_that_of_the_closed_formula(servers: int, utilisation: float) -> None:
    assert wait_s(0.2, servers, utilisation) == pytest.approx(erlang_wait(0.2, servers, utilisation))


def test_bursts_wait_longer_in_proportion() -> None:
    assert wait_s(0.2, 3, 0.8, variability=2.5) == pytest.approx(2.5 * wait_s(0.2, 3, 0.8))


def test_thousands_of_servers_are_no_overflow() -> None:
    assert 0 < wait_s(1.0, 5000, 0.99) < 0.02


def test_one_server_waits_as_the_textbook_says() -> None:
    assert wait_s(2.0, 1, 0.75) == pytest.approx(2.0 * 0.75 / 0.25)  # M/M/1


def test_at_full_load_the_wait_has_no_end() -> None:
    assert math.isinf(wait_s(0.2, 4, 1.0))


def test_a_learner_that_would_have_to_be_two_is_said_to_be_out_of_reach() -> None:
    found = plan(observed(), 2 * 3600 / 0.03)
    assert [problem for problem in found.problems if problem.startswith("learner: would be busy 200%")]


def test_what_saturates_first_is_the_bottleneck() -> None:
    found = plan(observed(score=0.09), 36_000)
    assert (found.bottleneck.name, found.bottleneck.limit_per_hour) == ("aggregator", pytest.approx(40_000))


def test_a_window_that_is_too_small_for_the_rate_is_named() -> None:
    rate = 36_000
    residence = plan(observed(), rate).residence_s
    places = residence * rate / 3600
    tight, wide = AdmissionWindow(0, 1, int(2 * places * 0.9)), AdmissionWindow(0, 1, int(2 * places * 1.1) + 1)
    assert any("admission window" in problem for problem in plan(observed(), rate, window=tight).problems)
    assert plan(observed(), rate, window=wide).problems == []


def test_an_update_counts_once_a_batch_in_the_residence() -> None:
    quick, slow = plan(observed(train=0.0), 3600), plan(observed(train=0.04), 3600)
    waits = next(r.wait_s for r in slow.resources if r.stage == "train")
    assert slow.residence_s - quick.residence_s == pytest.approx(0.04 * 50 + waits)


def test_compile_is_planned_in_cores_where_the_run_says_how_many_it_used() -> None:
    work = StageWork(busy_s=50.0, cores_s=120.0, tasks=ROLLOUTS, processes=1)
    found = RunObservation(200.0, ROLLOUTS, 20, {"compile": work})
    assert found.demand("compile") == pytest.approx(0.12)


def test_a_layout_carries_what_its_slowest_stage_does() -> None:
    assert carried(observed()) == (pytest.approx(3600 / 0.2), "bench")


def test_times_that_are_only_told_plan_like_measured_ones() -> None:
    given = plan(observation_of(TIMES, 50), 36_000)
    measured = plan(observed(), 36_000)
    assert [r.servers for r in given.resources] == [r.servers for r in measured.resources]


def test_a_larger_model_costs_generation_and_updates_only() -> None:
    larger = observed().scaled({"generate": 10.0, "train": 10.0})
    assert [larger.demand(stage) for stage in TIMES] == pytest.approx([0.2, 0.05, 0.2, 0.001, 0.3])


@pytest.mark.parametrize(("rate", "target"), [(0.0, 0.8), (-1.0, 0.8), (math.nan, 0.8), (100.0, 1.0), (100.0, 0.0)])
def test_a_plan_without_a_rate_or_headroom_is_refused(rate: float, target: float) -> None:
    with pytest.raises(UserError, match="a rate above 0 and a utilisation between 0 and 1"):
        plan(observed(), rate, target=target)


@pytest.mark.parametrize("times", [{"bensch": 1.0}, {"bench": -1.0}, {"bench": math.inf}])
def test_times_that_are_none_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(UserError):
        observation_of(times, 8)
