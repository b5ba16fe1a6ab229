"""What a viewer sees of two reports, and that it fits the screen."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kbrl_async.runs.telemetry import live, screen
from kbrl_async.runs.telemetry.live import View, view
from kbrl_async.runs.telemetry.progress import MAKING, TRAINING, Progress
from protocols.messages import Load, StageStanding, StatusReport, TroubleReport, WorkerStanding

STAGES = ("generate", "compile", "bench", "score", "train", "trained")


def worker(name: str, stage: str, load: Load, **more: object) -> WorkerStanding:
    return WorkerStanding(name, [stage], slots=4, credit=4, load=load, **more)  # type: ignore[arg-type]


def report(at: float, done: int, *extra: WorkerStanding, epoch: int = 1, **more: object) -> StatusReport:
    facts = {"reward_mean": 0.412, "compile_rate": 0.62, "correct_rate": 0.31, "updates": 7.0, "max_steps": 14.0,
             "answers_of": 5.0}  # fmt: skip
    return StatusReport(
        at=at,
        epoch=epoch,
        uptime_s=192.0,
        policy_version=7,
        run="smoke",
        stages=[StageStanding(stage, 12, 3, 1.5, 1, 4, 0.5, 2) for stage in STAGES],
        workers=[
            worker("reward_aggregator.1", "score", Load(done=done, facts=facts)),
            worker("sampler.1", "generate", Load(busy=0.9, done=done, tokens=100 * done, gpu=0.5, gpu_mb=2048.0)),
            worker("learner.1", "train", Load(done=done // 10)),
            *extra,
        ],
        counters={"submitted": 100, "lost": 1},
        **more,  # type: ignore[arg-type]
    )


def text(seen: View, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(screen.render(seen, width, height))
    return console.export_text().splitlines()


def test_rates_are_what_workers_counted_up_between_two_reports() -> None:
    rates = live.rates(report(100.0, 20), report(110.0, 40))
    assert (rates.rollouts_per_s, rates.tokens_per_s, rates.updates_per_h) == (2.0, 200.0, 720.0)


def test_a_worker_whose_process_was_replaced_counts_from_nothing_and_not_backwards() -> None:
    assert live.rates(report(100.0, 50), report(110.0, 10)).rollouts_per_s == 1.0


def test_rates_that_the_broker_does_not_tell_are_unknown_and_not_nothing() -> None:
    assert view(None, report(1.0, 5)).rates is None
    told = {"rollouts_per_s": 2.0, "tokens_per_s": 3.0, "updates_per_h": 4.0}
    assert view(None, report(1.0, 5, rates=told)).rates == live.RunRates(2.0, 3.0, 4.0)


def test_workers_are_compared_within_one_epoch_of_the_broker_only() -> None:
    first, second = report(100.0, 10), report(110.0, 30)
    done = {w.worker_id: w.done_per_s for w in view(first, second).workers}
    assert done["reward_aggregator.1"] == 2.0
    restarted = view(msgspec.structs.replace(first, epoch=9), second)
    assert {w.done_per_s for w in restarted.workers} == {None}


def test_suspects_stand_first_after_the_broker_and_errors_newest_first() -> None:
    suspect = worker("zz.1", "bench", Load(), suspect=True, silent_s=4.0)
    seen = view(
        None, report(1.0, 5, suspect, troubles=[TroubleReport(1.0, "a", "old"), TroubleReport(2.0, "b", "new")])
    )
    assert [w.worker_id for w in seen.workers][:2] == ["broker", "zz.1"]
    assert [error.what for error in seen.errors] == ["new", "old"]


def test_json_names_every_field() -> None:
    made = msgspec.json.decode(msgspec.json.encode(view(None, report(1.0, 5, troubles=[TroubleReport(1.0, "a", "x")]))))
    assert made["stages"][0]["stage"] == "generate"
    assert made["errors"] == [{"at": 1.0, "who": "a", "what": "x"}]
    assert next(w for w in made["workers"] if w["worker_id"] == "sampler.1")["gpu"] == 0.5
    assert next(w for w in made["workers"] if w["worker_id"] == "learner.1")["gpu"] is None


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (130, 40), (200, 60)])
@pytest.mark.parametrize("workers", [0, 3, 80])
@pytest.mark.parametrize("away_s", [0.0, 12.0])
def test_it_fits_the_screen(width: int, height: int, workers: int, away_s: float) -> None:
    many = [worker(f"timing_bench.{n}", "bench", Load(busy=0.5)) for n in range(workers)]
    errors = [TroubleReport(float(n), "timing_bench.1", "long " * 60) for n in range(20)]
    lines = text(view(None, report(1.0, 5, *many, troubles=errors), away_s=away_s), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_what_matters_is_on_eighty_by_twentyfour() -> None:
    lines = "\n".join(
        text(view(None, report(1.0, 5, troubles=[TroubleReport(1.0, "farm.1", "no space left")])), 80, 24)
    )
    for shown in (
        "smoke",
        "running",
        "policy v7",
        "7/14",
        "0.412",
        "62%",
        "bench",
        "sampler.1",
        "50%",
        "no space left",
    ):
        assert shown in lines
    assert "has not answered for 12s" in "\n".join(text(view(None, report(1.0, 5), away_s=12.0), 80, 24))


def test_what_a_candidate_wrote_can_not_take_over_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    hostile = TroubleReport(1.0, "farm\x1b[2J", "\x1b]0;owned\x07 and \x9b31m")
    console.print(screen.render(view(None, report(1.0, 5, troubles=[hostile])), 100, 40))
    assert isinstance(console.file, io.StringIO)
    assert not {"\x1b", "\x07", "\x9b"} & set(console.file.getvalue())


def test_durations_are_short() -> None:
    assert [screen.duration(s) for s in (0.42, 12.4, 185.0, 7620.0)] == ["0.4s", "12s", "3m 05s", "2h 07m"]


def test_the_line_of_the_last_update_says_which_version_its_figures_are_of() -> None:
    shown = "\n".join(text(view(None, report(1.0, 5)), 80, 24))
    assert "update 7/14  version 5  reward 0.412" in shown


def test_while_the_policy_is_made_nobody_is_called_dead() -> None:
    queued = report(1.0, 0)
    stages = [StageStanding("generate", 336, 0, 100.0, 0, 0, 0.0, 0)]
    alone = msgspec.structs.replace(queued, workers=[], stages=stages)
    made = Progress(MAKING, "step 31 of 300, loss 2.01", 0.1, 1.0, 72.0)
    shown = "\n".join(text(view(None, alone, progress=made, expected=["sampler"]), 80, 24))
    assert "making the policy step 31 of 300, loss 2.01  left 1m 12s" in shown
    assert "sampler              starting" in shown
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(screen.render(view(None, alone, progress=made, expected=["sampler"]), 80, 24))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[1;31m" not in console.file.getvalue(), "nothing is red"


def test_a_service_that_is_missing_while_training_stands_first() -> None:
    training = Progress(TRAINING, "update 3 of 14", 0.2, 1.0)
    seen = view(None, report(1.0, 5), progress=training, expected=["learner", "timing_bench"])
    assert [(w.worker_id, w.state) for w in seen.workers][1] == ("timing_bench", "missing")
    ending = view(None, report(1.0, 5, draining=True), progress=training, expected=["timing_bench"])
    assert "missing" not in {w.state for w in ending.workers}
