"""Whether an error says that a file could not grow: as Python, SQLite and the file systems tell it."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kbrl_async.durable import wants_room
from kbrl_async.errors import DiskFull, HostError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_the_systems_own_words_count(number: int) -> None:
    assert wants_room(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), ValueError("full"), HostError("no tool", "get one")])
def test_other_errors_do_not(error: Exception) -> None:
    assert not wants_room(error)


def test_it_is_seen_through_groups_causes_and_what_was_being_handled() -> None:
    assert wants_room(ExceptionGroup("several", [ValueError(), DiskFull("no space", "free some")]))
    explained = HostError("can't use the journal", "choose another folder")
    explained.__context__ = OSError(errno.ENOSPC, "no space")  # as `raise … from None` leaves it
    assert wants_room(explained)


def test_a_full_sqlite_file_counts(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x.sqlite")
    db.execute("PRAGMA max_page_count=2")
    db.execute("CREATE TABLE t (x)")
    with pytest.raises(sqlite3.OperationalError) as found:
        db.execute("INSERT INTO t VALUES (zeroblob(1000000))")
    db.close()
    assert wants_room(found.value)


SCRIPT = """
import resource, sqlite3, sys
from kbrl_async.durable import wants_room
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode=WAL")
db.execute("CREATE TABLE t (x)")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    db.execute("INSERT INTO t VALUES (zeroblob(1000000))")
except sqlite3.Error as error:
    sys.exit(0 if wants_room(error) else 1)
sys.exit(2)
"""


def test_a_sqlite_file_under_a_limit_counts_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "x.sqlite")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=60).returncode == 0


SCRIPT_OF_TEMPORARY_FILES = """
import resource, sys, tempfile
from kbrl_async.durable import wants_room
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    tempfile.gettempdir()
except FileNotFoundError as error:
    sys.exit(0 if wants_room(error) else 1)
sys.exit(2)
"""


@pytest.mark.parametrize(("why", "code"), [("full", 0), ("absent", 1)])
def test_temporary_folders_without_room_are_told_from_those_that_are_not_there(
    tmp_path: Path, why: str, code: int
) -> None:
    script = SCRIPT_OF_TEMPORARY_FILES
    if why == "absent":
        script = script.replace("tempfile.gettempdir()", "raise FileNotFoundError(2, 'No usable temporary directory')")
    command = [sys.executable, "-c", script, why]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    assert subprocess.run(command, env=environment, timeout=60).returncode == code
