"""Verifiers take all of a bench's work but the timing, in a forecast as in a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from kbrl_async import cli
from kbrl_async.errors import UserError
from kbrl_async.kernels.verify import checks
from kbrl_async.kernels.verify.inputs import KINDS, few_of
from kbrl_async.lab.apart import KNOWN_SETS, LIGHT_SETS, SETS, with_verifiers
from kbrl_async.lab.plan import RunObservation, StageWork, carried, plan
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from protocols.messages import Stage
from protocols.records import BenchReport, Fault, StageReport, Verdict
from tests.records import RIGHT, record
from tests.unit.lab.plan.test_plan_command import run_folder

__all__ = ["run_folder"]

STEPS = {"reference": 0.1, "small_inputs": 0.1, "full_inputs": 0.9, "timing": 0.5}
"""Of a right kernel, 1.6 s; a wrong one ends after the first two, 0.4 s with what no step counts."""


def report(*names: str, seconds: float) -> BenchReport:
    stages = tuple(StageReport(name, Fault.OK, STEPS[name]) for name in names)
    return msgspec.structs.replace(RIGHT, started_at=100.0, finished_at=100.0 + seconds, stages=stages)


RIGHT_ONE, WRONG_ONE = report(*STEPS, seconds=1.6), report("reference", "small_inputs", seconds=0.4)
BENCH = StageWork(busy_s=200.0, cores_s=200.0, tasks=200, held_s=400.0, processes=1)


def observed(**more: StageWork) -> RunObservation:
    return RunObservation(250.0, 400, 10, {Stage.BENCH: BENCH, **more})


def test_sets_are_counted_as_they_are_drawn() -> None:
    assert (len(KINDS), len(few_of(KINDS, random.Random(0)))) == (SETS, LIGHT_SETS)
    assert checks.KNOWN_SETS == KNOWN_SETS


def test_what_a_verifier_leaves_is_the_timing_and_a_short_proof() -> None:
    found = with_verifiers(observed(), [RIGHT_ONE, WRONG_ONE])
    verifying, timing = found.stages[Stage.VERIFY], found.stages[Stage.BENCH]
    assert verifying.busy_s == pytest.approx(200 * (1.1 + 0.4) / 2.0)
    assert timing.busy_s == pytest.approx(200 * (0.5 + 0.1 + 0.1 + 0.9 / 3) / 2.0)
    assert (verifying.tasks, timing.tasks) == (200, 100)
    assert found.demand(Stage.COMPILE) == observed().demand(Stage.COMPILE)


def test_of_a_kernel_whose_steps_can_be_compared_a_bench_sees_two_sets() -> None:
    known = msgspec.structs.replace(RIGHT_ONE, plan="0" * 64)
    timing = with_verifiers(observed(), [known, WRONG_ONE]).stages[Stage.BENCH]
    assert timing.busy_s == pytest.approx(200 * (0.5 + 0.1 + 0.1 + 0.9 / 9) / 2.0)


def test_the_plan_of_it_counts_verifiers_and_says_which_keys_start_them() -> None:
    found = plan(with_verifiers(observed(), [RIGHT_ONE, WRONG_ONE]), 14_400)
    assert found.settings == {"processes.sampler": 1, "processes.verifier": 2, "processes.timing_bench": 2}
    assert "processes.verifier" not in plan(observed(), 14_400).settings
    both = with_verifiers(observed(), [RIGHT_ONE])
    assert carried(both)[1] == Stage.VERIFY


@pytest.mark.parametrize("reports", [[], [WRONG_ONE]])
def test_a_run_that_timed_nothing_forecasts_nothing(reports: list[BenchReport]) -> None:
    with pytest.raises(UserError, match="no kernel of this run was timed"):
        with_verifiers(observed(), reports)


def test_a_run_with_verifiers_is_its_own_measure() -> None:
    with pytest.raises(UserError, match="this run had verifiers"):
        with_verifiers(observed(verify=StageWork(tasks=3)), [RIGHT_ONE])


def test_the_command_reads_the_steps_of_the_runs_own_records(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ArchiveWriter(run_folder / FILE) as archive:
        for number, bench in enumerate((RIGHT_ONE, WRONG_ONE)):
            whole = record(f"g000001.r{number}", bench=bench)
            archive.add(make_row(f"g000001.r{number}", whole, at=100.0), whole.encode()).result()
    assert cli.main(["plan", str(run_folder), "--verifiers", "--json"]) == 0
    found = {r["name"]: r for r in json.loads(capsys.readouterr().out)["resources"]}
    assert found["verifiers"]["demand_s"] == pytest.approx(0.1 * 1.5 / 2)
    assert found["timing benches"]["demand_s"] == pytest.approx(0.1 * 1.0 / 2)
    (wanted := tmp_path / "wanted.yaml").write_text("processes:\n  verifier: 2\neval_samples: 0\nmax_minutes: null\n")
    hours = []
    for words in ([], ["--verifiers"]):
        assert cli.main(["plan", str(run_folder), "--for", str(wanted), "--json", *words]) == 0
        hours += [one["hours"] for one in json.loads(capsys.readouterr().out)["cost"].values()]
    assert hours[0] == hours[1], "a configuration with verifiers is told with their work apart"


def test_times_that_are_told_say_it_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["plan", "--rollouts-per-hour", "7200", "--times", "generate=0.1,verify=0.6,bench=0.3"]
    assert cli.main([*told, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resources"][2]["name"] == "verifiers"
    assert cli.main([*told, "--verifiers"]) == 2
    assert "verify=SECONDS" in capsys.readouterr().err


def test_a_verdict_alone_is_no_time() -> None:
    with pytest.raises(UserError):
        with_verifiers(observed(), [BenchReport(Verdict(Fault.OK))])
