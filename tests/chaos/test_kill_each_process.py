"""`kill -9` of every kind of process in turn, in the middle of a run: it goes on, and nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.running import SERVICES, Run, assert_counters_add_up, assert_replays

STEPS = 8


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_every_kind_of_process(start_run: Callable[..., Run]) -> None:
    run = start_run(f"max_steps={STEPS}", "broker.heartbeat_s=0.5")
    for number, service in enumerate(SERVICES, start=1):
        run.until(lambda wanted=number: run.updates() >= wanted, 280)  # type: ignore[misc]
        run.kill(service)
    assert run.wait(300) == 0, run.tail()
    summary = run.summary()
    assert_counters_add_up(summary)
    assert summary["updates"] == STEPS
    assert summary["groups_trained"] == 2 * STEPS
    assert summary["max_staleness"] <= 2
    versions = [line["policy_version"] for line in run.log("reward_aggregator") if line["event"] == "update"]
    assert sorted(set(versions)) == list(range(1, STEPS + 1)), "every version was made, none was skipped"
    assert_replays(run)
