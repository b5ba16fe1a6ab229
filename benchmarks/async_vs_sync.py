"""Updates an hour with overlap (S=2) against the synchronous baseline (S=0), same machine, same policy, in turn.

    python benchmarks/async_vs_sync.py [--steps 10] [--repeats 2] [processes.timing_bench=2 ...]

Each repeat runs both once, in alternating order. The last line is JSON: updates an hour, how busy each process was, and
the ratio. Overlap gains where processes have cores of their own and generating costs about what verifying does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LAGS = (0, 2)


def run(folder: Path, name: str, lag: int, steps: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """One whole run; returns its summary."""
    command = [sys.executable, "-m", "kbrl_async", "train", "--config", str(REPOSITORY / "configs" / "default.yaml")]
    overrides = [f"log_path={folder}", f"name={name}", f"max_staleness={lag}", f"max_steps={steps}", f"seed={seed}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [*command, *overrides, "max_minutes=null", "eval_samples=0", *settings],
        check=True,
        env=environment,
        stdout=sys.stderr,
    )
    loaded: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return loaded


def busy(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """Each process's share of the time at work, the median of the runs."""
    return {name: round(statistics.median(s["busy"][name] for s in summaries), 2) for name in summaries[0]["busy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="updates of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of both")
    args = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {lag: [] for lag in LAGS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for lag in LAGS if repeat % 2 == 0 else reversed(LAGS):
                found[lag].append(run(Path(folder), f"lag{lag}-{repeat}", lag, args.steps, repeat, args.settings))
    rate = {lag: statistics.median(s["updates_per_hour"] for s in found[lag]) for lag in LAGS}
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    report = {
        "benchmark": "async_vs_sync",
        "steps": args.steps,
        "repeats": args.repeats,
        "settings": args.settings,
        "cores": len(os.sched_getaffinity(0)),
        "updates_per_hour": {f"S={lag}": round(rate[lag], 1) for lag in LAGS},
        "busy": {f"S={lag}": busy(found[lag]) for lag in LAGS},
        "ratio": round(rate[2] / rate[0], 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
