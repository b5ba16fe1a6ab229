"""What does each method of training bring? Every method from the same policy, on level 2, with as many rollouts.

    python benchmarks/methods.py --folder fusion --seeds 0,1,2 [--jobs 8] [--write]

Runs `configs/fusion_*.yaml` for each seed, evaluates each result and the policy that they began with alike (`kbrl
eval`, all problems of the level, correctness only, so that a busy machine changes nothing but the time it takes), and
gives each method's gain with a bootstrap interval over problems. The anchor is that first policy. `--jobs N` runs N
arms beside each other, each on cores of its own; `--write` puts table and chart into docs/methods.md. Continues where
it was stopped; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.report import plots
from kbrl_async.runs import origins
from kbrl_async.runs.archive.archive import Archive
from kbrl_async.runs.config import load

ROOT = Path(__file__).parent.parent
METHODS = ("grpo", "reinforce", "best_of_n", "reward_weighted_sft", "sft")
START = "start"
"""The policy before any training."""
LEVEL = 2
SPLITS = {"train": "training problems", "heldout": "held-out problems"}
PAGE, PICTURE = ROOT / "docs" / "methods.md", ROOT / "docs" / "pictures" / "methods.svg"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"

Outcome = dict[str, list[bool]]
"""By problem: whether each answer was correct."""


class Cores:
    """Lends sets of cores, one to each job."""

    def __init__(self, jobs: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        size = max(1, len(cores) // jobs)
        self._free: queue.Queue[list[int]] = queue.Queue()
        for job in range(jobs):
            self._free.put(cores[job * size : (job + 1) * size] or cores)
        self.each = size

    def kbrl(self, log: Path, *words: str) -> None:
        """Runs a command on cores of its own; what it prints goes to `log`.

        :raises RuntimeError: it failed.
        """
        mine = self._free.get()
        try:
            environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(mine) - 1))}
            with log.open("ab") as file:
                done = subprocess.run(
                    [sys.executable, "-m", "kbrl_async", *words],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    preexec_fn=lambda: os.sched_setaffinity(0, mine),
                    check=False,
                )
        finally:
            self._free.put(mine)
        if done.returncode:
            raise RuntimeError(f"kbrl {words[0]} ended with {done.returncode}; see {log}")


class Study:
    def __init__(self, folder: Path, samples: int, jobs: int) -> None:
        self.folder, self._samples, self._cores = folder, samples, Cores(jobs)
        self._where = [f"log_path={folder}", f"cache_path={folder / 'cache'}"]
        (folder / "printed").mkdir(parents=True, exist_ok=True)

    def make_policy(self) -> None:
        shown = [-1]

        def told(what: str, share: float) -> None:
            if int(share * 10) > shown[0]:
                shown[0] = int(share * 10)
                print(f"{what} ({share:.0%})", file=sys.stderr, flush=True)

        origins.base_model(load([config_of("grpo")], self._where), told)

    def arm(self, method: str, seed: int) -> Outcome:
        """Trains (unless that is done) and evaluates."""
        run, began = self.folder / f"{method}-{seed}", time.monotonic()
        log = self.folder / "printed" / f"{run.name}.log"
        if method != START and not (run / "summary.json").exists():
            self._cores.kbrl(
                log, "train", "--config", str(config_of(method)), *self._where, f"seed={seed}", f"name={run.name}"
            )
        found = self.folder / "evals" / run.name
        if not (found / "evaluation.json").exists():
            what = "small" if method == START else str(run)
            self._cores.kbrl(
                log, "eval", what, "--config", str(config_of("grpo")), "--level", str(LEVEL),
                "--samples", str(self._samples), *self._where, f"seed={1000 + seed}", f"name={run.name}",
            )  # fmt: skip
        outcome = read(found)
        shares = {split: round(share(outcome, problems), 3) for split, problems in splits().items()}
        print(f"{run.name}: {shares}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return outcome


def config_of(method: str) -> Path:
    return ROOT / "configs" / f"fusion_{method}.yaml"


def splits() -> dict[str, list[str]]:
    return {split: sorted(p.problem_id for p in load_suite(split=split) if p.level == LEVEL) for split in SPLITS}


def read(evaluation: Path) -> Outcome:
    found: Outcome = defaultdict(list)
    with Archive(evaluation / "rollouts.sqlite") as archive:
        for row in archive.rows():
            found[row.problem_id].append(row.correct)
    return dict(found)


def share(outcome: Outcome, problems: Sequence[str]) -> float:
    """Correct answers; problems weigh alike."""
    return float(np.mean([np.mean(outcome[p]) for p in problems if p in outcome]))


def gain(trained: Sequence[Outcome], start: Sequence[Outcome], problems: Sequence[str]) -> dict[str, float]:
    """Share of correct answers over the first policy's, with a 95 % interval: bootstrap over problems, each the mean
    of its seeds."""
    before = {p: float(np.mean([np.mean(o[p]) for o in start if p in o])) for p in problems}
    gaps = [float(np.mean([np.mean(o[p]) for o in trained if p in o])) - before[p] for p in problems]
    mean = float(np.mean(gaps))
    if max(gaps) - min(gaps) < 1e-12:
        return {"mean": round(mean, 4), "lo": round(mean, 4), "hi": round(mean, 4)}
    interval = stats.bootstrap((gaps,), np.mean, rng=0).confidence_interval
    return {"mean": round(mean, 4), "lo": round(float(interval.low), 4), "hi": round(float(interval.high), 4)}


def figures(found: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """By method and split: what is correct, by seed too, and the gain."""
    out: dict[str, Any] = {}
    for method, outcomes in found.items():
        out[method] = {}
        for split, problems in splits().items():
            shares = [round(share(outcome, problems), 4) for outcome in outcomes]
            out[method][split] = {"correct": round(float(np.mean(shares)), 4), "by_seed": shares}
            if method != START:
                out[method][split]["gain"] = gain(outcomes, found[START], problems)
    return out


def cost(folder: Path, method: str, seeds: Sequence[int]) -> dict[str, float]:
    """Rollouts (or demonstrations) and seconds of training, mean of the seeds."""
    made = [json.loads((folder / f"{method}-{seed}" / "summary.json").read_text()) for seed in seeds]
    rollouts = [s["rollouts"] or s.get("demonstrations", {}).get("lessons", 0) for s in made]
    return {"samples": float(np.mean(rollouts)), "seconds": float(np.mean([s["wall_s"] for s in made]))}


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────


def table(report: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| method | training problems | gain (95 %) | held-out problems | gain (95 %) | samples | training |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, by_split in report["methods"].items():
        cells = [f"`{method}`" if method != START else "SFT policy (start)"]
        for split in SPLITS:
            found = by_split[split]
            cells.append(f"{found['correct']:.1%}")
            g = found.get("gain")
            cells.append(f"{g['mean']:+.1%} ({g['lo']:+.1%} … {g['hi']:+.1%})" if g else "")
        spent = report["cost"].get(method)
        cells += [f"{spent['samples']:.0f}", f"{spent['seconds']:.0f} s"] if spent else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: Mapping[str, Any]) -> str:
    rows = {
        method: [plots.Dot(g["mean"], g["lo"], g["hi"]) for g in (by_split[split]["gain"] for split in SPLITS)]
        for method, by_split in report["methods"].items()
        if method != START
    }
    words = {
        "title": "Correct answers over those of the SFT policy",
        "y": f"level {LEVEL}, {report['seeds']} seeds, 95 % intervals over problems",
        "x": "share of answers",
    }
    return str(plots.dot_chart(rows, list(SPLITS.values()), label=words["title"], standalone=words))


def write(report: Mapping[str, Any]) -> None:
    """The measured part of docs/methods.md, and its chart."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    where = f"{report['cores']} cores ({report['machine']}), {report['cores_each']} for each run"
    what = f"{report['seeds']} seeds, {report['samples']} answers a problem in each evaluation; {where}."
    picture = f"![gains by method](pictures/{PICTURE.name})"
    PAGE.write_text(f"{before}{BEGIN}\n{table(report)}\n\n{what}\n\n{picture}\n{END}{after}", encoding="utf-8")
    PICTURE.write_text(draw(report), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("fusion"), help="where runs are kept")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--samples", type=int, default=16, help="answers a problem in the evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="arms beside each other; two cores or more for each")
    parser.add_argument("--write", action="store_true", help="put table and chart into docs/methods.md")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    methods = args.methods.split(",")
    study, began = Study(args.folder.resolve(), args.samples, args.jobs), time.monotonic()
    study.make_policy()
    wanted = [(method, seed) for seed in seeds for method in (*methods, START)]
    with ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(wanted, pool.map(lambda arm: study.arm(*arm), wanted), strict=True))
    found = {method: [done[method, seed] for seed in seeds] for method in (START, *methods)}
    report = {
        "benchmark": "methods",
        "seeds": len(seeds),
        "samples": args.samples,
        "methods": figures(found),
        "cost": {method: cost(study.folder, method, seeds) for method in methods},
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_each": Cores(args.jobs).each,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began),
    }
    if args.write:
        write(report)
    print(table(report), file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
