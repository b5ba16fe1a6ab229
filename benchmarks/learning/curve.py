"""Does it help to train on more problems?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.harness import CORRECT_ONLY, ROOT, Result, bootstrap, rows_of, say, summary_of
from benchmarks.learning.study import RunStudy, splits
from protocols.records import VERIFIER

CONFIG = ROOT / "configs" / "long.yaml"


def curve(
    *settings: str,
    folder: Annotated[Path, "where runs are kept"] = Path("curve-study"),
    counts: Annotated[tuple[int, ...], "distinct problems; those of the suite are the first"] = (44, 150, 500, 1500),
    seeds: tuple[int, ...] = (0,),
    updates: Annotated[int, "of each run"] = 100,
    every: Annotated[int, "updates between two evaluations of the held-out problems"] = 20,
    samples: Annotated[int, "answers a held-out problem in each"] = 12,
    minutes: Annotated[float, "after which a run ends with fewer updates; 0: never"] = 0,
    jobs: Annotated[int, "runs beside each other, each on cores of its own"] = 1,
    timed: Annotated[bool, "pay speed too, which takes quiet cores"] = False,
) -> Result:
    """What do held-out problems gain from the number of distinct problems, at as many updates?

    `configs/long.yaml` from one policy, with so many problems of the suite and its grammar; further key=value settings
    go to every run. Gives the share of held-out answers that are correct, by updates, and how often a problem was met.
    Continues where it was stopped.
    """
    study = RunStudy(folder, jobs)
    study.make_policy(CONFIG, settings=settings)
    own = len(splits()["train"])

    def run(arm: tuple[int, int]) -> Result:
        count, seed = arm
        source = f"problems=grammar:{count - own}" if count > own else "problems=suite"
        length = (f"max_steps={updates}", f"max_minutes={minutes or 'null'}")
        asked = (f"eval_every={every}", f"eval_samples={samples}", *(() if timed else CORRECT_ONLY))
        path = study.train(f"p{count}-{seed}", CONFIG, source, f"seed={seed}", *length, *asked, *settings)
        found = outcome(path)
        say(path.name, found)
        return found

    done = study.arms([(count, seed) for seed in seeds for count in counts], run)
    found = {str(count): [done[count, seed] for seed in seeds] for count in counts}
    last = {count: bootstrap([one["after"] for one in of]) for count, of in found.items()}
    return {"runs": found, "after": last, "cores_each": study.cores_each}


def outcome(run: Path) -> Result:
    """Of a run: held-out correct by updates, what of it is faster than the reference, and what was trained on."""
    summary = summary_of(run)
    rounds = {version: figures["eval/correct_rate"] for version, figures in summary["heldout_by_version"].items()}
    right = summary["heldout_correct_rate_after"]
    groups = {row.group_id: row.problem_id for row in rows_of(run) if row.purpose == "train" and row.role != VERIFIER}
    met = Counter(groups.values())
    return {
        "updates": summary["updates"],
        "before": summary["heldout_correct_rate_before"],
        "during": rounds,
        "after": right,
        "after_95": summary["heldout_correct_rate_after_95"],
        "fast_1_of_correct": summary["heldout_fast_1_after"] / right if right else 0.0,
        "trained_last": summary["correct_rate_last"],
        "problems_met": len(met),
        "met_each": share_by_times(list(met.values())),
    }


def share_by_times(times: Sequence[int]) -> dict[str, float]:
    """Of the problems that were met, which share was met so often."""
    bands = {"1": (1, 1), "2": (2, 2), "3-5": (3, 5), "6-10": (6, 10), "more": (11, max([11, *times]))}
    return {name: sum(low <= n <= high for n in times) / max(1, len(times)) for name, (low, high) in bands.items()}
