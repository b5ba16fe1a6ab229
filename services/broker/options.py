"""What the broker is told at its start."""

from __future__ import annotations

from pathlib import Path

import msgspec

from protocols.ledger import LedgerOptions

IN_MEMORY = ":memory:"


class BrokerOptions(msgspec.Struct, frozen=True):
    run_dir: str
    submit_address: str
    work_address: str
    journal: str = ""
    """Path of the SQLite file; empty: `<run_dir>/broker.sqlite`; `:memory:`: nothing survives (benchmarks)."""
    ledger: LedgerOptions = LedgerOptions()
    allow_remote: bool = False
    """Bind addresses that other hosts can reach."""
    metrics_s: float = 1.0
    drain_s: float = 2.0
    """How long workers get to hand in what they hold when the broker is stopped."""
    max_journal_pages: int = 0
    """Limit of the journal in pages of 4 KiB (I10); 0: the disk is the limit."""

    @property
    def journal_path(self) -> str:
        return self.journal or str(Path(self.run_dir) / "broker.sqlite")

    @property
    def metrics_path(self) -> Path:
        return Path(self.run_dir) / "metrics" / "system.jsonl"
