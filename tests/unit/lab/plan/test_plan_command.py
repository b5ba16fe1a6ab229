"""`kbrl plan` reads a run's lines, says how well the formula fits that run, and what a wished rate takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from kbrl_async import cli
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample

RATES = {"generate": (8, 0.2), "compile": (8, 0.4), "bench": (4, 0.8), "score": (8, 0.01)}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Eight rollouts a second, 28,800 an hour, its bench busy at 80 %."""
    lines = []
    for n in range(61):
        workers = {f"{s}.1": WorkerSample([s], busy, done=each * n) for s, (each, busy) in RATES.items()}
        workers["learner.1"] = WorkerSample(["train"], 0.3, done=n // 8)
        workers["score.1"] = WorkerSample(["score", "trained"], 0.01, done=8 * n + n // 8)
        lines.append(msgspec.json.encode(SystemSample(1000.0 + n, n // 8, workers=workers)))
    folder = tmp_path / "measured"
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "system.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "config.yaml").write_text("name: measured\n")
    return folder


def test_a_run_is_planned_from_and_checked_against(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(run_folder), "--rollouts-per-hour", "100000"]) == 0
    out = capsys.readouterr().out
    assert "36,000 rollouts an hour predicted for its own processes, 28,800 measured (+25.0%); bench" in out
    assert "timing benches" in out
    assert "learner: busy 104% of the time" in out


def test_the_plan_is_json_for_other_programs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(run_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollouts_per_hour"] == pytest.approx(28_800)
    assert {r["stage"]: r["servers"] for r in found["resources"]}["bench"] == 1


def test_told_times_need_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--rollouts-per-hour",
        "36000",
        "--times",
        "generate=0.1,compile=0.3",
        "--times",
        "bench=0.4,train=0.01",
    ]
    assert cli.main([*words, "--json"]) == 0
    servers = {r["stage"]: r["servers"] for r in json.loads(capsys.readouterr().out)["resources"]}
    assert (servers["generate"], servers["compile"], servers["bench"]) == (2, 4, 5)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--times", "bench=soon"], "--times bench=soon: no number of seconds"),
        (["--times", "bench=1"], "how much is wanted is not said"),
        (["--times", "bench=1", "--model", "7B", "--rollouts-per-hour", "9"], "holds no policy to compare 7B with"),
        (["nowhere"], "there are no runs in runs/"),
        (["--times", "bench=1", "--rollouts-per-hour", "-3"], "a rate above 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], cause: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where nobody has trained
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert cause in err
    assert err.count("\n") == 1


def test_what_is_recommended_is_told_gpu_by_gpu_with_all_who_share_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "Qwen2.5-7B", "--gpus", "1", "--gpu", "h100"]) == 0
    found = re.search(r"^# GPU 0: learner ([\d.]+) \+ sampler ([\d.]+) \+ timing_bench ([\d.]+) = ([\d.]+) GB$",
                      capsys.readouterr().out, re.MULTILINE)  # fmt: skip
    assert found is not None
    parts = [float(found[n]) for n in (1, 2, 3)]
    assert sum(parts) == pytest.approx(float(found[4]), abs=0.2)
    assert float(found[4]) < 85
    assert cli.main(["plan", "--model", "Qwen2.5-7B", "--gpus", "8", "--gpu", "h100"]) == 0
    assert re.search(r"^# GPU 1 to 6: sampler [\d.]+ GB$", capsys.readouterr().out, re.MULTILINE)
