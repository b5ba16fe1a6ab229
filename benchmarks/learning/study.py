"""Runs and evaluations that a study is made of, and what their answers say."""

from __future__ import annotations

import json
import queue
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.harness import CORES, bootstrap, kbrl, rows_of, say, summary_of
from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.small_policy.author import CAREFUL, Author
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import SPECS
from kbrl_async.runs import origins
from kbrl_async.runs.config import load

Answers = dict[str, list[int]]
"""By problem: of each rollout the first turn that was correct, `NEVER` where none was."""
NEVER = 1000
LEVELS = (1, 2, 3)
"""Of the default run."""
Arm = TypeVar("Arm")
Found = TypeVar("Found")


class RunStudy:
    """Runs and their evaluations in a folder, each made once; several beside each other, on cores of their own."""

    def __init__(self, folder: Path, jobs: int = 1, cache: Path | None = None) -> None:
        self.folder, self._jobs = folder.resolve(), jobs
        (self.folder / "printed").mkdir(parents=True, exist_ok=True)
        self.where = [f"log_path={self.folder}", f"cache_path={cache or self.folder / 'cache'}"]
        self.cores_each = max(1, len(CORES) // jobs)
        self._free: queue.Queue[list[int]] = queue.Queue()
        for job in range(jobs):
            self._free.put(CORES[job * self.cores_each : (job + 1) * self.cores_each] or CORES)

    def arms(self, wanted: Sequence[Arm], run: Callable[[Arm], Found]) -> dict[Arm, Found]:
        """What each came to, as many beside each other as there are jobs."""
        with ThreadPoolExecutor(self._jobs) as pool:
            return dict(zip(wanted, pool.map(run, wanted), strict=True))

    def make_policy(self, *sources: Path, settings: Sequence[str] = ()) -> Path:
        config = load(sources, [*self.where, *settings])
        return Path(origins.base_model(config, lambda what, share: say(f"{what} {share:.0%}")))

    def train(self, name: str, config: Path, *settings: str, last: str = "") -> Path:
        """`last`: the run of this name that a recipe in rounds ends with."""
        if not summary_of(self.folder / (last or name)):
            self._kbrl(name, "train", "--config", config, *settings)
        return self.folder / (last or name)

    def distil(self, name: str, *words: object) -> Path:
        """The file of `kbrl distill`."""
        file = self.evaluation(name) / "demonstrations.jsonl"
        if not file.exists():
            self._kbrl(name, "distill", *words)
        return file

    def evaluate(self, name: str, *words: object) -> Answers:
        """By `kbrl eval`."""
        found = self.evaluation(name)
        if not (found / "evaluation.json").exists():
            self._kbrl(name, "eval", *words)
        first: dict[tuple[str, str], int] = {}
        for row in rows_of(found):
            key = (row.problem_id, row.rollout_id)
            first[key] = min(first.get(key, NEVER), row.turn if row.correct else NEVER)
        answers: Answers = defaultdict(list)
        for (problem, _), turn in sorted(first.items()):
            answers[problem].append(turn)
        return answers

    def evaluation(self, name: str) -> Path:
        return self.folder / "evals" / name

    def _kbrl(self, name: str, *words: object) -> None:
        mine = self._free.get()
        try:
            kbrl(*words, *self.where, f"name={name}", log=self.folder / "printed" / f"{name}.log", cores=mine)
        finally:
            self._free.put(mine)


def right_kernel(problem_id: str, rng: random.Random) -> str:
    """One that the small policy's author might write: fast, slow or between."""
    author = Author(rng, msgspec.structs.replace(CAREFUL, fast=0.5))
    return extract(respond(SPECS[problem_id], author, "c")).source


def core_seconds(run: Path) -> float:
    """CPU time of all processes of a run, as their beats say it: others on these cores do not change it."""
    spent = before = 0.0
    for line in (run / "metrics" / "system.jsonl").read_text().splitlines():
        said = json.loads(line)
        cores = sum(one["cpu"] for one in (*said["workers"].values(), said["broker"]))
        spent += cores * (said["t"] - before) if before else 0.0
        before = said["t"]
    return spent


def splits(level: int = 0) -> dict[str, list[str]]:
    """Problems of each split, of one level or all that runs train on."""
    levels = [level] if level else LEVELS
    problems = {split: load_suite(split=split) for split in ("train", "heldout")}
    return {split: sorted(p.problem_id for p in of if p.level in levels) for split, of in problems.items()}


def share(answers: Sequence[Answers], problems: Sequence[str], turns: int = NEVER) -> float:
    """Rollouts with a correct turn among the first so many; problems weigh alike."""
    shares = [np.mean([turn < turns for turn in of[p]]) for of in answers for p in problems if p in of]
    return float(np.mean(shares))


def gain(answers: Sequence[Answers], anchor: Sequence[Answers], problems: Sequence[str]) -> dict[str, float]:
    """Share of correct rollouts over the anchor's, with a 95 % interval: bootstrap over problems, each the mean of its
    seeds."""
    return bootstrap([share(answers, [p]) - share(anchor, [p]) for p in problems])
