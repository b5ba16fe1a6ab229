"""The aggregator's memory: the run's state and the commands after it, see `runs.archive.journal`.

Invariant: it is as large as what is open, however long the run is (I10). Rollouts of ended groups keep no tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.rollouts.buffer.events import Closed
from kbrl_async.runs.archive.journal import MIN_BYTES, EntryJournal
from kbrl_async.runs.commands import Command, group_of, without_tokens
from kbrl_async.runs.run_memory import RunSnapshot
from kbrl_async.runs.run_state import RunState
from kbrl_async.runs.settling import note
from kbrl_async.runs.telemetry.by_version import Answers, Tally

FILE = "aggregator.sqlite"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunSnapshot).decode


class RunJournal(EntryJournal[Command]):
    """`with RunJournal(path) as journal: …`"""

    def __init__(self, path: Path, min_bytes: int = MIN_BYTES) -> None:
        super().__init__(path, Command, group_of, without_tokens, min_bytes)

    def load(self, state: RunState) -> list[Closed]:
        """Makes a new state what it was; returns the groups that ended lately, of which the archive may not know."""
        snapshot = self.state()
        if snapshot is not None:
            state.restore(_decode(snapshot))
        for command in self.entries():
            state.do(command)
        return list(state.ended_lately)

    def compact_if_due(self, state: RunState) -> None:
        """Where all that `state` has done was appended."""
        if self.is_due:
            self.compact(_encode(state.snapshot()))

    def answers(self) -> Answers:
        """The numbers of all training rollouts, turn by turn, and which of their groups lack some."""
        tally = Tally()
        for entry in self.history():
            note(tally, entry)
        return tally.answers()
