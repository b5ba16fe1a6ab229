"""The archive of scored turns: how fast turns go in, what they take on disk, and how long a report waits for all rows.

    python benchmarks/archive.py [--rows 10000] [--tokens 512]

The anchor is the same records through plain SQLite in one thread, one commit each, uncompressed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from kbrl_async.runs.archive.archive import Archive, ArchiveWriter, make_row
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    Timing,
    Verdict,
)
from protocols.rollout import Record


def record(task_id: str, tokens: int, rng: random.Random) -> Record:
    text = "".join(
        rng.choice(["for (long i = 0; i < n; i++) ", "out[i] = v; ", "float v = a[i]; ", "\n"]) for _ in range(60)
    )
    ids = [rng.randrange(32_000) for _ in range(tokens)]
    problem = Problem("L1/07_relu", 1, "relu", text)
    return Record.of(
        RolloutRequest(task_id, task_id[:7], problem, text, "c", SamplingParams(tokens)),
        Generation(1, ids, ids, [rng.uniform(-4, 0) for _ in ids], text, "stop", Candidate(text, "c")),
        BuildReport(Fault.OK),
        BenchReport(Verdict(Fault.OK, 10, 10), Timing(9, 1.5, 1.4, 1.6, 2.0, 3.0)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    rng = random.Random(0)
    made = [record(f"g{i // 8:06d}.r{i % 8}", args.tokens, rng) for i in range(200)]
    encoded = [one.encode() for one in made]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "a.sqlite"
        handed, started = [], time.perf_counter()
        with ArchiveWriter(path) as archive:
            for i in range(args.rows):
                before = time.perf_counter()
                name = f"g{i // 8:06d}.r{i % 8}"
                row = make_row(name, made[i % 200], at=float(i), reward=0.5)
                archive.add(row, encoded[i % 200])
                handed.append(time.perf_counter() - before)
        written_s = time.perf_counter() - started
        with Archive(path) as reader:
            started = time.perf_counter()
            count = sum(1 for _ in reader.rows())
            read_s = time.perf_counter() - started
            started = time.perf_counter()
            for i in range(0, args.rows, max(1, args.rows // 100)):
                reader.record(f"g{i // 8:06d}.r{i % 8}")
            record_ms = (time.perf_counter() - started) * 10
        size = path.stat().st_size
        anchor = anchor_rows_per_s(Path(scratch) / "anchor.sqlite", encoded, min(2000, args.rows))
    print(
        json.dumps(
            {
                "benchmark": "archive",
                "machine": f"{platform.machine()} × {os.cpu_count()}, load {os.getloadavg()[0]:.1f}",
                "rows": count,
                "tokens_per_row": args.tokens,
                "rows_per_s": round(args.rows / written_s),
                "anchor_rows_per_s": round(anchor),
                "add_us_median": round(statistics.median(handed) * 1e6, 1),
                "add_us_p99": round(statistics.quantiles(handed, n=100)[98] * 1e6, 1),
                "bytes_per_row": round(size / args.rows),
                "all_rows_s": round(read_s, 3),
                "one_record_ms": round(record_ms, 3),
            }
        )
    )


def anchor_rows_per_s(path: Path, encoded: list[list[bytes]], rows: int) -> float:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, frames BLOB)")
    started = time.perf_counter()
    for i in range(rows):
        db.execute("INSERT INTO t VALUES (?, ?)", (i, msgspec.msgpack.encode(encoded[i % 200])))
    elapsed = time.perf_counter() - started
    db.close()
    return rows / elapsed


if __name__ == "__main__":
    main()
