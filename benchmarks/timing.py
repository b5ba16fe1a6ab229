"""What a timing costs. `python -m benchmarks.timing COMMAND`; its truth: `kbrl bench --aa --ab`."""

from __future__ import annotations

import time
from collections import Counter
from statistics import fmean, median, quantiles
from typing import Annotated, Any

import torch

from benchmarks.harness import CORES, Commands, Result, say
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.funnel.verifier import default_bench, shapes_for
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.device import hardware_of
from protocols.records import Candidate, Problem, Timing

commands = Commands("timing", __doc__)


@commands
def suite(
    device: str = "cpu",
    core: int | None = None,
    problems: Annotated[int, "so many of the suite, evenly chosen; 0: all"] = 0,
    cap: Annotated[float, "seconds for one decision"] = 0.15,
) -> Result:
    """Seconds of exclusive bench time per decided candidate, over the suite: the reference as its own candidate.

    The anchor is a naive loop of as many calls, without checks, pairs or processes.
    """
    chosen = load_suite(shapes=shapes_for(device))
    if problems:
        chosen = chosen[:: max(1, len(chosen) // problems)]
    cores = () if device.startswith("cuda") else (CORES[-1] if core is None else core,)
    options = VerifyOptions(bench=default_bench(cores, Recipe.of(TimingBench(cap_s=cap))))
    timings: list[Timing] = []
    anchors, whole = [], []
    with Verifier(device, options) as verifier:
        bench = verifier.judge(device, LIBRARY.name).bench
        for problem in chosen:
            itself = Candidate(problem.source.replace("class Model(", "class ModelNew(", 1), LIBRARY.name)
            bench.evaluate(problem, itself, {}, timing=False)  # makes the reference
            begin = time.perf_counter()
            timing = bench.evaluate(problem, itself, {}).timing
            whole.append(time.perf_counter() - begin)
            if timing is not None:
                timings.append(timing)
                anchors.append(_naive_s(problem, device, 2 * timing.n))
                say(f"{problem.problem_id:32} {timing.spent_s:.3f} s  {timing.n:3} pairs  {timing.stopped}")
    spent = sorted(timing.spent_s for timing in timings)
    return {
        "hardware": hardware_of(device),
        "load_while_timing": fmean(timing.load or 0 for timing in timings),
        "decided": len(timings),
        "of": len(chosen),
        "exclusive_s_deciles": quantiles(spent, n=10) if len(spent) > 1 else spent,
        "exclusive_s_mean": fmean(spent),
        "with_verification_s_median": median(whole),
        "anchor_naive_s_mean": fmean(anchors),
        "stopped": Counter(timing.stopped for timing in timings),
        "false_faster": sum(timing.is_faster for timing in timings),
    }


def _naive_s(problem: Problem, device: str, calls: int) -> float:
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


if __name__ == "__main__":
    commands.main()
