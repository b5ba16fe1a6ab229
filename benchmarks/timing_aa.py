"""The reference against itself: how often is a speedup claimed that is not there? One JSON line last.

Usage: `python benchmarks/timing_aa.py [--core N] [--runs N]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics

from kbrl_async.sandbox import Limits, Zygote
from kbrl_async.verifying import Bench, BenchOptions
from kbrl_async.verifying.bench import ZYGOTE_PRELOAD
from protocols.records import Candidate, Problem

BODY = """
import torch
import torch.nn as nn

class NAME(nn.Module):
    def forward(self, x):
        return EXPRESSION

def get_inputs():
    return [torch.randn(SHAPE)]

def get_init_inputs():
    return []
"""
CASES = {
    "softmax 128x512": ("torch.softmax(x, dim=-1)", "128, 512"),
    "gelu 256x1024": ("torch.nn.functional.gelu(x)", "256, 1024"),
    "add 1k": ("x + 1", "1024"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_args()
    cores = () if asked.core < 0 else (asked.core,)
    found: dict[str, dict[str, float]] = {}
    with (
        Zygote(ZYGOTE_PRELOAD) as zygote,
        contextlib.closing(Bench(zygote, BenchOptions(cores=cores, limits=Limits(cores=cores)))) as bench,
    ):
        for name, (expression, shape) in CASES.items():
            source = BODY.replace("EXPRESSION", expression).replace("SHAPE", shape)
            problem = Problem(f"L1/{name}", 1, name, source.replace("NAME", "Model"))
            candidate = Candidate(source.replace("NAME", "ModelNew"), "c")
            timings = [bench.evaluate(problem, candidate, {}).timing for _ in range(asked.runs)]
            kept = [timing for timing in timings if timing is not None]
            found[name] = {
                "false_faster": sum(timing.lo > 1 for timing in kept) / len(kept),
                "false_slower": sum(timing.hi < 1 for timing in kept) / len(kept),
                "worst_off_1": round(max(abs(timing.speedup - 1) for timing in kept), 4),
                "median_n": statistics.median(timing.n for timing in kept),
                "reference_ms": round(statistics.median(timing.reference_ms for timing in kept), 4),
                "load": round(statistics.fmean(timing.load or 0 for timing in kept), 3),
            }
            print(name, found[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
