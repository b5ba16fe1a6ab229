"""What is wrong in the small policy's answers to held-out problems?"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.learning.study import right_kernel
from kbrl_async.lab.small_policy.specs import HELDOUT
from kbrl_async.runs.archive.archive import ArchiveReader

STYLES = 60
"""Right answers of a problem that an answer is compared with: fast, slow and between."""
PARAMETERS = ("members", "call", "signature")
Parts = dict[str, tuple[str, ...]]


def wrong(*runs: str) -> Result:
    """Of each evaluation of held-out problems, which part of the answers is wrong, first part first.

    `parameters`: modules, arguments of the call or of the kernel that no right answer has, those of another problem;
    `operations`: another chain of operations; `line`: all of that is right, and some line is not. RUN: run folders,
    put together.
    """
    right = {problem_id: _right(problem_id) for problem_id in HELDOUT}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        with ArchiveReader(Path(run) / "rollouts.sqlite") as archive:
            for row in archive.rows():
                if row.purpose == "train" or row.reward is None or row.problem_id not in HELDOUT:
                    continue
                record = None if row.correct else archive.record(row.task_id)
                source = record.source if record else ""
                found[row.group_id]["correct" if row.correct else _kind(source, right[row.problem_id])] += 1
    return {phase: {"answers": kinds.total(), **_shares(kinds)} for phase, kinds in sorted(found.items())}


def _right(problem_id: str) -> dict[str, set[tuple[str, ...]]]:
    found = defaultdict[str, set[tuple[str, ...]]](set)
    for seed in range(STYLES):
        for name, part in _parts(right_kernel(problem_id, random.Random(seed))).items():
            found[name].add(part)
    return found


def _parts(source: str) -> Parts:
    module = [line.strip() for line in source.rpartition("class ModelNew")[2].split("\n")]
    return {
        "members": tuple(line for line in module if "= nn." in line or line.startswith("def __init__")),
        "call": tuple(line for line in module if line.startswith(("out =", "t =", "s =", "self.kernel("))),
        "signature": tuple(found.replace("restrict ", "") for found in re.findall(r"void run\((.*)\)", source)),
        "operations": tuple(re.findall(r"// (.*)", source)),
    }


def _kind(source: str, right: dict[str, set[tuple[str, ...]]]) -> str:
    if not source:
        return "no kernel"
    first = next((name for name, part in _parts(source).items() if part not in right[name]), "line")
    return "parameters" if first in PARAMETERS else first


def _shares(kinds: Counter[str]) -> dict[str, float]:
    return {kind: count / kinds.total() for kind, count in kinds.most_common()}
