"""Each event is one whole JSON line on disk and one readable line on the terminal, without secrets."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.runs.telemetry import logs

pytestmark = pytest.mark.usefixtures("restored_logging")


def lines(run_dir: Path, process: str = "sampler") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "logs" / f"{process}.jsonl").read_text().splitlines()]


def test_a_line_holds_the_event_its_values_and_its_process(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    logs.get_logger(part="engine").info("generated", tokens=12)
    (line,) = lines(tmp_path)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "process": "sampler", "pid": os.getpid(), "event": "generated", "level": "info", "tokens": 12, "part": "engine",
    }  # fmt: skip


def test_what_is_bound_is_in_every_line_below(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    log = logs.get_logger()
    with logs.bound(task_id="g1.r0.t0", group_id="g1", policy_version=3):
        log.info("inside")
    log.info("outside")
    inside, outside = lines(tmp_path)
    assert (inside["task_id"], inside["group_id"], inside["policy_version"]) == ("g1.r0.t0", "g1", 3)
    assert "task_id" not in outside


def test_lines_below_the_level_are_left_out(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, "warning", terminal=False)
    logs.get_logger().info("quiet")
    logs.get_logger().error("loud")
    assert [line["event"] for line in lines(tmp_path)] == ["loud"]


def test_secrets_are_blanked_at_any_depth_and_counts_of_tokens_are_not(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    secret = {"hf_token": "a", "headers": {"Authorization": "b"}, "peers": [{"private_key": "c"}], "db_password": "d"}
    logs.get_logger().info("start", api_key="e", tokens=7, token_ids=[1], monkey="f", **secret)
    (line,) = lines(tmp_path)
    assert line["hf_token"] == line["headers"]["Authorization"] == line["peers"][0]["private_key"] == logs.REDACTED
    assert line["db_password"] == line["api_key"] == logs.REDACTED
    assert (line["tokens"], line["token_ids"], line["monkey"]) == (7, [1], "f")


def test_an_exception_is_in_the_line(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get_logger().exception("failed")
    (line,) = lines(tmp_path)
    assert "ValueError: broken" in line["exception"]


def test_values_that_json_does_not_know_become_text(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    logs.get_logger().info("saved", path=tmp_path, odd=object)
    assert lines(tmp_path)[0]["path"] == str(tmp_path)


def test_text_that_is_no_unicode_is_still_logged(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    logs.get_logger().info("candidate", text="half \udc80", counts={(1, 2): 3})
    assert lines(tmp_path)[0]["text"] == "half \udc80"


def test_a_full_disk_fails_no_task(capsys: pytest.CaptureFixture[str]) -> None:
    full = logs.LogFile(Path("/dev/full"))
    full.write(b"line\n")
    assert capsys.readouterr().err == "log line not written: No space left on device\n"


def test_what_libraries_log_and_warn_arrives_too(tmp_path: Path) -> None:
    logs.configure("sampler", tmp_path, terminal=False)
    logging.getLogger("library").warning("mind %s", "this")
    logging.getLogger("library").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old way", stacklevel=1)
    library, warning = lines(tmp_path)
    assert (library["event"], library["logger"]) == ("mind this", "library")
    assert "old way" in warning["event"]


def test_the_terminal_shows_a_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("sampler", tmp_path)
    logs.get_logger().info("generated", tokens=12)
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.split() == ["[info]", "generated", "tokens=12"]


def test_colours_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert logs.wants_colour(sys.stderr)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not logs.wants_colour(sys.stderr)


def test_a_second_process_of_a_service_adds_to_the_same_file(tmp_path: Path) -> None:
    for event in ("nanny", "child"):
        logs.configure("sampler", tmp_path, terminal=False)
        logs.get_logger().info(event)
    assert [line["event"] for line in lines(tmp_path)] == ["nanny", "child"]


def test_no_line_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from kbrl_async.runs.telemetry import logs\n"
        "logs.configure('sampler', Path(sys.argv[1]), terminal=False); log = logs.get_logger()\n"
        "for number in range(100): log.info('line', number=number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["number"] for line in lines(tmp_path)] == list(range(100))


def test_telemetry_needs_no_torch() -> None:
    program = (
        "import sys; from kbrl_async.runs import summary\n"
        "from kbrl_async.runs.telemetry import logs, system_metrics, tensorboard, training_metrics\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_full_log_is_set_aside_and_who_still_writes_to_it_notices(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "broker.1.jsonl"
    one, other = logs.LogFile(path, 6400), logs.LogFile(path, 6400)
    line = b"x" * 99 + b"\n"
    for _ in range(400):
        one.write(line)
        other.write(line)
    kept = [path.with_name(path.name + ".1"), path]
    assert sorted(path.parent.iterdir()) == sorted(kept)
    assert all(file.stat().st_size <= 6400 * 1.1 for file in kept)
    assert all(set(file.read_bytes().splitlines(True)) == {line} for file in kept), "no line is torn"


def test_a_log_file_closes_though_the_interpreter_is_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python clears a module's names before it forgets its objects."""
    file = logs.LogFile(tmp_path / "x.jsonl")
    descriptor = file.fileno()
    with monkeypatch.context() as patch:
        patch.setattr(logs, "os", None)
        file.__del__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def on_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path, level: str = "info") -> str:
    logs.configure("learner", tmp_path, level)
    log = logs.get_logger()
    log.info("ready", port=5)
    log.info("update", policy_version=3, shown="update 3/14  reward 0.413")
    log.info("updated", seconds=2, shown="")
    log.warning("odd", shown=None)
    assert [line["event"] for line in lines(tmp_path, "learner")] == ["ready", "update", "updated", "odd"]
    assert not any("shown" in line for line in lines(tmp_path, "learner"))
    return capsys.readouterr().err


def test_above_a_status_line_only_what_is_about_the_run_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.STATUS_LINE, "1")
    first, second = on_terminal(capsys, tmp_path).splitlines()
    assert first == "» update 3/14  reward 0.413"
    assert "odd" in second


def test_elsewhere_events_are_whole_and_an_update_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(logs.STATUS_LINE, raising=False)
    shown = on_terminal(capsys, tmp_path)
    assert [line.split()[1] for line in shown.splitlines()] == ["ready", "update", "odd"]
    assert "policy_version=3" in shown
