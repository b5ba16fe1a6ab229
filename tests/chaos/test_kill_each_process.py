"""`kbrl chaos` on a run that goes on: `kill -9` of every kind of process and more; nothing is lost or done twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import REPOSITORY, SERVICES, Run, assert_counters_add_up, assert_replays

STEPS = 8
BROKER_BACK_S = 60.0
"""Others may load this machine; benchmarks/chaos.py holds the broker to 3 s."""
MORE = (
    "{after_update: 1, kind: corrupt, target: frames}",
    "{after_update: 2, kind: disk-full, target: sampler, for_s: 2}",
    "{after_update: 3, kind: corrupt, target: journal}",
    "{after_update: 4, kind: stop, target: reward_aggregator, for_s: 2}",
    "{after_update: 5, kind: wedge, target: timing_bench, for_s: 90}",
)


@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_every_kind_of_process(
    start_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [f"{{after_update: {n}, kind: kill, target: {service}}}" for n, service in enumerate(SERVICES, start=1)]
    plan = tmp_path / "plan.yaml"
    plan.write_text("fault:\n" + "".join(f"- {fault}\n" for fault in (*kills, *MORE)))
    monkeypatch.setenv("KBRL_WEDGED_S", "8")
    run = start_run(f"max_steps={STEPS}", "broker.heartbeat_s=0.5")
    monkeypatch.delenv("KBRL_WEDGED_S")
    run.until(lambda: run.updates() >= 1, 280)

    command = [sys.executable, "-m", "kbrl_async", "chaos", "--run", str(run.path), "--plan", str(plan)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "--broker-back", str(BROKER_BACK_S), "--json"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.tail()
    report = json.loads(done.stdout)
    assert all("failed" not in happened for happened in report["faults"])
    assert len(report["faults"]) == len(SERVICES) + len(MORE)

    assert run.wait(60) == 0, run.tail()
    summary = run.summary()
    assert_counters_add_up(summary)
    assert summary["updates"] == STEPS
    assert summary["groups_trained"] == 2 * STEPS
    assert summary["max_staleness"] <= 2
    versions = [line["policy_version"] for line in run.log("reward_aggregator") if line["event"] == "update"]
    assert sorted(set(versions)) == list(range(1, STEPS + 1)), "every version was made, none was skipped"
    assert_replays(run)
