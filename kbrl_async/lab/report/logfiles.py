"""What a run's log files say that no other file does: warnings, errors, and when each update was."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.lab.report.model import LogLine

MOST = 40
LOUD = ("warning", "error", "critical")
_KNOWN = frozenset({"process", "pid", "event", "level", "timestamp"})


class Logs(msgspec.Struct, frozen=True):
    """Times are epoch seconds."""

    loud: list[LogLine]
    """The newest warnings and errors."""
    loud_count: int
    updated: dict[int, tuple[float, float]]
    """By policy version: when the update began and ended."""
    facts: dict[str, str]
    began: float | None


def read_logs(folder: Path) -> Logs:
    """Lines that are torn, or not ours, are passed over."""
    loud: list[LogLine] = []
    updated: dict[int, tuple[float, float]] = {}
    facts: dict[str, str] = {}
    began = None
    for path in sorted(folder.glob("*.jsonl")):
        for line in _lines(path):
            at = line["at"]
            began = at if began is None else min(began, at)
            if line.get("level") in LOUD:
                loud.append(_loud(line))
            elif line.get("event") == "updated" and "policy_version" in line:
                updated[int(line["policy_version"])] = (at - float(line.get("seconds", 0.0)), at)
            elif line.get("event") == "ready":
                facts |= _facts(path.stem, line)
    loud.sort(key=lambda line: line.at)
    return Logs(loud[-MOST:], len(loud), updated, facts, began)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            try:
                line = msgspec.json.decode(raw, type=dict[str, Any])
                line["at"] = datetime.fromisoformat(line["timestamp"]).timestamp()
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                continue
            yield line


def _loud(line: dict[str, Any]) -> LogLine:
    detail = ", ".join(f"{key}={value}" for key, value in line.items() if key not in _KNOWN and key != "at")
    return LogLine(line["at"], str(line.get("process", "")), line["level"], str(line.get("event", "")), detail)


def _facts(process: str, line: dict[str, Any]) -> dict[str, str]:
    wanted = ("device", "isolation", "backends", "slots", "core", "cores")
    said = ", ".join(f"{key} {line[key]}" for key in wanted if line.get(key) not in (None, ""))
    return {process: said} if said else {}
