"""What a candidate costs a bench in CPU time: the small policy's answers, right and wrong as it writes them."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections import Counter
from typing import Annotated

import psutil

from benchmarks.harness import Result, say, verifying
from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.small_policy.author import Author, Habits
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS
from protocols.records import BuildReport, Candidate, Fault, Problem

Built = tuple[Problem, Candidate, BuildReport]


def cost(
    problems: int = 8,
    answers: Annotated[int, "to each problem that could be built"] = 5,
    turns: Annotated[int, "over all of them; the first one, which makes references, does not count"] = 4,
) -> Result:
    """CPU seconds of a bench for a candidate, its processes included, whatever else the host does meanwhile.

    To compare two trees, start it in both by turns.
    """
    rng, found, verdicts = random.Random(7), [], Counter[str]()
    with verifying() as halves:
        built = list(_built(halves.builder, rng, problems, answers))
        for turn in range(turns + 1):
            before = _spent_s()
            for problem, candidate, build in built:
                verdicts[halves.bench.judge(problem, candidate, build).verdict.fault] += turn > 0
            found.append((_spent_s() - before) / len(built))
            say(f"turn {turn}: {found[-1]:.3f} s")
    error = statistics.stdev(found[1:]) / len(found[1:]) ** 0.5 if turns > 1 else 0.0
    return {"cpu_s": statistics.fmean(found[1:]), "cpu_s_error": error, "verdicts": dict(verdicts)}


def _built(builder: Builder, rng: random.Random, problems: int, answers: int) -> list[Built]:
    suite, made = {problem.problem_id: problem for problem in load_suite()}, []
    for name in rng.sample([name for name in SPECS if name not in HELDOUT], problems):
        right: list[Built] = []
        while len(right) < answers:
            candidate = Candidate(extract(respond(SPECS[name], Author(rng, Habits()), "c")).source, "c")
            build = builder.build(candidate, suite[name])
            if build.fault is Fault.OK:
                right.append((suite[name], candidate, build))
        made += right
    return made


def _spent_s() -> float:
    """Of this process and all that it started, those that have ended too."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
            total += times.children_user + times.children_system if process != own else 0.0
    return total
