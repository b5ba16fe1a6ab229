"""What is written is read back by TensorBoard's own reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from kbrl_async.telemetry import system_metrics, tensorboard, training_metrics
from kbrl_async.telemetry.system_metrics import SystemSample, WorkerSample
from kbrl_async.telemetry.training_metrics import RolloutStats


def read(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    reader.Reload()
    return reader


def test_scalars_are_read_back_with_step_and_time(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.scalars({"reward/mean": 0.25}, step=3, at=1000.0)
        board.scalars({"reward/mean": 0.5}, step=4, at=1001.0)
    events = read(tmp_path).Scalars("reward/mean")
    assert [(e.step, e.wall_time, e.value) for e in events] == [(3, 1000.0, 0.25), (4, 1001.0, 0.5)]


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


def test_text_is_read_back(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path) as board:
        board.text("config", "# hello")
    assert read(tmp_path).Tensors("config")[0].tensor_proto.string_val == [b"# hello"]


def test_the_layout_has_every_dashboard(tmp_path: Path) -> None:
    with tensorboard.Writer(tmp_path):
        pass
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(tensorboard.DASHBOARDS)


def test_every_tag_that_we_make_is_on_a_dashboard() -> None:
    rollout = RolloutStats(
        problem_id="a", level=1, reward=1, correct=True, speedup=2.0, staleness=1, advantage=1.0,
        seconds={"queue": 1.0},
    )  # fmt: skip
    now = SystemSample(t=2, queues={"a": 1}, in_flight={"a": 1}, oldest_s={"a": 1}, workers={"w": WorkerSample()})
    made = training_metrics.scalars([rollout]) | system_metrics.scalars(SystemSample(t=1), now)
    made |= training_metrics.policy_scalars({"ratio_mean": 1, "mismatch_kl": 0, "entropy": 1, "ess": 1, "lr": 1})
    patterns = [p for charts in tensorboard.DASHBOARDS.values() for tags in charts.values() for p in tags]
    watched = {tag for tag in made if not tag.startswith(("tokens/", "workers/", "level1/"))}
    assert {tag for tag in watched if not any(re.fullmatch(p, tag) for p in patterns)} == set()


@pytest.mark.parametrize("charts", tensorboard.DASHBOARDS.values(), ids=tensorboard.DASHBOARDS.keys())
def test_every_pattern_is_a_valid_expression(charts: dict[str, list[str]]) -> None:
    assert all(re.compile(pattern) for tags in charts.values() for pattern in tags)
