"""A hundred random faults over one run of the default machine, for each of several seeds: does anything get lost?

    python benchmarks/chaos.py [--seeds 1,2,3] [--faults 100] [--every 4] [--untimed] [key=value …]

The run is the default one, but ends by time, after its faults. Prints a line for each fault and check, one JSON line
last; ends with 1 where a check failed. The anchor is the same run's own count: what was admitted, against what ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kbrl_async.lab.chaos.driver import LOAD_PAUSE_S

SPARE_MINUTES = 2.0
"""The run goes on for so long after its last fault, and then ends by its time limit."""
UNTIMED = (
    "timing_bench.timed=false",
    "reward.preset=stage2",
    "reward.speed_weight=0",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--every", type=float, default=4.0)
    parser.add_argument("--untimed", action="store_true", help="check kernels, do not time them: for a loaded machine")
    args, overrides = parser.parse_known_args()
    results = {seed: one(int(seed), args, overrides) for seed in args.seeds.split(",")}
    ok = all(result["ok"] for result in results.values())
    print(json.dumps({"benchmark": "chaos", "ok": ok, "faults": args.faults, "machine": machine(), "seeds": results}))
    return 0 if ok else 1


def one(seed: int, args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    words = ["--train", "--random", str(args.faults), "--seed", str(seed), "--every", str(args.every), "--json"]
    minutes = args.faults * args.every / 60 + SPARE_MINUTES
    settings = ["max_steps=1000", f"max_minutes={minutes:.1f}", f"name=chaos-{seed}"]
    settings += UNTIMED if args.untimed else ()
    command = [sys.executable, "-m", "kbrl_async", "chaos", *words, *settings, *overrides]
    root = str(Path(__file__).resolve().parent.parent)
    began = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}, check=False
    )
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"ok": False, "exit": done.returncode, "says": done.stdout[-500:]}
    for check in report["checks"]:
        print("ok " if check["ok"] else "OFF", check["name"], "-", check["says"], flush=True)
    return summed_up(report, time.monotonic() - began)


def summed_up(report: dict[str, Any], took_s: float) -> dict[str, Any]:
    faults = report["faults"]
    happened = [fault for fault in faults if fault.get("began_s", -1) >= 0 and "failed" not in fault]
    kinds: dict[str, int] = {}
    for fault in happened:
        kinds[fault["fault"]["kind"]] = kinds.get(fault["fault"]["kind"], 0) + 1
    killed = [fault for fault in faults if fault.get("working_s") is not None]
    back = sorted(fault["working_s"] for fault in killed if fault["pause_s"] <= LOAD_PAUSE_S)
    return {
        "ok": report.get("ok", False),
        "done": len(happened),
        "by_kind": kinds,
        "starts": report.get("starts", 1),
        "broker_back_s": {"count": len(back), "median": back[len(back) // 2], "max": back[-1]} if back else {},
        "broker_back_without_load_s": sorted(f["working_s"] for f in killed if f["pause_s"] > LOAD_PAUSE_S),
        "off": [f"{check['name']}: {check['says']}" for check in report["checks"] if not check["ok"]],
        "says": {check["name"]: check["says"] for check in report["checks"]},
        "took_s": round(took_s, 1),
    }


def machine() -> dict[str, Any]:
    return {"cores": len(os.sched_getaffinity(0)), "load_1min": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    sys.exit(main())
