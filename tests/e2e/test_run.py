"""The whole system, end to end: every process, a real compiler, real verdicts, real updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.lab.small_policy.making import ensure_small_policy
from kbrl_async.runs.config import load
from tests.ports import free_port
from tests.running import TINY, Run, RunFolder, assert_counters_add_up, assert_figures_are_true

pytestmark = pytest.mark.timeout(1800)

Start = Callable[..., Run]


@pytest.mark.long
def test_an_interrupted_run_goes_on_where_it_stopped_and_ends_with_a_summary_that_adds_up(
    interrupted_run: RunFolder,
) -> None:
    """How it was stopped, and ended, the fixture holds it to."""
    again, summary = interrupted_run, interrupted_run.summary()
    assert_counters_add_up(summary)
    assert (summary["updates"], summary["groups_trained"]) == (3, 6)
    assert again.updates() == 3, "an update was done twice or lost"
    assert summary["max_staleness"] <= 2
    assert summary["rollouts"] >= 24
    # its second part is one update long, too short to see every process at work
    assert set(summary["busy"]) >= {"broker", "reward_aggregator.1", "compile_farm.1", "timing_bench.1"}
    for name in ("reward_mean", "compile_rate", "correct_rate", "fast_1", "fast_1_proven", "speedup_mean"):
        assert {f"{name}_first", f"{name}_last"} <= set(summary)
    assert summary["versions_first"] == [0, 0]
    assert summary["answers_left_out"] == 0, "every group of the run ended by itself"
    assert {"heldout_correct_rate_before", "heldout_correct_rate_after", "best_kernels"} <= set(summary)
    assert (again.path.parent / "latest").resolve() == again.path.resolve()
    _logs_bind_the_task(again)
    _tensorboard_has_both_parts(again)
    assert_figures_are_true(again)


def _logs_bind_the_task(run: RunFolder) -> None:
    built = [line for line in run.log("compile_farm") if line["event"] == "built"]
    scored = [line for line in run.log("reward_aggregator") if line["event"] == "scored"]
    assert scored
    assert all(line["task_id"] and line["group_id"] for line in (*built, *scored))


def _tensorboard_has_both_parts(run: RunFolder) -> None:
    for part in ("training", "system"):
        assert list((run.path / "tensorboard" / part).glob("events.out.*"))


@pytest.mark.long
def test_lora_on_any_hugging_face_folder_learns_from_turns_without_allowed_lag_over_tcp(
    start_run: Start, policy_cache: Path
) -> None:
    small = ensure_small_policy(policy_cache, small_options(load(overrides=[*TINY])))  # as an earlier run has made it
    submit, work = free_port(), free_port()
    run = start_run(
        f"model_name={small}",
        "lora_rank=4",
        "mode=multi_turn",
        "max_turns=3",
        "max_staleness=0",
        "max_steps=2",
        f"broker.submit=tcp://127.0.0.1:{submit}",
        f"broker.work=tcp://127.0.0.1:{work}",
    )
    assert run.wait() == 0, run.tail()
    summary = run.summary()
    assert_counters_add_up(summary)
    assert (summary["max_staleness"], summary["updates"]) == (0, 2), "no rollout is older than the policy it trains"
    assert summary["groups_trained"] == 4
    assert summary["avg_turns"] == 3
    assert summary["rollouts"] >= 2 * 2 * 4 * 3
    assert 0 <= summary["success_rate_first"] <= 1
    turns = {line["turn"] for line in run.log("reward_aggregator") if line["event"] == "scored"}
    assert turns == {0, 1, 2}, "each is trained on"
    assert_figures_are_true(run)
    newest = max((run.path / "policies").glob("policy-v*"), key=lambda path: int(path.name.removeprefix("policy-v")))
    assert json.loads((newest / "manifest.json").read_text())["kind"] == "lora"
    assert (newest / "adapter_model.safetensors").is_file()
