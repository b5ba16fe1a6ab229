"""`kbrl compare` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.cli import main
from kbrl_async.runs import summary
from kbrl_async.runs.telemetry.tensorboard import Writer
from tests.slow_bench import SlowBench


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """`one` has ended, `two` has not."""
    slow = SlowBench(updates=4)
    folders = [slow.folder(tmp_path / name) for name in ("one", "two")]
    (folders[1] / "summary.json").unlink()
    return [str(folder) for folder in folders]


def test_ended_runs_are_a_table_and_all_are_in_the_chart(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "reward.svg"
    assert main(["compare", *runs, "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "training, first versions" in shown.out
    assert "192 of v0" in shown.out
    assert "one: First: 192 answers of version 0 (24 groups)" in shown.out
    assert "two has not ended" in shown.err
    assert plot.read_text().count("<polyline") == 2


def test_a_tag_that_no_run_has_is_named(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--plot", str(tmp_path / "x.svg"), "--tag", "no/such"]) == 2
    assert "no run has the tag no/such" in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_runs_are_compared_on_a_page(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "compared.html"
    assert main(["compare", *runs, "--output", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "training, first versions" in text
    for title in ("Reward", "Compiles", "Correct", "Faster", "Proven faster"):
        assert f"{title} by policy version" in text
    assert text.count("<polyline") == 2 * 5


def test_kinds_of_held_out_problems_are_rows_of_their_own(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name, rate in (("one", 0.5), ("other", 0.75)):
        kinds = {"heldout_kinds": {"L1/a": "family"}, "heldout_family_correct_rate_after": rate}
        (tmp_path / name).mkdir(exist_ok=True)
        summary.write(tmp_path / name / "summary.json", {"method": "grpo", "rollouts": 96, **kinds})
    assert main(["compare", runs[0], str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert "held-out, of families that are not, after training" in shown
    assert "held-out, of families that are trained on" not in shown
    assert [cell in shown for cell in ("50\u00a0%", "75\u00a0%")] == [True, True]


def test_methods_stand_side_by_side_and_who_has_no_such_curve_is_named(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of method=sft has held-out figures, lessons instead of rollouts, and no rewards to draw."""
    writer = Writer(tmp_path / "taught" / "tensorboard" / "training")
    writer.scalars({"policy/loss": 0.1}, 1)
    writer.close()
    after = {"heldout_correct_rate_after": 0.5, "heldout_fast_1_after": 0.5, "heldout_fast_1_proven_after": 0.25}
    taught = {"method": "sft", "rollouts": 0, "demonstrations": {"lessons": 640, "bad": 2}, **after}
    summary.write(tmp_path / "taught" / "summary.json", taught)
    summary.write(tmp_path / "one" / "summary.json", {"method": "grpo", "rollouts": 96, **after})
    words = ["compare", *runs, str(tmp_path / "taught"), "--plot", str(tmp_path / "reward.svg")]
    assert main(words) == 0
    shown = capsys.readouterr()
    rows = {line.split("│")[1].strip(): line for line in shown.out.splitlines() if line.count("│") == 4}
    assert [rows["method"].split("│")[n].strip() for n in (2, 3)] == ["grpo", "sft"]
    assert [rows["lessons"].split("│")[n].strip() for n in (2, 3)] == ["–", "640"]
    assert "held-out, after training" in rows
    assert [rows["proven faster"].split("│")[n].strip() for n in (2, 3)] == ["25\u00a0%", "25\u00a0%"]
    assert "taught has no version/reward_mean" in shown.err
