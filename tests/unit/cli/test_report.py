"""`kbrl report` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.yaml").write_text("model_name: small\n")
    return tmp_path / "first"


def test_the_page_is_written_into_the_run_and_its_place_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    assert "<h1>first</h1>" in (run / "report.html").read_text()


def test_the_page_goes_where_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").is_file()
    assert not (run / "report.html").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
