"""What a run costs: by the user's price table, before it and while it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.errors import ConfigError
from kbrl_async.lab import cost
from kbrl_async.lab.cost import Machine
from kbrl_async.lab.plan import observation_of
from kbrl_async.runs.config import load
from kbrl_async.runs.telemetry.system_metrics import SystemSample
from tests.unit.lab.plan.test_plan_command import run_folder

__all__ = ["run_folder"]


def test_a_gpu_is_priced_by_the_longest_part_of_its_name_that_the_table_has() -> None:
    table = {"H100": 2.0, "H100 80GB": 3.0, "gpu": 1.0, "core": 0.1}
    assert cost.bill(2.0, Machine(2, "NVIDIA H100 80GB HBM3"), table).money == pytest.approx(12.0)
    assert cost.bill(2.0, Machine(1, "NVIDIA A10", cores=10), table).money == pytest.approx(4.0)
    assert cost.bill(2.0, Machine(0, cores=2), table).money == pytest.approx(0.4)
    assert cost.bill(2.0, Machine(1, "NVIDIA A10"), {"H100": 2.0}).money is None
    assert cost.bill(2.0, Machine(0, cores=2), {"gpu": 2.0}).money is None


def test_a_run_asks_for_its_training_and_its_evaluations() -> None:
    config = load(overrides=["max_steps=10", "eval_every=4", "eval_samples=2", "mode=multi_turn", "max_turns=3"])
    assert cost.rollouts_of(config, heldout=5) == 3 * (10 * 64 + 4 * 2 * 5)


def test_the_slowest_stage_and_the_limit_of_minutes_make_the_hours() -> None:
    observed = observation_of({"generate": 0.5, "bench": 1.0, "train": 0.1}, 64)
    settings = ["max_steps=10", "eval_samples=0", "max_minutes=null"]
    one, two = (load(overrides=[*settings, f"processes.timing_bench={count}"]) for count in (1, 2))
    assert cost.hours_of(one, observed, 0.8, 0) == pytest.approx(640 / 0.8 / 3600)
    assert cost.hours_of(two, observed, 0.8, 0) == pytest.approx(320 / 0.8 / 3600)
    assert cost.hours_of(load(overrides=[*settings, "max_minutes=6"]), observed, 0.8, 0) == pytest.approx(0.1)


def test_a_pause_is_not_paid_for() -> None:
    assert cost.spent_hours([SystemSample(t) for t in (0.0, 1.0, 9000.0, 9001.0)]) == pytest.approx(7 / 3600)


def test_a_run_that_goes_on_says_what_it_has_cost_and_will(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(run_folder), "--json", "--price", "core=3.6"]) == 0
    found = json.loads(capsys.readouterr().out)["cost"]
    assert found["cost so far"]["hours"] == pytest.approx(60 / 3600)
    assert found["cost so far"]["money"] == pytest.approx(0.06 * found["cost so far"]["machine"]["cores"])
    assert found["to its last update, about"]["hours"] > 0
    (run_folder / "summary.json").write_text("{}")
    assert cli.main(["plan", str(run_folder)]) == 0
    said = capsys.readouterr().out
    assert "to its last update" not in said
    assert "in money: set cost.prices" in said


def test_a_wrong_price_is_named() -> None:
    with pytest.raises(ConfigError, match="'H100' is no price"):
        load(overrides=["cost.prices=H100"])
