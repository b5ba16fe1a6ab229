"""SQLite files under observation: the connections that a journal makes, and how large its file is."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest


def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Those that are made from now on."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*given: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*given, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    return made


def pages(db: sqlite3.Connection) -> int:
    """Of its file."""
    return int(db.execute("PRAGMA page_count").fetchone()[0])
