"""Measurements of the bench against itself are kept as they end, and the next call goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.timing.resolution import Trial
from kbrl_async.lab.self_test import Trials

ONE = Trial(1.001, 0.99, 1.01, 0.05, 20, 0.1)


def filled(path: Path) -> Path:
    trials = Trials("a chip", path)
    trials.add("aa", "add", ONE)
    trials.add("ab", "1 %", ONE)
    return path


def test_the_next_call_finds_what_was_measured(tmp_path: Path) -> None:
    found = Trials("a chip", filled(tmp_path / "trials"))
    assert found.of("aa") == {"add": [ONE]}
    assert found.count("ab", "1 %") == 1


def test_files_of_equal_hosts_can_be_concatenated(tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_bytes(2 * filled(tmp_path / "one").read_bytes())
    assert Trials("a chip", both).count("aa", "add") == 2


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "trials")
    path.write_bytes(path.read_bytes()[:-9])
    found = Trials("a chip", path)
    assert found.count("ab", "1 %") == 0
    found.add("ab", "1 %", ONE)
    assert Trials("a chip", path).count("ab", "1 %") == 1


def test_measurements_of_other_hardware_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a chip"):
        Trials("another", filled(tmp_path / "trials"))


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("hello\nworld\n")
    with pytest.raises(UserError, match="notes:1"):
        Trials("a chip", path)


def test_time_is_over_after_the_minutes_asked_for() -> None:
    assert Trials("a chip", minutes=0).is_over
    assert not Trials("a chip").is_over
