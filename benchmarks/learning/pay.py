"""What should a right kernel's speed be worth?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.harness import ROOT, Result, bootstrap, markdown, rows_of, say
from benchmarks.learning.study import RunStudy
from kbrl_async.runs.archive.rows import AFTER, TurnRow

CONFIG = ROOT / "configs" / "default.yaml"
PAYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "above_1": ("reward.above_1_weight=0.7",),
    "above_1_alone": ("reward.speed_weight=0", "reward.above_1_weight=0.7"),
}
"""What a kernel at .97 of its reference's speed earns of what one at 8 times earns: .74, .49, .48."""
KINDS: dict[str, Callable[[TurnRow], bool]] = {
    "right": lambda row: row.correct,
    "above 1": lambda row: row.correct and (row.speedup or 0.0) > 1.0,
    "proven faster": lambda row: row.correct and (row.lo or 0.0) > 1.0,
}


def pay(
    *settings: str,
    folder: Annotated[Path, "where runs are kept"] = Path("pay-study"),
    seeds: tuple[int, ...] = (0, 1, 2),
    pays: Annotated[tuple[str, ...], "the first is what the others are compared with"] = tuple(PAYS),
    samples: Annotated[int, "answers a held-out problem"] = 12,
    cache: Annotated[Path | None, "where the policy is kept"] = None,
) -> Result:
    """Does paying less for what is no faster than its reference bring faster kernels? The default run, three ways.

    Every run from one policy, 14 updates, then its own evaluation of the held-out problems; further key=value settings
    go to every run. Kernels are timed, so the cores should be quiet. Gives shares of all answers, and differences with
    a bootstrap over problems, each the mean of its seeds. The anchor is the default. Continues where it was stopped.
    """
    study = RunStudy(folder, cache=cache)
    study.make_policy(CONFIG, settings=settings)
    rows: dict[str, list[list[TurnRow]]] = {name: [] for name in pays}
    for seed in seeds:
        for name in pays:
            words = (*PAYS[name], f"seed={seed}", f"eval_samples={samples}", "max_minutes=null", *settings)
            run = study.train(f"{name}-{seed}", CONFIG, *words)
            rows[name].append([row for row in rows_of(run) if row.purpose == AFTER])
            say(run.name, {kind: mean_of(rows[name][-1], is_one) for kind, is_one in KINDS.items()})
    first = rows[pays[0]]
    found = {name: figures(of, first) for name, of in rows.items()}
    heads = [*KINDS, "mean speedup", *(f"{kind}, over {pays[0]}" for kind in KINDS)]
    print(markdown(["pay", *heads], [[name, *cells(of)] for name, of in found.items()]), flush=True)
    return {"pays": found, "seeds": len(seeds), "samples": samples}


def figures(by_seed: Sequence[list[TurnRow]], anchor: Sequence[list[TurnRow]]) -> Result:
    """Shares by seed, the geometric mean of the right ones' speedups, and what it has over the anchor by problem."""
    found: Result = {"speedup": [geometric_mean(rows) for rows in by_seed]}
    problems = sorted({row.problem_id for rows in anchor for row in rows})
    for kind, is_one in KINDS.items():
        found[kind] = [mean_of(rows, is_one) for rows in by_seed]
        more = [_of_problem(by_seed, p, is_one) - _of_problem(anchor, p, is_one) for p in problems]
        found[f"{kind} more"] = bootstrap(more)
    return found


def cells(found: Result) -> list[str]:
    shares = [", ".join(f"{share:.0%}" for share in found[kind]) for kind in KINDS]
    more = [found[f"{kind} more"] for kind in KINDS]
    speeds = ", ".join(f"{mean:.2f}" for mean in found["speedup"])
    return [*shares, speeds, *(f"{m['mean']:+.1%} ({m['lo']:+.1%} … {m['hi']:+.1%})" for m in more)]


def mean_of(rows: Sequence[TurnRow], is_one: Callable[[TurnRow], bool]) -> float:
    return sum(map(is_one, rows)) / len(rows)


def geometric_mean(rows: Sequence[TurnRow]) -> float:
    """Of the right ones' speedups that can be compared."""
    known = [row.speedup for row in rows if row.correct and row.speedup and not row.disturbed]
    return float(np.exp(np.mean(np.log(known)))) if known else float("nan")


def _of_problem(by_seed: Sequence[list[TurnRow]], problem: str, is_one: Callable[[TurnRow], bool]) -> float:
    return float(np.mean([mean_of([row for row in rows if row.problem_id == problem], is_one) for rows in by_seed]))
