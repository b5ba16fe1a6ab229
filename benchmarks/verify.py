"""How many candidates a second are built and verified, and where the time goes. One JSON line last.

Usage: `python benchmarks/verify.py [--core N] [--candidates N] [--timing]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from protocols.records import BuildReport, Candidate, Fault, Problem

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.randn(128, 512)]

def get_init_inputs():
    return []
"""
CANDIDATE = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
#pragma GCC optimize("Ofast")
#include <math.h>
int variant = VARIANT;
void softmax(const float *restrict x, float *restrict y, long rows, long cols) {
  for (long r = 0; r < rows; r++) {
    const float *a = x + r * cols; float *b = y + r * cols;
    float m = a[0], s = 0;
    for (long c = 1; c < cols; c++) m = fmaxf(m, a[c]);
    for (long c = 0; c < cols; c++) { float e = expf(a[c] - m); b[c] = e; s += e; }
    s = 1 / s;
    for (long c = 0; c < cols; c++) b[c] *= s;
  }
}
"""

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "softmax")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.shape[0], x.shape[1])
        return y
'''


def paths(store: ArtifactStore, report: BuildReport) -> dict[str, Path]:
    found = {key: store.path(address) for key, address in report.artifacts.items()}
    return {key: path for key, path in found.items() if path is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--timing", action="store_true")
    asked = parser.parse_args()
    cores = () if asked.core < 0 else (asked.core,)
    options = bench_options(TimingBench(), cores=cores, limits=Limits(cores=cores))
    problem = Problem("L1/01_softmax", 1, "softmax", PROBLEM)
    spans: dict[str, list[float]] = {"build": [], "cached_build": [], "verify": [], "verify_and_time": []}
    ratios: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Builder(ArtifactStore(Path(folder)), CompileFarm(cores=cores)) as builder,
        zygote_for("cpu") as zygote,
        contextlib.closing(Bench(zygote, options)) as bench,
    ):
        for variant in range(asked.candidates + 1):
            candidate = Candidate(CANDIDATE.replace("VARIANT", str(variant)), "c")
            marks = [time.perf_counter()]
            report = builder.build(candidate)
            marks.append(time.perf_counter())
            builder.build(candidate)
            marks.append(time.perf_counter())
            found = bench.evaluate(problem, candidate, paths(builder.store, report), timing=False)
            marks.append(time.perf_counter())
            assert found.verdict.fault is Fault.OK, found.verdict
            if asked.timing:
                timed = bench.evaluate(problem, candidate, paths(builder.store, report)).timing
                ratios.append(timed.speedup if timed else 0.0)
                marks.append(time.perf_counter())
            if variant:  # the first one also makes the reference
                for name, begin, end in zip(spans, marks, marks[1:], strict=False):
                    spans[name].append(end - begin)
    medians = {f"{name}_ms": round(1e3 * statistics.median(times), 2) for name, times in spans.items() if times}
    for name, value in medians.items():
        print(f"{name:22} {value:8.2f}")
    total = statistics.fmean(spans["build"]) + statistics.fmean(spans["verify"])
    rate = {"candidates_per_s": round(1 / total, 2), "isolation": found.verdict.isolation}
    print(json.dumps({**medians, **rate, "speedups": [round(ratio, 3) for ratio in ratios]}))


if __name__ == "__main__":
    main()
