"""`kbrl compare` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.cli import main
from kbrl_async.telemetry import summary
from kbrl_async.telemetry.tensorboard import Writer


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name in ("one", "two"):
        writer = Writer(tmp_path / name / "tensorboard" / "training")
        writer.scalars({"reward/mean": 0.5}, 1)
        writer.close()
    summary.write(tmp_path / "one" / "summary.json", {"updates": 3, "correct_rate_last": 0.25})
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_ended_runs_are_a_table_and_all_are_in_the_chart(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "reward.svg"
    assert main(["compare", *runs, "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "correct_rate_last" in shown.out
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
    assert "correct rate last" in text
    assert text.count("<polyline") == 2
