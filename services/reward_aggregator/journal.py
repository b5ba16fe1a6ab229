"""The aggregator's memory: entries of the campaign, see `services.rollouts.journal`.

Invariant: rollouts of ended groups keep no tokens, so the file stays small however long the run is (I10).
"""

from __future__ import annotations

from pathlib import Path

from services.reward_aggregator.campaign import Entry, group_of, without_tokens
from services.rollouts.journal import EntryJournal


class Journal(EntryJournal[Entry]):
    """`with Journal(path) as journal: …`"""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Entry, group_of, without_tokens)
