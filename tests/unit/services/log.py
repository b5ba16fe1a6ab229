"""Stands in for the logger of a service, and remembers what it was told."""

from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
    level: str
    event: str
    facts: dict[str, Any]


class Log:
    def __init__(self) -> None:
        self.lines: list[Line] = []

    def at(self, level: str) -> list[Line]:
        return [line for line in self.lines if line.level == level]

    def debug(self, event: str, **facts: Any) -> None:
        self.lines.append(Line("debug", event, facts))

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append(Line("info", event, facts))

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append(Line("warning", event, facts))

    def error(self, event: str, **facts: Any) -> None:
        self.lines.append(Line("error", event, facts))
