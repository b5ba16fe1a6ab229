"""A run's archive as plain data: SQL for columns, msgpack for records; nothing of ours decodes it."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

IN_TIME = (
    "FROM rollouts r LEFT JOIN groups g ON g.group_id = r.group_id WHERE (g.clock IS NULL OR r.clock <= g.clock) "
    "AND (g.outcome IS NULL OR g.outcome <> 'trained' OR r.status <> 'ok' "
    "OR EXISTS (SELECT 1 FROM outcomes o WHERE o.task_id = r.task_id))"
)
"""A turn that was scored after its group had ended, or had gone on without it, is in the archive and counts nowhere."""


class LoggedAnswer(NamedTuple):
    """One scored turn."""

    key: int
    group: str
    rollout: str
    turn: int
    problem: str
    version: int
    reward: float
    fault: str
    compiled: bool
    correct: bool
    speedup: float | None
    lo: float | None
    hi: float | None
    disturbed: bool

    @property
    def fast(self) -> bool:
        return self.correct and self.speedup is not None and self.speedup > 1

    @property
    def proven(self) -> bool:
        return self.correct and self.lo is not None and self.lo > 1


class TurnRecord(NamedTuple):
    """What is read of a turn's record."""

    admitted: int
    flagged: bool
    has_kernel: bool
    source: str
    stages: list[tuple[str, str, float]]
    trust: str
    toolchain: str


class ArchivedTurns:
    """`rollouts.sqlite` as answers, and what became of their groups."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        columns = {found[1] for found in self.db.execute("PRAGMA table_info(rollouts)")}
        self._disturbed = "r.disturbed" if "disturbed" in columns else "0"
        self.records = {key: _recorded(packed) for key, packed in self.db.execute("SELECT id, frames FROM frames")}

    def count(self, question: str) -> Any:
        return self.db.execute(question).fetchone()[0]

    def answers(self, where: str) -> list[LoggedAnswer]:
        """Those that wrote a kernel, in the order of scoring."""
        found = self.db.execute(
            "SELECT r.id, r.group_id, r.rollout_id, r.turn, r.problem_id, r.policy_version, r.reward, r.fault, "
            f"r.compiled, r.correct, r.speedup, r.lo, r.hi, {self._disturbed} {IN_TIME} "
            f"AND r.status = 'ok' AND r.reward IS NOT NULL AND r.role <> 'verifier' AND {where} ORDER BY r.id"
        )
        return [LoggedAnswer(*row[:8], *map(bool, row[8:10]), *row[10:13], bool(row[13])) for row in found]  # type: ignore[call-arg] # columns


def _recorded(packed: bytes) -> TurnRecord:
    frames = [msgspec.msgpack.decode(frame) for frame in msgspec.msgpack.decode(zlib.decompress(packed))]
    request, generation = frames[0], frames[1] if len(frames) > 1 else {}
    stages = [(s["name"], s["fault"], s["seconds"]) for frame in frames[2:] for s in frame.get("stages", ())]
    kernel = (generation.get("candidate") or {}).get("source", "")
    flagged = bool(request["problem"].get("flags"))
    trust = next((str(frame["verdict"].get("trust", "")) for frame in frames[2:] if "verdict" in frame), "")
    toolchain = next((str(frame["toolchain"]) for frame in frames[2:] if frame.get("toolchain")), "")
    return TurnRecord(request.get("admitted_version", 0), flagged, bool(kernel), kernel, stages, trust, toolchain)
