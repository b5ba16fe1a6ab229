"""What two workers each made of one task, until it is settled; and what is held against them.

A restart forgets opinions: such tasks are done again. Who is quarantined stays so, in a file of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from protocols import events as ev
from protocols import opinions
from protocols.drift import Drift
from protocols.second_opinions import CHECKED

log = structlog.get_logger()


class Opinions:
    """Frames by task, in the order in which workers were asked. `quarantine`: the file of whom others contradict."""

    def __init__(self, quarantine: Path, tolerance: float) -> None:
        self._file, self._tolerance = quarantine, tolerance
        self._held: dict[str, list[list[bytes]]] = {}
        self.drift = Drift()

    def __len__(self) -> int:
        """Tasks whose opinions are held."""
        return len(self._held)

    def put(self, task_id: str, place: int, frames: list[bytes]) -> None:
        self._held[task_id] = [*self._held.get(task_id, [])[:place], frames]

    def of(self, task_id: str, place: int) -> list[bytes]:
        return self._held[task_id][place]

    def agreeing(self, task_id: str) -> list[tuple[int, int]]:
        """See `protocols.opinions.agreeing`."""
        return opinions.agreeing(self._held.get(task_id, []), self._tolerance)

    def drifting(self, task_id: str, names: Sequence[str]) -> list[tuple[str, str]]:
        """Two benches have timed one candidate: who now is told to drift from whom, and how far."""
        found = opinions.timings(self._held.get(task_id, []))
        if len(found) != len(names) or (mine := found[-1]) is None:
            return []
        for name, timing in zip(names[:-1], found[:-1], strict=True):
            if timing is not None and timing.hardware == mine.hardware:
                self.drift.add(name, names[-1], timing, mine)
        news = self.drift.news()
        for who, what in news:
            log.warning("benches drift apart", bench=who, what=what)
        return news

    def settled_by(self, action: ev.Action) -> None:
        """Forgets what nobody will ask for any more."""
        if isinstance(action, ev.Forget):
            self._held.pop(action.task_id, None)
        elif isinstance(action, ev.Append | ev.Finish) or (
            isinstance(action, ev.Update) and action.row.stage not in CHECKED
        ):
            self._held.pop(action.row.task_id, None)

    def quarantined(self) -> set[str]:
        return set(self._file.read_text(encoding="utf-8").split()) if self._file.exists() else set()

    def quarantine(self, principal: str) -> None:
        log.error("quarantined a worker: others find otherwise", principal=principal)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{principal}\n")
