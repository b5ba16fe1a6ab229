"""A whole run: in segments, under faults, for an hour; and what keeping and looking at it costs.

`python -m benchmarks.runs COMMAND`
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated

from benchmarks.harness import (
    CORRECT_ONLY,
    Commands,
    Result,
    environment,
    kbrl_command,
    markdown,
    rows_of,
    say,
    summary_of,
    updates_of,
)  # fmt: skip
from benchmarks.runs import soak, viewing
from kbrl_async.lab.chaos.driver import LOAD_PAUSE_S
from kbrl_async.runs.archive.archive import UpdateRow

commands = Commands("runs", __doc__)
commands(soak.soak)
commands(viewing.report)
commands(viewing.top)


# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = ("reward_mean", "staleness_mean", "mismatch_kl", "ess", "entropy", "tokens_per_s")
HELDOUT = tuple(f"heldout_{what}_rate_{when}" for what in ("compile", "correct") for when in ("before", "after"))
STOP_S, LOOK_S = 60.0, 1.0


@commands
def segments(
    *settings: str,
    config: str = "configs/gpu.yaml",
    name: str = "segments",
    runs: Path = Path("runs"),
    minutes: Annotated[float, "of a segment"] = 7.5,
    updates: Annotated[int, "stop for good after so many; 0: at the run's own end"] = 0,
) -> Result:
    """One run in segments: stopped again and again as Ctrl-C does, continued by the same command, to its end.

    Prints a table of the updates; the result has each segment, the rates between updates of one segment, how busy each
    process was, the held-out problems before and after. --updates is for runs that are compared by their rate
    (max_staleness=0 beside 2). The anchor is the run's own first half.
    """
    words = kbrl_command("train", "--config", config, f"name={name}", f"log_path={runs}", *settings)
    folder, made = runs / name, list[Result]()
    while not made or not _is_over(folder, updates):
        made.append(_segment(words, folder, 60 * minutes, updates))
        say(made[-1])
        if made[-1]["exit_code"] not in (0, 128 + signal.SIGINT, -signal.SIGINT):
            sys.exit(f"segment {len(made)} failed; see {folder}")
    found, summary = updates_of(folder), summary_of(folder)
    gaps = _between(found, [one["begun"] for one in made])
    print(_table(found, gaps, folder))
    measured = [gap for gap in gaps if gap is not None]
    half = len(measured) // 2
    return {
        "settings": settings,
        "segments": made,
        "updates": len(found),
        "seconds_between_updates": _quartiles(measured),
        "updates_per_hour": 3600 / fmean(measured) if measured else None,
        "anchor_first_half": _quartiles(measured[:half]),
        "second_half": _quartiles(measured[half:]),
        "busy": summary.get("busy", {}),
        "heldout": {key: summary[key] for key in HELDOUT if key in summary},
    }


def _segment(words: list[str], folder: Path, seconds: float, updates: int) -> Result:
    """Runs until its end, its time or its last update; then Ctrl-C."""
    begun, before = time.time(), len(updates_of(folder))
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": environment()["PYTHONPATH"]}, stdout=sys.stderr)
    while process.poll() is None and time.time() - begun < seconds and not _is_over(folder, updates):
        time.sleep(LOOK_S)
    is_ending = bool(summary_of(folder))
    if process.poll() is None and not is_ending:
        process.send_signal(signal.SIGINT)
    code = process.wait(None if is_ending else STOP_S)
    made = len(updates_of(folder)) - before
    return {"begun": begun, "seconds": time.time() - begun, "updates": made, "exit_code": code}


def _is_over(folder: Path, updates: int) -> bool:
    return bool(summary_of(folder)) or (0 < updates <= len(updates_of(folder)))


def _between(updates: list[UpdateRow], begins: list[float]) -> list[float | None]:
    """Seconds from each update to the next; None where a segment began in between."""
    found: list[float | None] = []
    for earlier, later in itertools.pairwise(updates):
        is_cut = any(earlier.finished < begin < later.finished for begin in begins)
        found.append(None if is_cut else later.finished - earlier.finished)
    return found


def _quartiles(values: list[float]) -> list[float]:
    """Three of them; fewer values as they are."""
    return quantiles(values, n=4) if len(values) > 2 else values


def _table(updates: list[UpdateRow], gaps: list[float | None], folder: Path) -> str:
    by_batch: dict[str, list[tuple[bool, bool]]] = {}
    for row in rows_of(folder):
        by_batch.setdefault(row.batch_id, []).append((row.compiled, row.correct))
    rows = []
    for update, gap in zip(updates, [None, *gaps], strict=True):
        answers = by_batch.get(update.batch_id, [])
        shares = [f"{fmean(column):.0%}" for column in zip(*answers, strict=True)] or ["–", "–"]
        shown = [f"{update.metrics[name]:.4g}" if name in update.metrics else "–" for name in COLUMNS]
        rows.append([str(update.version), "–" if gap is None else f"{gap:.1f}", *shares, *shown])
    return markdown(["update", "seconds since the one before", "compiled", "correct", *COLUMNS], rows)


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────

SPARE_MINUTES = 2.0
"""The run goes on for so long after its last fault, and then ends by its time limit."""


@commands
def chaos(
    *overrides: str,
    seeds: tuple[int, ...] = (1, 2, 3),
    faults: int = 100,
    every: Annotated[float, "seconds, on average"] = 4.0,
    untimed: Annotated[bool, "check kernels, do not time them: for a loaded machine"] = False,
) -> Result:
    """A hundred random faults over one run of the default machine, for each of several seeds: does anything get lost?

    The run is the default one, but ends by time, after its faults. The anchor is the same run's own count: what was
    admitted, against what ended.
    """
    results = {}
    for seed in seeds:
        words = ["--train", "--random", faults, "--seed", seed, "--every", every, "--json", f"name=chaos-{seed}"]
        words += ["max_steps=1000", f"max_minutes={faults * every / 60 + SPARE_MINUTES:.1f}"]
        words += [*(CORRECT_ONLY if untimed else ()), *overrides]
        done = subprocess.run(kbrl_command("chaos", *words), stdout=subprocess.PIPE, text=True, env=environment())
        try:
            results[seed] = _summed_up(json.loads(done.stdout))
        except json.JSONDecodeError:
            results[seed] = {"ok": False, "exit": done.returncode, "says": done.stdout[-500:]}
        say(seed, results[seed])
    return {"ok": all(result["ok"] for result in results.values()), "faults": faults, "seeds": results}


def _summed_up(report: Result) -> Result:
    faults = report["faults"]
    happened = [fault for fault in faults if fault.get("began_s", -1) >= 0 and "failed" not in fault]
    killed = [fault for fault in faults if fault.get("working_s") is not None]
    back = sorted(fault["working_s"] for fault in killed if fault["pause_s"] <= LOAD_PAUSE_S)
    return {
        "ok": report.get("ok", False),
        "done": len(happened),
        "by_kind": Counter(fault["fault"]["kind"] for fault in happened),
        "starts": report.get("starts", 1),
        "broker_back_s": {"count": len(back), "median": back[len(back) // 2], "max": back[-1]} if back else {},
        "broker_back_without_load_s": sorted(f["working_s"] for f in killed if f["pause_s"] > LOAD_PAUSE_S),
        "off": [f"{check['name']}: {check['says']}" for check in report["checks"] if not check["ok"]],
        "says": {check["name"]: check["says"] for check in report["checks"]},
    }


if __name__ == "__main__":
    commands.main()
