"""What is written is read back by TensorBoard's own reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from kbrl_async.evaluation.metrics import heldout_scalars
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.telemetry import system_metrics, tensorboard, training_metrics
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample


def read(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    return reader


def test_scalars_are_read_back_with_step_and_time(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.scalars({"version/reward_mean": 0.25}, step=3, at=1000.0)
        board.scalars({"version/reward_mean": 0.5}, step=4, at=1001.0)
    events = read(tmp_path).Scalars("version/reward_mean")
    assert [(e.step, e.wall_time, e.value) for e in events] == [(3, 1000.0, 0.25), (4, 1001.0, 0.5)]


def test_what_matters_first_is_written_where_tensorboard_opens(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.scalars({"version/correct_rate": 0.25, "alarm/ess": 0.0}, step=3)
    tags = read(tmp_path).Tags()["scalars"]
    assert set(tags) == {"version/correct_rate", "alarm/ess", "_overview/2_correct"}
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("_overview/2_correct")] == [(3, 0.25)]
    assert next(iter(tensorboard.DASHBOARDS)) == "Overview"


def test_what_was_flushed_is_there_before_the_end(tmp_path: Path) -> None:
    board = tensorboard.Writer(tmp_path)
    board.scalars({"a": 1.0}, step=1)
    board.flush()
    assert [e.value for e in read(tmp_path).Scalars("a")] == [1.0]
    board.close()


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.scalars({"a": float("nan"), "b": 1.0}, step=1)
        board.scalars({"a": float("inf")}, step=2)
    assert read(tmp_path).Tags()["scalars"] == ["b"]


def test_a_continued_run_joins_the_first(tmp_path: Path) -> None:
    for step in (1, 2):
        with tensorboard.Writer(tmp_path) as board:
            board.scalars({"a": float(step)}, step=step)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_histogram_counts_every_value(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.histogram("rewards", [0.0, 0.0, 1.0], step=1)
        board.histogram("nothing", [], step=1)
    tags = read(tmp_path).Tags()["tensors"]
    assert "rewards" in tags
    assert "nothing" not in tags
    rows = tensor_util.make_ndarray(read(tmp_path).Tensors("rewards")[0].tensor_proto)
    assert rows.shape == (tensorboard.HISTOGRAM_BINS, 3)
    assert (rows[0, 0], rows[-1, 1], rows[0, 2], rows[:, 2].sum()) == (0.0, 1.0, 2.0, 3.0)


def test_the_layout_has_every_dashboard(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path):
        pass
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(tensorboard.DASHBOARDS)


def test_a_dashboard_that_a_run_has_nothing_for_is_left_out(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path, without=("Turns",)):
        pass
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert {category.title for category in layout.category} == set(tensorboard.DASHBOARDS) - {"Turns"}
    assert not any(category.closed for category in layout.category), "nothing to click open"


def test_every_tag_that_we_make_is_on_a_dashboard() -> None:
    rollout = RolloutStats(
        problem_id="a", level=1, reward=1, correct=True, speedup=2.0, staleness=1, advantage=1.0,
        seconds={"queue": 1.0},
    )  # fmt: skip
    now = SystemSample(t=2, queues={"a": 1}, in_flight={"a": 1}, oldest_s={"a": 1}, workers={"w": WorkerSample()})
    made = training_metrics.scalars([rollout]) | training_metrics.version_scalars([rollout], per_level=True)
    made |= system_metrics.scalars(SystemSample(t=1), now)
    made |= training_metrics.policy_scalars({"ratio_mean": 1, "mismatch_kl": 0, "entropy": 1, "ess": 1, "lr": 1})
    made |= system_metrics.scalars(None, SystemSample(t=1, workers={"s": WorkerSample(facts={"kv_usage": 0.5})}))
    patterns = [p for charts in tensorboard.DASHBOARDS.values() for tags in charts.values() for p in tags]
    watched = {tag for tag in made if not tag.startswith("level1/")}
    assert {tag for tag in watched if not any(re.fullmatch(p, tag) for p in patterns)} == set()


def patterns_of(dashboard: str) -> list[str]:
    return [pattern for tags in tensorboard.DASHBOARDS[dashboard].values() for pattern in tags]


def test_turns_of_a_rollout_are_on_a_dashboard_of_their_own() -> None:
    turns = [
        RolloutStats(problem_id="a", level=1, reward=1, rollout_id="r", turn=turn, compiled=turn > 0,
                     fault="" if turn else "compile_error")
        for turn in range(3)
    ]  # fmt: skip
    made = [tag for tag in training_metrics.version_scalars(turns, per_level=True) if tag.startswith("multiturn/")]
    made += [f"turn_{turn}/{rate}" for turn in (1, 2, 3) for rate in ("correct_rate", "reward_mean", "compile_rate")]
    assert len(made) == 8 + 9
    assert [tag for tag in made if not any(re.fullmatch(p, tag) for p in patterns_of("Turns"))] == []


def test_an_evaluation_is_on_a_dashboard_of_its_own() -> None:
    made = ["eval/correct_rate", "eval_filtered/pass_at_4", "eval_level1/fast_1.5", "eval/speedup_geometric_mean",
            "eval/fast_1_proven", "eval/correct_rate_lo", "eval/hack_rate"]  # fmt: skip
    rollout = RolloutStats(problem_id="a", level=1, reward=1, correct=True, speedup=2.0)
    made += [tag for tag in heldout_scalars([rollout]) if tag != "eval/policy_version_mean"]
    assert [tag for tag in made if not any(re.fullmatch(p, tag) for p in patterns_of("Evaluation"))] == []


def test_cores_and_gpus_are_written_by_process() -> None:
    workers = {"a": WorkerSample(cpu=1.5, gpu=0.5, gpu_mb=100.0), "b": WorkerSample()}
    made = system_metrics.scalars(None, SystemSample(t=1, workers=workers))
    shown = {tag: value for tag, value in made.items() if tag.startswith(("cpu_cores/", "gpu"))}
    assert shown == {"cpu_cores/broker": 0.0, "cpu_cores/a": 1.5, "cpu_cores/b": 0.0, "gpu/a": 0.5, "gpu_mb/a": 100.0}


def test_a_folder_for_several_runs_holds_each_by_its_name_and_the_run_leads_there(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tensorboard.event_folder(tmp_path / "runs" / name, str(tmp_path / "all"))
        with tensorboard.Writer(folder / "training") as board:
            board.scalars({"batch/reward_mean": 0.5}, step=1)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["one", "two"]
    assert read(tmp_path / "runs" / "two" / "tensorboard" / "training").Tags()["scalars"] == ["batch/reward_mean"]


def test_without_such_a_folder_events_stay_in_the_run(tmp_path: Path) -> None:
    assert tensorboard.event_folder(tmp_path / "one", None) == tmp_path / "one" / "tensorboard"


def test_a_continued_run_may_move_its_events_and_keeps_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "one" / "tensorboard" / "system").mkdir(parents=True)
    for where in ("first", "second"):
        tensorboard.event_folder(tmp_path / "one", str(tmp_path / where))
    inside = tmp_path / "one" / "tensorboard"
    assert (inside / "training").resolve() == tmp_path / "second" / "one" / "training"
    assert not (inside / "system").is_symlink()


def test_a_run_knows_over_restarts_when_it_began(tmp_path: Path) -> None:
    assert [system_metrics.begun(tmp_path, first) for first in (1000.5, 2000.0)] == [1000.5, 1000.5]
    (tmp_path / "metrics" / "begun").write_text("torn")
    assert system_metrics.begun(tmp_path, 3000.0) == 3000.0


@pytest.mark.parametrize("charts", tensorboard.DASHBOARDS.values(), ids=tensorboard.DASHBOARDS.keys())
def test_every_pattern_is_a_valid_expression(charts: dict[str, list[str]]) -> None:
    assert all(re.compile(pattern) for tags in charts.values() for pattern in tags)
