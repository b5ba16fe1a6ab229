"""Figures for other services: sent beside the run, by update and by second, and no fault of theirs is the run's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.errors import MissingTool
from kbrl_async.runs.settings import Metrics
from kbrl_async.runs.telemetry import sinks
from kbrl_async.runs.telemetry.sinks import MetricsOutput, Mlflow, Sinks, Wandb, open_output, open_sinks


class Kept:
    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, float], int]] = []
        self.closed = False

    def send(self, part: str, values: Mapping[str, float], step: int) -> None:
        if step == 13:
            raise OSError("the service is away")
        self.sent.append((part, dict(values), step))

    def close(self) -> None:
        self.closed = True


def broken() -> Kept:
    raise OSError("no account")


def test_each_part_goes_out_in_order_and_what_is_not_finite_does_not() -> None:
    kept = Kept()
    made = Sinks([lambda: kept])
    for part, step in (("training", 1), ("system", 30), ("training", 2)):
        board = open_output(part, None, made)
        assert board is not None
        board.scalars({"reward/mean": 0.5, "loss": float("nan")}, step)
    made.close()
    assert kept.sent == [("training", {"reward/mean": 0.5}, 1), ("system", {"reward/mean": 0.5}, 30),
                         ("training", {"reward/mean": 0.5}, 2)]  # fmt: skip
    assert kept.closed


def test_a_service_that_fails_is_the_loss_of_its_figures_only() -> None:
    kept = Kept()
    made = Sinks([broken, lambda: kept])
    for step in (12, 13, 14):
        made.send("training", {"x": 1.0}, step)
    made.close()
    assert [step for *_, step in kept.sent] == [12, 14]
    assert made.lost == 2


def test_a_service_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "WAITING", 2)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    gate = threading.Event()

    def slow() -> Kept:
        gate.wait(5)
        return Kept()

    made = Sinks([slow])
    for step in range(5):
        made.send("training", {"x": 1.0}, step)
    made.close()
    assert made.lost == 3
    gate.set()


def test_nobody_who_is_not_asked_for_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_sinks(Metrics(), tmp_path, {}) is None
    assert open_output("training", None, None) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for settings in (Metrics(wandb_project="p"), Metrics(mlflow_uri="sqlite:///x.db")):
        with pytest.raises(MissingTool, match="pip install 'kbrl-async"):
            open_sinks(settings, tmp_path, {})


def test_event_files_are_written_as_before(tmp_path: Path) -> None:
    board = open_output("training", tmp_path, None)
    assert isinstance(board, MetricsOutput)
    board.scalars({"x": 1.0}, 1)
    board.histogram("h", [1.0, 2.0], 1)
    board.close()
    assert list((tmp_path / "training").iterdir())


def sent_to(sink: Any) -> None:
    sink.send("training", {"reward/mean": 0.25}, 1)
    sink.send("system", {"queue/bench": 3.0}, 40)
    sink.send("training", {"reward/mean": 0.5}, 2)
    sink.close()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_figures_and_a_continued_run_goes_on_in_its_own(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra kbrl-async[mlflow] is not installed")
    uri, run = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "default"
    sent_to(Mlflow(uri, run, {"batch_size": 4}))
    again = Mlflow(uri, run, {"batch_size": 4})
    again.send("training", {"reward/mean": 0.75}, 3)
    again.close()
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    history = client.get_metric_history(found.info.run_id, "training/reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert found.data.params == {"batch_size": "4"}


@pytest.mark.filterwarnings("ignore")
def test_wandb_takes_both_axes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra kbrl-async[wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    run = tmp_path / "default"
    run.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sink = Wandb("kernels", run, {"batch_size": 4})
        sent_to(sink)
    files = list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1
    assert b"reward/mean" in files[0].read_bytes()
