"""Generated problems as a folder in the KernelBench layout, and as a source: `problems=generated:N[:SEED[:LOW-HIGH]]`.

What was generated once is kept in the user's cache and read from there.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kbrl_async import durable
from kbrl_async.errors import ProblemError
from kbrl_async.kernels.generator.generating import GeneratedProblem, generate
from kbrl_async.kernels.problems.loading import load_problems
from kbrl_async.kernels.problems.sources.folder import INDEX, kernelbench_root
from kbrl_async.kernels.timing.resolution import cache_folder
from protocols.records import Problem

VERSION = 3
"""Goes up with every change of what a seed gives."""
_SPEC = re.compile(r"(\d+)(?::(\d+)(?::(0?\.\d+|[01])-(0?\.\d+|[01]))?)?")
_TELL_EVERY_S = 10.0


def generated(shapes: str, wanted: str) -> Path:
    """The folder of the problems that `wanted`, `N[:SEED[:LOW-HIGH]]`, stands for; made where the cache has none.

    :raises ProblemError: it does not read like that.
    """
    match = _SPEC.fullmatch(wanted)
    if match is None or not int(match[1]):
        cure = "Write generated:500, generated:500:SEED, or generated:500:SEED:0.1-0.5 for difficulties"
        raise ProblemError(f"problems=generated:{wanted} names no problems", cure)
    count, seed = int(match[1]), int(match[2] or 0)
    avoid = known()
    digest = hashlib.sha256("\n".join(problem.source for problem in avoid).encode()).hexdigest()[:8]
    folder = cache_folder() / "generated" / f"v{VERSION}-{wanted.replace(':', '-')}-{digest}"
    if not durable.is_complete(folder):
        difficulty = (float(match[3] or 0), float(match[4] or 1))
        _make(folder, count, seed, difficulty, avoid)
    return folder


def _make(folder: Path, count: int, seed: int, difficulty: tuple[float, float], avoid: Sequence[Problem]) -> None:
    """With a line now and then: five hundred take minutes."""
    drawn, told = [], time.monotonic()
    for one in generate(count, seed, difficulty=difficulty, avoid=avoid, jobs=len(os.sched_getaffinity(0))):
        drawn.append(one)
        if time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            print(f"generating problems: {len(drawn)} of {count}", file=sys.stderr, flush=True)
    write_folder(folder, drawn)


def known() -> list[Problem]:
    """What nothing may be near to: the suite's held-out problems, and KernelBench's where there is a checkout."""
    kernelbench = kernelbench_root(os.environ)
    return load_problems(split="heldout") + (load_problems(kernelbench) if kernelbench else [])


def write_folder(folder: Path, drawn: Sequence[GeneratedProblem]) -> None:
    """`level*/*.py`, and `index.toml` with difficulty and split; the folder is there when all of it is."""

    def fill(inside: Path) -> None:
        index = []
        for one in drawn:
            path = inside / f"level{one.level}" / f"{one.stem}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(one.source)
            facts = f'difficulty = {one.difficulty}\nsplit = "{one.split}"\n'
            index.append(f'["L{one.level}/{one.stem}"]\n{facts}')
        (inside / INDEX).write_text("\n".join(index))

    folder.parent.mkdir(parents=True, exist_ok=True)
    durable.write_folder(folder, fill)
