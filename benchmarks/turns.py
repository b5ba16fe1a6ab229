"""Does training on refinement turns pay? One policy, trained twice with as many rollouts: of one turn, and of four.

    python benchmarks/turns.py --folder turns-study --seeds 0,1,2 [--policy FOLDER] [--plot docs/pictures/turns.svg]

Both are then evaluated alike (`kbrl eval --turns 4`): an answer may be refined three times, and counts when one of its
turns is correct. The reward is correctness alone, so kernels are not timed. The anchor is the single-turn arm of the
same seed. Continues where it was stopped; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.report import plots
from kbrl_async.runs import origins
from kbrl_async.runs.archive.archive import Archive
from kbrl_async.runs.config import load

TURNS = 4
CORRECT_ONLY = [
    "reward.preset=stage2",
    "reward.speed_weight=0",
    "timing_bench.timed=false",
]
REWARD = ["prompt.option=compact", *CORRECT_ONLY]
SAME = [*REWARD, "batch_size=8", "group_size=8", "max_steps=14", "max_minutes=null", "eval_samples=0"]
MULTI = ["mode=multi_turn", f"max_turns={TURNS}", "turns.stop=correct", "turns.returns=max"]
ARMS = {"single": SAME, "multi": [*SAME, *MULTI, "learner.minibatches=4"]}
"""Four minibatches: about as many samples for each optimizer step as two have of single turns."""

Outcome = dict[str, list[int]]
"""By problem: of each rollout the first turn that was correct, `TURNS` where none was."""


def kbrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "kbrl_async", *words], check=True, stdout=sys.stderr)


def train(folder: Path, arm: str, seed: int, policy: str) -> Path:
    run = folder / f"{arm}-{seed}"
    if not (run / "summary.json").exists():
        config = str(Path(__file__).parent.parent / "configs" / "default.yaml")
        where = [f"log_path={folder}", f"name={run.name}", f"model_name={policy}", f"seed={seed}"]
        kbrl("train", "--config", config, *where, *ARMS[arm])
    return run


def evaluate(run: Path, samples: int) -> Outcome:
    name, found = run.name, run.parent / "evals" / run.name
    if not (found / "evaluation.json").exists():
        asked = ["--turns", str(TURNS), "--samples", str(samples), "turns.stop=correct", f"name={name}"]
        kbrl("eval", str(run), *asked, f"log_path={run.parent}", *REWARD)
    return outcome(found)


def outcome(evaluation: Path) -> Outcome:
    first: dict[tuple[str, str], int] = {}
    with Archive(evaluation / "rollouts.sqlite") as archive:
        for row in archive.rows():
            key = (row.problem_id, row.rollout_id)
            first[key] = min(first.get(key, TURNS), row.turn if row.correct else TURNS)
    by_problem: Outcome = defaultdict(list)
    for (problem, _), turn in sorted(first.items()):
        by_problem[problem].append(turn)
    return by_problem


def compile_fix_rate(evaluations: Iterable[Path]) -> float:
    """Of first turns that did not compile, how many second turns do."""
    fixed = []
    for evaluation in evaluations:
        with Archive(evaluation / "rollouts.sqlite") as archive:
            compiled = {(row.rollout_id, row.turn): row.compiled for row in archive.rows()}
        broken = [rollout for (rollout, turn), ok in compiled.items() if turn == 0 and not ok]
        fixed += [compiled[rollout, 1] for rollout in broken if (rollout, 1) in compiled]
    return round(float(np.mean(fixed)), 4)


def success(outcomes: Iterable[Outcome], problems: set[str]) -> list[float]:
    """Share of rollouts with a correct turn among the first 1 … `TURNS`; problems weigh alike."""
    shares = [
        [np.mean([turn < limit for turn in o[p]]) for o in outcomes for p in problems if p in o]
        for limit in range(1, TURNS + 1)
    ]
    return [round(float(np.mean(values)), 4) for values in shares]


def difference(found: Mapping[str, list[Outcome]], problems: set[str]) -> dict[str, float]:
    """Success of four turns, multi − single, with a bootstrap over problems."""
    gaps = []
    for problem in sorted(problems):
        each = {arm: [t < TURNS for o in outcomes for t in o.get(problem, [])] for arm, outcomes in found.items()}
        gaps.append(float(np.mean(each["multi"]) - np.mean(each["single"])))
    interval = stats.bootstrap((gaps,), np.mean, rng=0).confidence_interval
    return {"mean": round(float(np.mean(gaps)), 4), "lo": round(interval.low, 4), "hi": round(interval.high, 4)}


def draw(found: Mapping[str, list[Outcome]], problems: set[str], path: Path) -> None:
    names = {"single": "single turns", "multi": "four turns"}
    lines = []
    for arm, outcomes in found.items():
        points = list(enumerate(success(outcomes, problems), start=1))
        each = [success([o], problems) for o in outcomes]
        band = [(n, min(s[n - 1] for s in each), max(s[n - 1] for s in each)) for n, _ in points]
        lines.append(plots.Line(names[arm], [(float(x), y) for x, y in points], band=band))
    words = {"title": "Rollouts with a correct kernel, by what was trained", "x": "turns taken", "y": "share"}
    path.parent.mkdir(parents=True, exist_ok=True)
    chart = plots.line_chart(
        lines, label=words["title"], box=plots.STANDALONE, standalone=words, labels="names", x_ticks=[1, 2, 3, 4]
    )
    path.write_text(str(chart), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("turns-study"), help="where runs are kept")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=4, help="rollouts a problem in the evaluation")
    parser.add_argument("--policy", help="folder of the policy that both arms start from; default: made for this")
    parser.add_argument("--plot", type=Path, help="write a chart there")
    args = parser.parse_args()
    policy = args.policy or origins.base_model(load([], ["mode=multi_turn"]), lambda what, share: print(what))
    found: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    for seed in seeds:
        for arm in ARMS:
            found[arm].append(evaluate(train(args.folder, arm, seed, policy), args.samples))
            print(arm, seed, success(found[arm][-1:], set(found[arm][-1])), file=sys.stderr, flush=True)
    splits = {split: {problem.problem_id for problem in load_suite(split=split)} for split in ("train", "heldout")}
    report: dict[str, Any] = {"benchmark": "turns", "seeds": args.seeds, "samples": args.samples}
    for split, problems in splits.items():
        report[split] = {arm: success(outcomes, problems) for arm, outcomes in found.items()}
        report[split]["multi_minus_single"] = difference(found, problems)
    for arm in ARMS:
        report[f"{arm}_compile_fix_rate"] = compile_fix_rate(args.folder / "evals" / f"{arm}-{s}" for s in seeds)
    report |= {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    if args.plot:
        draw(found, splits["train"], args.plot)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
