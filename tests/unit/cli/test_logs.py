"""`kbrl logs` shows, filters and follows what the processes of a run have logged."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.cli import logs, main
from kbrl_async.errors import UserError
from kbrl_async.runs.telemetry.log_reading import LoggedEvent


def entry(second: int, process: str, event: str, **more: object) -> str:
    stamp = f"2026-01-01T00:00:{second:02}.000000Z"
    return json.dumps({"process": process, "pid": 1, "event": event, "level": "info", **more, "timestamp": stamp})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "smoke"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "learner.1.jsonl").write_text(
        entry(2, "learner.1", "updated", loss=0.5) + "\n" + entry(5, "learner.1", "odd", level="warning") + "\n"
    )
    (folder / "logs" / "compile_farm.1.jsonl").write_text(
        entry(1, "compile_farm.1", "built", task_id="g000012.r3.t0", group_id="g000012") + "\n"
        + entry(3, "compile_farm.1", "failed", exception="Traceback\n  boom\x1b[2J") + "\n{half"
    )  # fmt: skip
    return folder


def shown(run: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["logs", str(run), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_processes_are_one_stream_by_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(run, capsys=capsys)
    assert [line.split()[1] for line in lines if not line.startswith(" ")] == [
        "compile_farm.1", "learner.1", "compile_farm.1", "learner.1",
    ]  # fmt: skip
    assert lines[1].endswith("updated loss=0.5")
    assert "task_id=g000012.r3.t0" in lines[0]


def test_an_exception_is_shown_below_its_line_and_can_not_take_over_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(run, "--process", "compile_farm", capsys=capsys)
    assert lines[2:] == ["    Traceback", "      boom\\x1b[2J"]


def test_filters_narrow_it_down(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "odd" in shown(run, "--level", "warning", capsys=capsys)[0]
    assert len(shown(run, "--task", "g000012.r3", capsys=capsys)) == 1
    assert len(shown(run, "--group", "g000012", "--worker", "learner", capsys=capsys)) == 0
    assert len(shown(run, "--process", "learner.1", capsys=capsys)) == 2
    assert len(shown(run, "-n", "1", capsys=capsys)) == 1
    assert len(shown(run, "--since", "2026-01-01T00:00:04+00:00", capsys=capsys)) == 1
    assert shown(run, "--since", "1s", capsys=capsys) == []


def test_json_goes_through_as_it_was_written(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["logs", str(run), "--process", "learner", "--json"]) == 0
    assert capfdbinary.readouterr().out == (run / "logs" / "learner.1.jsonl").read_bytes()


def test_following_shows_what_comes_and_ends_with_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "logs" / "learner.1.jsonl"

    def go_on() -> None:
        with path.open("a") as file:
            file.write(entry(6, "learner.1", "later") + "\n")
            file.flush()
            time.sleep(0.05)
            file.write(entry(7, "learner.1", "last") + "\n")
        (run / "summary.json").write_text("{}")

    writer, followed = threading.Thread(target=go_on), logs.followed

    def from_now_on(*given: Any) -> Iterator[LoggedEvent]:
        writer.start()  # not before: what is there by then would be the last line, in the place of "odd"
        return followed(*given)

    monkeypatch.setattr(logs, "followed", from_now_on)
    lines = shown(run, "-f", "-n", "1", "--process", "learner", capsys=capsys)
    writer.join()
    assert [line.split()[3] for line in lines] == ["odd", "later", "last"]


def test_colours_only_where_they_are_wanted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b[" not in "".join(shown(run, capsys=capsys))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in "".join(shown(run, capsys=capsys))


def test_a_moment_is_ago_a_time_of_today_or_a_date() -> None:
    noon = 1_767_268_800.0
    assert logs.moment("", noon) == ""
    assert logs.moment("10m", noon) == "2026-01-01T11:50:00.000000Z"
    assert logs.moment("2026-01-01T13:00:00+02:00", noon) == "2026-01-01T11:00:00.000000Z"
    assert logs.moment("9:05", noon)[14:16] == "05"
    with pytest.raises(UserError, match="10m"):
        logs.moment("yesterday", noon)


def test_a_folder_without_logs_is_an_error_with_a_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(tmp_path)]) == 2
    assert "has no logs" in capsys.readouterr().err
