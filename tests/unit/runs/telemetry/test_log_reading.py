"""Logs of several processes become one stream, whatever happened to their files."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.runs.telemetry import log_reading, logs
from kbrl_async.runs.telemetry.log_reading import Broken, Filter, Follower, LastErrors, LoggedEvent


def at(second: float) -> str:
    return f"2026-01-01T00:{int(second) // 60:02}:{second % 60:09.6f}Z"


def entry(second: float, process: str = "farm.1", **more: Any) -> bytes:
    return json.dumps({"process": process, "event": "x", "level": "info", "timestamp": at(second), **more}).encode()


def read(folder: Path) -> tuple[list[LoggedEvent], int]:
    broken = Broken()
    return list(log_reading.merged(log_reading.files(folder), broken)), broken.count


def events(lines: list[LoggedEvent]) -> list[str]:
    return [str(line.event["event"]) for line in lines]


def test_lines_of_all_processes_come_by_time(tmp_path: Path) -> None:
    for process, seconds in (("a", (1, 4, 5)), ("b", (2, 3, 9)), ("c", ())):
        content = b"".join(entry(s, process, event=f"{process}{s}") + b"\n" for s in seconds)
        (tmp_path / f"{process}.jsonl").write_bytes(content)
    found, broken = read(tmp_path)
    assert events(found) == ["a1", "b2", "b3", "a4", "a5", "b9"]
    assert broken == 0


def test_within_a_file_the_order_of_writing_holds_also_where_the_clock_went_back(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(entry(s, event=f"a{s}") + b"\n" for s in (5, 2, 7)))
    (tmp_path / "b.jsonl").write_bytes(b"".join(entry(s, event=f"b{s}") + b"\n" for s in (4, 6)))
    assert events(read(tmp_path)[0]) == ["b4", "a5", "a2", "b6", "a7"]


def test_broken_lines_are_counted_and_passed_over_and_half_a_line_at_the_end_is_none_yet(tmp_path: Path) -> None:
    whole = entry(1, event="one") + b"\n"
    content = whole + b'{"torn": \n' + b"\0" * 512 + b"\n" + b"[1]\n" + entry(2, event="two") + b"\n" + entry(3)[:20]
    (tmp_path / "a.jsonl").write_bytes(content)
    found, broken = read(tmp_path)
    assert (events(found), broken) == (["one", "two"], 2)


def test_a_file_that_was_set_aside_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.1").write_bytes(entry(1, event="old") + b"\n")
    (tmp_path / "a.jsonl").write_bytes(entry(2, event="new") + b"\n")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no log")
    assert events(read(tmp_path)[0]) == ["old", "new"]


def test_an_endless_line_is_no_reason_to_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reading, "MAX_LINE_BYTES", 256)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 5000 + b"\n" + entry(1, event="after") + b"\n")
    found, broken = read(tmp_path)
    assert events(found) == ["after"]
    assert broken == 20


def test_a_long_log_is_streamed_and_not_held(tmp_path: Path) -> None:
    for process in "abcd":
        with (tmp_path / f"{process}.jsonl").open("wb") as file:
            file.writelines(entry(n * 0.01, process, number=n) + b"\n" for n in range(5_000))
    tracemalloc.start()
    found = log_reading.merged(log_reading.files(tmp_path), Broken())
    count = sum(1 for _ in found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 1_000_000


def wanted(line: bytes, **filters: Any) -> bool:
    found = log_reading.parse(line, "", Broken())
    assert found is not None
    return Filter(**filters).wants(found)


@pytest.mark.parametrize(
    ("filters", "is_wanted"),
    [
        ({}, True),
        ({"tasks": ("g000012.r3.t0",)}, True),
        ({"tasks": ("g000012.r3",)}, True),
        ({"tasks": ("g000012",)}, True),
        ({"tasks": ("g00001",)}, False),
        ({"tasks": ("g000012.r30",)}, False),
        ({"tasks": ("nothing", "g000012.r3")}, True),
        ({"processes": ("farm",)}, True),
        ({"processes": ("farm.1",)}, True),
        ({"processes": ("far",)}, False),
        ({"level": 30}, True),
        ({"level": 40}, False),
        ({"since": at(9)}, True),
        ({"since": at(11)}, False),
        ({"until": at(9)}, False),
        ({"tasks": ("g000012",), "processes": ("learner",)}, False),
    ],
)
def test_only_what_is_wanted_is_shown(filters: dict[str, Any], is_wanted: bool) -> None:
    line = entry(10, task_id="g000012.r3.t0", group_id="g000012", level="warning")
    assert wanted(line, **filters) is is_wanted


def test_a_group_is_found_by_lines_that_name_only_the_group() -> None:
    assert wanted(entry(1, group="g000012"), tasks=("g000012",))


def follower(folder: Path, broken: Broken | None = None) -> Follower:
    sizes = {path: log_reading.whole_size(path) for path in log_reading.files(folder)}
    return Follower(folder, sizes, broken or Broken())


def test_following_shows_what_is_added_once_and_new_files_from_their_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(entry(1, event="known") + b"\n")
    watched = follower(tmp_path)
    assert watched.new() == []
    with path.open("ab") as file:
        file.write(entry(3, event="added") + b"\n" + entry(4, event="half")[:30])
    (tmp_path / "b.jsonl").write_bytes(entry(2, event="other") + b"\n")
    assert events(watched.new()) == ["other", "added"]
    with path.open("ab") as file:
        file.write(entry(4, event="half")[30:] + b"\n")
    assert events(watched.new()) == ["half"]
    assert watched.new() == []
    watched.close()


def test_a_file_that_is_rotated_or_cut_short_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(entry(s, event=f"known{s}") + b"\n" for s in range(3)))
    watched = follower(tmp_path)
    with path.open("ab") as file:
        file.write(entry(4, event="last of the old") + b"\n")
    path.rename(tmp_path / "a.jsonl.1")
    path.write_bytes(entry(5, event="first of the new") + b"\n")
    assert events(watched.new()) == ["last of the old", "first of the new"]
    path.write_bytes(b"")
    assert watched.new() == []
    path.write_bytes(entry(6, event="after the cut") + b"\n")
    assert events(watched.new()) == ["after the cut"]
    watched.close()


def test_the_place_to_follow_from_is_the_end_of_the_last_whole_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_reading, "BLOCK", 7)
    path = tmp_path / "a.jsonl"
    for content, end in ((b"", 0), (b"no end", 0), (b"line\n", 5), (b"line\nhalf of the next one", 5)):
        path.write_bytes(content)
        assert log_reading.whole_size(path) == end


def test_the_last_errors_are_those_of_level_warning_and_above_with_their_reason(tmp_path: Path) -> None:
    known = entry(1, event="fine") + b"\n" + entry(2, event="odd", level="warning", cause="x") + b"\n"
    (tmp_path / "a.jsonl").write_bytes(known)
    errors = LastErrors(tmp_path)
    assert [(e.who, e.what) for e in errors.look()] == [("farm.1", "odd cause=x")]
    with (tmp_path / "a.jsonl").open("ab") as file:
        trace = "Traceback …\n  File …\nValueError: no"
        file.write(entry(3, event="failed", level="error", exception=trace) + b"\n")
    assert [e.what for e in errors.look()] == ["odd cause=x", "failed ValueError: no"]
    errors.close()


@pytest.mark.usefixtures("restored_logging")
def test_what_our_own_logger_writes_is_read_back(tmp_path: Path) -> None:
    logs.configure("learner.1", tmp_path, terminal=False)
    with logs.bound(task_id="g000012.r3.t0"):
        logs.get_logger().warning("odd", value=1)
    (line,) = log_reading.merged(log_reading.files(tmp_path / "logs"), Broken())
    assert Filter(tasks=("g000012.r3",), processes=("learner",), level=30).wants(line)
    assert line.at == line.event["timestamp"]
    assert all(line.event[key] for key in ("process", "pid", "event", "level", "timestamp"))


def test_merging_keeps_every_line(tmp_path: Path) -> None:
    stamps = itertools.cycle((3, 1, 2))
    for process in "ab":
        content = b"".join(entry(next(stamps), process, event=f"{process}{n}") + b"\n" for n in range(20))
        (tmp_path / f"{process}.jsonl").write_bytes(content)
    assert sorted(events(read(tmp_path)[0])) == sorted(f"{p}{n}" for p in "ab" for n in range(20))
