"""Stage times are read from a run's lines over the window of training alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.lab.plan import count_parameters, halves, observe
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample

STEPS = 40
PER_LINE = {"generate": 4, "compile": 4, "bench": 2, "score": 4}
BUSY = {"generate": 0.1, "compile": 0.4, "bench": 0.9, "score": 0.02}


def line(n: int, *, done: int | None = None, version: int | None = None, cpu: float = 0.0) -> SystemSample:
    """Line `n` of a steady run: four rollouts a second, an update every ten."""
    count = n if done is None else done
    workers = {
        f"{stage}.1": WorkerSample([stage], BUSY[stage], done=each * count, cpu=cpu) for stage, each in PER_LINE.items()
    }
    workers["learner.1"] = WorkerSample(["train"], 0.5, done=count // 10)
    workers["score.1"] = WorkerSample(["score", "trained"], 0.02, done=4 * count + count // 10)
    return SystemSample(1000.0 + n, n // 10 if version is None else version, in_flight={"bench": 2}, workers=workers)


def lines() -> list[SystemSample]:
    return [line(n) for n in range(STEPS + 1)]


def test_a_steady_run_is_measured_as_what_it_is() -> None:
    found = observe(lines())
    assert (found.seconds, found.rollouts, found.updates) == (STEPS, 4 * STEPS, 4)
    assert found.demand("bench") == pytest.approx(0.9 / 4)
    assert found.visits("bench") == pytest.approx(0.5)
    assert found.held("bench") == pytest.approx(1.0)
    assert found.update_s == pytest.approx(5.0)


def test_what_lies_before_the_first_result_and_after_the_last_version_does_not_count() -> None:
    before = [line(-n, done=0, version=0) for n in range(100, 0, -1)]
    after = [line(STEPS + n, version=STEPS // 10) for n in range(1, 100)]
    assert observe([*before, *lines(), *after]) == observe(lines())


def test_a_worker_that_was_replaced_counts_from_zero_again() -> None:
    run = [line(n) if n <= 20 else line(n, done=n - 21, version=n // 10) for n in range(STEPS + 1)]
    assert observe(run).rollouts == 4 * (20 + 19)


def test_the_pause_of_a_stopped_run_is_no_time() -> None:
    late = [line(n) for n in range(21)] + [
        SystemSample(s.t + 3600, s.policy_version, s.queues, s.in_flight, workers=s.workers) for s in lines()[21:]
    ]
    assert observe(late).seconds == STEPS - 1 + 5


def test_cores_are_added_up_where_they_are_told() -> None:
    found = observe([line(n, cpu=1.5) for n in range(STEPS + 1)])
    assert found.demand("compile") == pytest.approx(1.5 / 4)


def test_the_halves_of_a_run_make_the_whole() -> None:
    first, second = halves(lines())
    assert first.rollouts + second.rollouts == observe(lines()).rollouts
    assert first.seconds + second.seconds == STEPS


@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_run_without_an_update_has_nothing_to_plan_from(count: int) -> None:
    with pytest.raises(UserError, match="trained nothing yet"):
        observe(lines()[:count])


def test_parameters_are_counted_from_the_header_of_the_weights(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
        "b": {"dtype": "F32", "shape": [7], "data_offsets": [60, 88]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert count_parameters(str(tmp_path)) == 22


@pytest.mark.parametrize(
    ("name", "count"),
    [("7B", 7e9), ("Qwen/Qwen2.5-Coder-7B-Instruct", 7e9), ("Qwen2.5-0.5B", 5e8), ("125m", 1.25e8)],
)
def test_a_name_says_how_large_a_model_is(name: str, count: float) -> None:
    assert count_parameters(name) == count


def test_a_name_without_a_size_is_asked_for_one() -> None:
    with pytest.raises(UserError, match="can't be told from its name"):
        count_parameters("my-model-v2")


def test_weights_that_are_cut_off_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        count_parameters(str(tmp_path))
