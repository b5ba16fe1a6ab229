"""The aggregator's memory: the campaign's state and the entries after it, see `services.rollouts.journal`.

Invariant: it is as large as what is open, however long the run is (I10). Rollouts of ended groups keep no tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.rollouts.buffer.events import Admitted, Closed, Lost, Scored, Swept
from kbrl_async.runs.telemetry.by_version import Answers, Tally
from services.reward_aggregator.run_state import (
    CampaignState,
    Entry,
    RolloutEnded,
    RunState,
    group_of,
    is_evaluation,
    without_tokens,
)
from services.rollouts.journal import MIN_BYTES, EntryJournal
from services.rollouts.trajectories import TurnTaken

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CampaignState).decode


class Journal(EntryJournal[Entry]):
    """`with Journal(path) as journal: …`"""

    def __init__(self, path: Path, min_bytes: int = MIN_BYTES) -> None:
        super().__init__(path, Entry, group_of, without_tokens, min_bytes)

    def load(self, campaign: RunState) -> list[Closed]:
        """Makes a new campaign what it was; returns the groups that ended lately, of which the archive may not know."""
        state = self.state()
        if state is not None:
            campaign.restore(_decode(state))
        for entry in self.entries():
            campaign.apply(entry)
        return list(campaign.ended_lately)

    def compact_if_due(self, campaign: RunState) -> None:
        """Where all that `campaign` has applied was appended."""
        if self.is_due:
            self.compact(_encode(campaign.state()))

    def answers(self) -> Answers:
        """The numbers of all training rollouts, turn by turn, and which of their groups lack some."""
        tally = Tally()
        for entry in self.history():
            match entry:
                case Admitted():
                    tally.admitted(entry.group_id, entry.rollouts, entry.version)
                case RolloutEnded() | TurnTaken() if not is_evaluation(entry.group_id):
                    tally.answered(entry.group_id, entry.stats)
                case Scored():
                    tally.ended(entry.group_id)
                case Lost():
                    tally.ended(entry.group_id, entry.reason)
                case Swept():
                    tally.swept(entry.group_ids)
        return tally.answers()
