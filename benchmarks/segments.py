"""One run in segments: stopped again and again as Ctrl-C does, continued by the same command, to its end; what it did.

    python -m benchmarks.segments --config configs/gpu.yaml --minutes 7.5 sampler.engine=vllm max_minutes=21

Prints a table of the updates and, as its last line, JSON: each segment, the rates between updates of one segment, how
busy each process was, the held-out problems before and after. `--updates N` stops after N updates instead, for runs
that are compared by their rate (max_staleness=0 beside 2). The anchor is the run's own first half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kbrl_async.runs.archive.archive import Archive, Update

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("reward_mean", "staleness_mean", "mismatch_kl", "ess", "entropy", "tokens_per_s")
HELDOUT = tuple(f"heldout_{what}_rate_{when}" for what in ("compile", "correct") for when in ("before", "after"))
STOP_S, LOOK_S = 60.0, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/gpu.yaml")
    parser.add_argument("--name", default="segments")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--minutes", type=float, default=7.5, help="of a segment")
    parser.add_argument("--updates", type=int, default=0, help="stop for good after so many; 0: at the run's own end")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    command = [sys.executable, "-m", "kbrl_async", "train", "--config", asked.config, f"name={asked.name}"]
    command += [f"log_path={asked.runs}", *asked.settings]
    folder, segments = asked.runs / asked.name, []
    while not segments or not is_over(folder, asked.updates):
        segments.append(segment(command, folder, 60 * asked.minutes, asked.updates))
        print(json.dumps(segments[-1]), flush=True)
        if segments[-1]["exit_code"] not in (0, 128 + signal.SIGINT, -signal.SIGINT):
            sys.exit(f"segment {len(segments)} failed; see {folder}")
    report(folder, segments, asked.settings)


def segment(command: list[str], folder: Path, seconds: float, updates: int) -> dict[str, Any]:
    """Runs until its end, its time or its last update; then Ctrl-C."""
    begun, before = time.time(), len(updates_of(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    while process.poll() is None and time.time() - begun < seconds and not is_over(folder, updates):
        time.sleep(LOOK_S)
    if process.poll() is None and not (folder / "summary.json").exists():
        process.send_signal(signal.SIGINT)
    code = process.wait(STOP_S if not (folder / "summary.json").exists() else None)
    made = len(updates_of(folder)) - before
    return {"begun": begun, "seconds": round(time.time() - begun, 1), "updates": made, "exit_code": code}


def is_over(folder: Path, updates: int) -> bool:
    return (folder / "summary.json").exists() or (0 < updates <= len(updates_of(folder)))


def updates_of(folder: Path) -> list[Update]:
    path = folder / "rollouts.sqlite"
    if not path.exists():
        return []
    with Archive(path) as archive:
        return archive.updates()


def rates_of(folder: Path) -> dict[str, tuple[float, float]]:
    """By batch: shares of its rollouts that compiled, and that were correct."""
    by_batch: dict[str, list[tuple[bool, bool]]] = {}
    with Archive(folder / "rollouts.sqlite") as archive:
        for row in archive.rows():
            if row.batch_id:
                by_batch.setdefault(row.batch_id, []).append((row.compiled, row.correct))
    return {name: tuple(map(statistics.fmean, zip(*rows, strict=True))) for name, rows in by_batch.items()}  # type: ignore[misc]


def report(folder: Path, segments: list[dict[str, Any]], settings: list[str]) -> None:
    updates = updates_of(folder)
    print("| update | seconds since the one before | compiled | correct | " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * (len(COLUMNS) + 4))
    gaps, rates = between(updates, [one["begun"] for one in segments]), rates_of(folder)
    for update, gap in zip(updates, [None, *gaps], strict=True):
        shares = [f"{share:.0%}" for share in rates.get(update.batch_id, ())] or ["–", "–"]
        shown = [f"{update.metrics[name]:.4g}" if name in update.metrics else "–" for name in COLUMNS]
        since = "–" if gap is None else f"{gap:.1f}"
        print("| " + " | ".join([str(update.version), since, *shares, *shown]) + " |")
    measured = [gap for gap in gaps if gap is not None]
    half = len(measured) // 2
    summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    document = {
        "benchmark": "segments",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "settings": settings,
        "segments": segments,
        "updates": len(updates),
        "seconds_between_updates": quartiles(measured),
        "updates_per_hour": round(3600 / statistics.fmean(measured), 1) if measured else None,
        "anchor_first_half": quartiles(measured[:half]),
        "second_half": quartiles(measured[half:]),
        "busy": {name: round(share, 3) for name, share in summary.get("busy", {}).items()},
        "heldout": {key: summary[key] for key in HELDOUT if key in summary},
    }
    print(json.dumps(document))


def between(updates: list[Update], begins: list[float]) -> list[float | None]:
    """Seconds from each update to the next; None where a segment began in between."""
    found: list[float | None] = []
    for earlier, later in itertools.pairwise(updates):
        is_cut = any(earlier.finished < begin < later.finished for begin in begins)
        found.append(None if is_cut else later.finished - earlier.finished)
    return found


def quartiles(values: list[float]) -> list[float]:
    """Three of them; fewer values as they are."""
    return [round(v, 2) for v in (statistics.quantiles(values, n=4) if len(values) > 2 else values)]


if __name__ == "__main__":
    main()
