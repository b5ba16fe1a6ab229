"""The lnav format fits the lines that our processes really write."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.runs.telemetry import logs

FORMAT: dict[str, Any] = json.loads((Path(__file__).parents[4] / "deploy" / "lnav" / "kbrl.json").read_text())[
    "kbrl_log"
]
BUILT_IN = ("__timestamp__", "__level__")
KINDS = {"string": str, "integer": int, "float": (int, float)}


@pytest.fixture
def written(tmp_path: Path, restored_logging: None) -> tuple[Path, list[dict[str, Any]]]:
    """The file and the lines of a process that logs at every level, with and without a task."""
    logs.configure("timing_bench.1", tmp_path, "debug", terminal=False)
    log = logs.get_logger()
    with logs.bound(task_id="g000012.r3.t0", group_id="g000012", policy_version=3):
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(log, level)("judged", fault="ok", reward=0.5, speedup=None)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    path = tmp_path / "logs" / "timing_bench.1.jsonl"
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_is_recognised_by_its_name(written: tuple[Path, list[dict[str, Any]]]) -> None:
    path, _ = written
    assert re.search(FORMAT["file-pattern"], str(path))
    assert re.search(FORMAT["file-pattern"], f"{path}.1")
    assert not re.search(FORMAT["file-pattern"], str(path.parent / "summary.json"))


def test_every_line_has_the_time_level_and_body_that_the_format_names(
    written: tuple[Path, list[dict[str, Any]]],
) -> None:
    (pattern,) = FORMAT["timestamp-format"]
    for line in written[1]:
        datetime.datetime.strptime(line[FORMAT["timestamp-field"]], pattern)
        assert line[FORMAT["body-field"]]
        assert line[FORMAT["thread-id-field"]] == "timing_bench.1"
        matching = [name for name, regex in FORMAT["level"].items() if re.search(regex, line[FORMAT["level-field"]])]
        assert matching == [line["level"]]


def test_every_level_that_we_log_has_its_own(written: tuple[Path, list[dict[str, Any]]]) -> None:
    assert {line["level"] for line in written[1]} == set(FORMAT["level"])


def test_fields_have_the_kinds_that_the_format_gives_them(written: tuple[Path, list[dict[str, Any]]]) -> None:
    for line in written[1]:
        for name, value in FORMAT["value"].items():
            if line.get(name) is not None:
                assert isinstance(line[name], KINDS[value["kind"]]), name
    seen = {name for line in written[1] for name in line}
    assert set(FORMAT["value"]) <= seen, "a field that no line has"


def test_what_a_shown_line_is_made_of_is_described() -> None:
    shown = [part["field"] for part in FORMAT["line-format"] if isinstance(part, dict)]
    assert set(shown) - set(BUILT_IN) <= set(FORMAT["value"])
    assert FORMAT["opid-field"] in FORMAT["value"]
