"""Seconds of exclusive bench time per decided candidate, over the suite: the reference as its own candidate. One JSON
line last. The anchor of the same run is a naive loop of as many calls, without checks, pairs or processes.

Usage: `python benchmarks/timing.py [--device cpu|cuda:0] [--core N] [--problems N] [--cap S]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections import Counter
from typing import Any

import msgspec
import torch

from kbrl_async.cli.bench import _cores
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.funnel.verifier import default_bench, shapes_for
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.cpu.host import hardware_of
from kbrl_async.kernels.verify import Bench, zygote_for
from protocols.records import Candidate, Problem, Timing


def as_candidate(problem: Problem) -> Candidate:
    return Candidate(problem.source.replace("class Model(", "class ModelNew(", 1), LIBRARY.name)


def naive_s(problem: Problem, device: str, calls: int) -> float:
    """The suite is ours: it may run in this process."""
    namespace: dict[str, Any] = {}
    exec(compile(problem.source, "problem.py", "exec"), namespace)
    model = namespace["Model"](*namespace["get_init_inputs"]()).to(device)
    inputs = [tensor.to(device) for tensor in namespace["get_inputs"]()]
    with torch.no_grad():
        model(*inputs)
        begin = time.perf_counter()
        for _ in range(calls):
            model(*inputs)
        if device != "cpu":
            torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--core", type=int)
    parser.add_argument("--problems", type=int, default=0, help="so many of the suite, evenly chosen; 0: all")
    parser.add_argument("--cap", type=float, default=TimingBench().cap_s)
    asked = parser.parse_args()
    problems = load_suite(shapes=shapes_for(asked.device))
    if asked.problems:
        problems = problems[:: max(1, len(problems) // asked.problems)]
    cores = _cores(asked, asked.device)
    recipe = Recipe.of(TimingBench(cap_s=asked.cap))
    options = msgspec.structs.replace(default_bench(cores, recipe), device=asked.device)
    timings: dict[str, Timing] = {}
    anchors, whole = [], []
    with zygote_for(asked.device) as zygote, contextlib.closing(Bench(zygote, options)) as bench:
        for problem in problems:
            bench.evaluate(problem, as_candidate(problem), {}, timing=False)  # makes the reference
            begin = time.perf_counter()
            timing = bench.evaluate(problem, as_candidate(problem), {}).timing
            whole.append(time.perf_counter() - begin)
            if timing is None:
                continue
            timings[problem.problem_id] = timing
            anchors.append(naive_s(problem, asked.device, 2 * timing.n))
            print(f"{problem.problem_id:32} {timing.spent_s:.3f} s  {timing.n:3} pairs  {timing.stopped}")
    spent = sorted(timing.spent_s for timing in timings.values())
    deciles = [round(value, 4) for value in statistics.quantiles(spent, n=10)] if len(spent) > 1 else spent
    print(
        json.dumps(
            {
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {hardware_of(asked.device)}",
                "load": round(statistics.fmean(timing.load or 0 for timing in timings.values()), 3),
                "decided": len(timings),
                "of": len(problems),
                "exclusive_s_deciles": deciles,
                "exclusive_s_mean": round(statistics.fmean(spent), 4),
                "with_verification_s_median": round(statistics.median(whole), 4),
                "anchor_naive_s_mean": round(statistics.fmean(anchors), 4),
                "stopped": Counter(timing.stopped for timing in timings.values()),
                "false_faster": sum(timing.is_faster for timing in timings.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
