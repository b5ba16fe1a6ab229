"""Updates an hour with overlap (S=2) against the synchronous baseline (S=0), same machine, same policy, in turn.

    python -m benchmarks.async_vs_sync [--steps 10] [--repeats 2] [--step-ms 300] [processes.timing_bench=2 ...]

Each repeat runs both once, in alternating order. The last line is JSON: updates an hour, how busy each process was, and
the ratio. Overlap gains where processes have cores of their own and generating costs about what verifying does: with
`--step-ms` a token of all answers under way takes so long, as a larger model's does (`paced_sampler`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.paced_sampler import STEP_MS
from kbrl_async.cli.launch import gave_up, python_module, python_service, start_and_wait
from kbrl_async.runs.config import load, process_counts
from kbrl_async.runs.folder import SUMMARY_FILE, is_finished, prepare

REPOSITORY = Path(__file__).resolve().parent.parent
LAGS = (0, 2)


def run(folder: Path, name: str, lag: int, steps: int, seed: int, settings: list[str]) -> dict[str, Any]:
    """One whole run; returns its summary."""
    own = [f"log_path={folder}", f"name={name}", f"max_staleness={lag}", f"max_steps={steps}", f"seed={seed}"]
    defaults = [REPOSITORY / "configs" / "default.yaml"]
    config = load(defaults, [*own, "max_minutes=null", "eval_samples=0", *settings])
    made = prepare(config).path
    ended = start_and_wait(made, process_counts(config), command=service, output=sys.stderr)
    if not is_finished(made):
        raise gave_up(ended, "run", f"See {made / 'logs'}")
    loaded: dict[str, Any] = json.loads((made / SUMMARY_FILE).read_text())
    return loaded


def service(name: str) -> str:
    """The command of a service: the sampler's is paced where that was asked for."""
    is_paced = name == "sampler" and STEP_MS in os.environ
    return python_module("benchmarks.paced_sampler") if is_paced else python_service(name)


def busy(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """Each process's share of the time at work, the median of the runs."""
    return {name: round(statistics.median(s["busy"][name] for s in summaries), 2) for name in summaries[0]["busy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="updates of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--step-ms", type=float, help="least time of a decode step; default: what it takes")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of both")
    args = parser.parse_args()
    if args.step_ms is not None:
        os.environ[STEP_MS] = str(args.step_ms)
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
        "step_ms": args.step_ms,
        "settings": args.settings,
        "cores": len(os.sched_getaffinity(0)),
        "updates_per_hour": {f"S={lag}": round(rate[lag], 1) for lag in LAGS},
        "busy": {f"S={lag}": busy(found[lag]) for lag in LAGS},
        "ratio": round(rate[2] / rate[0], 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
