"""What the broker is told at its start."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.kernels.settings import CompileFarm
from protocols.auth import PeerLimits
from protocols.ledger import LedgerOptions


class BrokerOptions(msgspec.Struct, frozen=True):
    run_dir: str
    submit_address: str
    work_address: str
    ledger: LedgerOptions = LedgerOptions()
    keys: str = ""
    """Folder of the broker's keys; needed for addresses that other hosts can reach, see `kbrl_async.keyring`."""
    store_max_bytes: int = CompileFarm().store_max_bytes
    """Size limit of the artifact store, as far as artifacts of other hosts fill it."""
    limits: PeerLimits = PeerLimits()
    """What one key may use."""
    max_connections: int = 4096
    """Keyed connections at once; the handshake of one more is refused."""
    metrics_s: float = 1.0
    drain_s: float = 2.0
    """How long workers get to hand in what they hold when the broker is stopped."""
    status_address: str = ""
    """Where viewers may ask how the system stands; empty: nowhere."""
    max_journal_pages: int = 0
    """Limit of the journal in pages of 4 KiB (I10); 0: the disk is the limit."""

    @property
    def journal_path(self) -> str:
        return str(Path(self.run_dir) / "broker.sqlite")

    @property
    def artifacts(self) -> Path:
        return Path(self.run_dir) / "artifacts"

    @property
    def policies(self) -> Path:
        return Path(self.run_dir) / "policies"

    @property
    def quarantine(self) -> Path:
        """Principals whose results were found wrong, a line each; delete a line to give one another chance."""
        return Path(self.run_dir) / "quarantined"

    @property
    def metrics_path(self) -> Path:
        return Path(self.run_dir) / "metrics" / "system.jsonl"
