"""`kbrl chaos` on a run that goes on: `kill -9` of every kind of process and more; nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.lab.chaos.faults import SERVICES
from tests.running import REPOSITORY, Run, assert_counters_add_up, assert_replays

STEPS = 5
BROKER_BACK_S = 60.0
"""Others may load this machine; `benchmarks.runs chaos` holds the broker to 3 s."""
PLAN = """
fault:
- {after_update: 0, kind: kill, target: sampler}
- {after_update: 0, kind: corrupt, target: frames}
- {after_update: 1, kind: kill, target: broker}
- {after_update: 1, kind: kill, target: compile_farm}
- {after_update: 2, kind: kill, target: learner}
- {after_update: 2, kind: kill, target: timing_bench}
- {after_update: 3, kind: corrupt, target: journal}
- {after_update: 3, kind: kill, target: reward_aggregator}
- {after_update: 3, kind: disk-full, target: sampler, for_s: 1}
"""
"""Two at a time, so that none waits for an update of its own. What a wedge and a stop do, the nanny's tests say."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_survives_the_death_of_every_kind_of_process(start_run: Callable[..., Run], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    run = start_run(f"max_steps={STEPS}", "broker.heartbeat_s=0.5")
    run.until(lambda: all(run.children(service) for service in SERVICES))

    command = [sys.executable, "-m", "kbrl_async", "chaos", str(run.path), "--plan", str(plan)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "--broker-back", str(BROKER_BACK_S), "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.tail()
    report = json.loads(done.stdout)
    assert all("failed" not in happened for happened in report["faults"])
    assert len(report["faults"]) == PLAN.count("- {")
    killed = {fault["fault"]["target"] for fault in report["faults"] if fault["fault"]["kind"] == "kill"}
    assert killed == set(SERVICES)

    assert run.wait() == 0, run.tail()
    summary = run.summary()
    assert_counters_add_up(summary)
    assert summary["updates"] == STEPS
    assert summary["groups_trained"] == 2 * STEPS
    assert summary["max_staleness"] <= 2
    versions = [line["policy_version"] for line in run.log("reward_aggregator") if line["event"] == "update"]
    assert sorted(set(versions)) == list(range(1, STEPS + 1)), "every version was made, none was skipped"
    assert_replays(run)
