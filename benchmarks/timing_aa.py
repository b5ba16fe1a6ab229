"""A reference against itself, and against itself slowed by known amounts: what does this host's bench claim? One JSON
line last. The anchor of the same run are other methods on the same kernels.

Usage: `python benchmarks/timing_aa.py [--pairs N] [--ab] [--device cpu|cuda:0] [--core N] [--cap S]
[--resolution PERCENT] [--trials FILE] [--minutes M]`

`kbrl bench --aa` shows the same as tables and keeps it for the rewards of this host.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import msgspec
from rich.console import Console

from kbrl_async.cli import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--ab", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--core", type=int)
    parser.add_argument("--cap", type=float)
    parser.add_argument("--resolution", type=float, help="percent of half width to stop at; as in training: 3")
    parser.add_argument("--no-beside", action="store_true")
    parser.add_argument("--trials", type=Path, help="keep each measurement there, and go on from it")
    parser.add_argument("--minutes", type=float, help="stop measuring after so long")
    asked = parser.parse_args()
    asked.aa, asked.beside = True, not asked.no_beside
    begin = time.monotonic()
    report = bench.measured_report(asked, Console(stderr=True))
    bench.show_report(report, Console())
    rows = [*report.rows, *report.truths]
    summary = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {report.hardware}",
        "load": round(report.load, 3),
        "pairs": sum(row.runs for row in report.rows),
        "false_faster": report.false_faster,
        "covered_ab": {row.case: row.covered for row in report.truths},
        "seconds_per_decision": {row.case: round(row.seconds, 4) for row in rows},
        "worst_error": {row.case: round(row.worst_error, 5) for row in rows},
        "anchor_worst_error": {row.case: row.methods for row in report.rows if row.methods},
        "wall_s": round(time.monotonic() - begin, 1),
    }
    print(msgspec.json.encode(summary).decode())


if __name__ == "__main__":
    main()
