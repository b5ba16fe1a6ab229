"""Exclusive GPU seconds for one Triton candidate, from its start to its verdict and timing.

`python -m benchmarks.gpu_bench --kernelbench DIR` (a KernelBench checkout) prints, as its last line, one JSON document.
Anchor, in the same run: the same candidate in this process, without isolation, by KernelBench's own recipe (inputs and
weights drawn on the CPU, five correctness trials, a hundred timed calls).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from protocols.records import BenchReport, Candidate, Problem

CANDIDATES = Path(__file__).parent / "gpu_candidates"
CASES = (
    ("L1/1", "level1/1_*.py", "matmul.py"),
    ("L2/12", "level2/12_*.py", "linear_leaky.py"),
    ("L3/1", "level3/1_*.py", "mlp.py"),
)


def in_process(problem: str, candidate: str) -> float:
    """Seconds of KernelBench's recipe."""
    begin = time.perf_counter()
    theirs: dict[str, Any] = {}
    exec(compile(problem, "problem.py", "exec"), theirs)  # the benchmark's own files
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(candidate)
        file.flush()
        ours: dict[str, Any] = {"__name__": "anchor"}
        exec(compile(candidate, file.name, "exec"), ours)
        with torch.no_grad():
            for trial in range(5):
                outputs = []
                for model in (theirs["Model"], ours["ModelNew"]):
                    torch.manual_seed(trial)
                    made = model(*theirs["get_init_inputs"]()).cuda()
                    torch.manual_seed(trial)
                    inputs = [x.cuda() for x in theirs["get_inputs"]()]
                    outputs.append(made(*inputs))
                torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
            for _ in range(100):
                made(*inputs)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def exclusive_seconds(bench: Bench, builder: Builder, root: Path, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pattern, file in CASES:
        problem = Problem(name, 1, name, next((root / "KernelBench").glob(pattern)).read_text())
        candidate = Candidate((CANDIDATES / file).read_text(), "triton")
        built = builder.build(candidate, problem)
        paths = {key: path for key, address in built.artifacts.items() if (path := builder.store.path(address))}
        first = _seconds(bench, problem, candidate, paths)
        runs = [_seconds(bench, problem, candidate, paths) for _ in range(rounds)]
        report = runs[-1][1]
        assert report.timing is not None, report.verdict
        found[name] = {
            "seconds": round(statistics.median(s for s, _ in runs), 3),
            "worst": round(max(s for s, _ in runs), 3),
            "without_timing": round(
                statistics.median(_seconds(bench, problem, candidate, paths, False)[0] for _ in range(3)), 3
            ),
            "first_of_a_problem": round(first[0], 3),
            "stages": {stage.name: round(stage.seconds, 3) for stage in report.stages},
            "speedup": round(report.timing.speedup, 3),
        }
        print(name, found[name], flush=True)
    return found


def _seconds(
    bench: Bench, problem: Problem, candidate: Candidate, paths: dict[str, Path], timing: bool = True
) -> tuple[float, BenchReport]:
    begin = time.perf_counter()
    report = bench.evaluate(problem, candidate, paths, timing=timing)
    return time.perf_counter() - begin, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernelbench", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
    with (
        zygote_for("cuda:0") as zygote,
        Builder(ArtifactStore(Path(tempfile.mkdtemp()))) as builder,
        contextlib.closing(Bench(zygote, bench_options(TimingBench(), device="cuda:0"))) as bench,
    ):
        found["exclusive_seconds"] = exclusive_seconds(bench, builder, args.kernelbench, args.rounds)
    anchor = {}
    torch.set_num_threads(os.cpu_count() or 1)
    for name, pattern, file in CASES:
        problem = next((args.kernelbench / "KernelBench").glob(pattern)).read_text()
        anchor[name] = round(in_process(problem, (CANDIDATES / file).read_text()), 2)
    found["in_process_seconds"] = anchor
    print(json.dumps(found))


if __name__ == "__main__":
    main()
