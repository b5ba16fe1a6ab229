"""How long the report of a large run takes: to make, and to open in a browser.

    python benchmarks/report.py [--rollouts 10000] [--repeats 3] [--keep FOLDER]

Makes an artificial run folder with the writers that runs use, runs `kbrl report` on it as a process, and opens the page
in headless Chromium, each time in a fresh profile. The same browser opening an empty page is the anchor. The last line
is JSON; `open_s` is what has to stay below 3: in a browser that runs, from the request to a loaded and painted page;
`open_main_thread_s` is the work in it, whatever else the machine does.
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
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests import artificial_run, browser  # noqa: E402 - found through the line above

PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


def opened(page: Path) -> tuple[float, float, int]:
    """Seconds until the page is loaded and painted, those of them that its main thread worked, and its elements."""
    with tempfile.TemporaryDirectory() as folder, browser.Browser(Path(folder)) as started:
        tab = started.open(page, domains=("Log", "Network", "Performance"))
        begin = time.monotonic()
        tab.evaluate(PAINTED)
        seconds = tab.load_s + time.monotonic() - begin
        assert tab.complaints() == [], tab.complaints()
        metrics = {metric["name"]: metric["value"] for metric in tab.ask("Performance.getMetrics")["metrics"]}
        return seconds, metrics["TaskDuration"], int(tab.evaluate("document.querySelectorAll('*').length"))


def report(run: Path, page: Path) -> float:
    """Seconds of `kbrl report`, the start of Python included."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "kbrl_async", "report", str(run), "--output", str(page)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=sys.stderr)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="leave the run folder and the page here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        run = artificial_run.make(folder / "large", args.rollouts, problems=args.problems)
        page, blank = folder / "report.html", folder / "blank.html"
        blank.write_text("<!DOCTYPE html><title>blank</title>")
        made = [report(run, page) for _ in range(args.repeats)]
        loads = [opened(page) for _ in range(args.repeats)]
        anchor = [opened(blank)[0] for _ in range(args.repeats)]
        size = page.stat().st_size
    machine = f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, load average {os.getloadavg()[0]:.1f}")
    result = {
        "benchmark": "report",
        "rollouts": args.rollouts,
        "problems": args.problems,
        "make_s": round(statistics.median(made), 2),
        "open_s": round(statistics.median(seconds for seconds, _, _ in loads), 3),
        "open_worst_s": round(max(seconds for seconds, _, _ in loads), 3),
        "open_main_thread_s": round(statistics.median(work for _, work, _ in loads), 3),
        "anchor_open_blank_s": round(statistics.median(anchor), 3),
        "megabytes": round(size / 1e6, 2),
        "elements": loads[0][2],
        "load_average": round(os.getloadavg()[0], 1),
        "is_within_3_s": max(seconds for seconds, _, _ in loads) <= 3.0,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
