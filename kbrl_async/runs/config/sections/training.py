"""What is learned, from what, and what training does when it goes wrong."""

from __future__ import annotations

import msgspec

from kbrl_async.runs.config.ranges import AtLeastOne


class Demonstrations(msgspec.Struct, frozen=True, kw_only=True):
    """What method=sft learns from."""

    files: list[str] = msgspec.field(default_factory=list)
    """JSONL, JSON and Parquet files, folders of them, run folders; empty: right answers of the own corpus."""
    keep: AtLeastOne = 3
    """Run folders: best different verified answers of each problem that are taken."""
    examples: AtLeastOne = 4096
    """Without files: pairs of problem and right answer that the corpus holds."""
