"""`cuda` candidates from source to verdict on a GPU host: one alone, and many distinct ones sustained.

`python -m benchmarks.gpu_throughput [--candidates 200] [--builders N]`: builders in threads feed one bench, as farm and
bench do in a run. Prints, as its last line, one JSON document. Candidates come grouped by problem, as rollouts do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_candidates import CUDA, Case
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from protocols.records import BuildReport, Candidate, Fault

_SKIPPED = ("full_headers_needed", "cublas")
"""They are built by the full way only, which is the farm's slow path by design."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--builders", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--problems", type=int, default=13)
    parser.add_argument("--no-timing", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CUDA if case.compiles and not case.raises and case.name not in _SKIPPED]
    with (
        tempfile.TemporaryDirectory() as root,
        Builder(ArtifactStore(Path(root)), CompileFarm(deadline_s=60.0)) as builder,
        zygote_for("cuda:0") as zygote,
        contextlib.closing(Bench(zygote, bench_options(TimingBench(), device="cuda:0"))) as bench,
    ):
        builder.build(cases[0].variant("warm-up"))
        result = {"benchmark": "gpu_throughput", "machine": f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores"}
        result |= _alone(builder, bench, cases[0])
        result |= _sustained(builder, bench, cases[: options.problems], options, not options.no_timing)
    print(json.dumps(result))


def _judge(builder: Builder, bench: Bench, case: Case, candidate: Candidate, timing: bool) -> tuple[str, float]:
    return _verdict(builder, bench, case, candidate, builder.build(candidate), timing)


def _verdict(
    builder: Builder, bench: Bench, case: Case, candidate: Candidate, built: BuildReport, timing: bool
) -> tuple[str, float]:
    begin = time.perf_counter()
    if built.fault is not Fault.OK:
        return f"{built.fault}: {built.message[:80]}", 0.0
    paths = {key: path for key, address in built.artifacts.items() if (path := builder.store.path(address))}
    report = bench.evaluate(case.problem, candidate, paths, timing=timing)
    return str(report.verdict.fault), time.perf_counter() - begin


def _alone(builder: Builder, bench: Bench, case: Case) -> dict[str, Any]:
    """The first also makes the problem's reference; the others find it."""
    found = []
    for number in range(4):
        begin = time.perf_counter()
        fault, _ = _judge(builder, bench, case, case.variant(f"alone {number}"), True)
        found.append(round(time.perf_counter() - begin, 2))
        assert fault == "ok", fault
    return {"alone_first_s": found[0], "alone_s": sorted(found[1:])[1]}


def _sustained(
    builder: Builder, bench: Bench, cases: list[Case], options: argparse.Namespace, timing: bool
) -> dict[str, Any]:
    each = -(-options.candidates // len(cases))
    work = [(case, case.variant(f"{case.name} {number}")) for case in cases for number in range(each)]
    work = work[: options.candidates]
    ready: queue.Queue[tuple[Case, Candidate, BuildReport]] = queue.Queue(64)
    begin, faults, spent = time.perf_counter(), dict[str, int](), 0.0
    with ThreadPoolExecutor(options.builders) as pool:
        for case, candidate in work:
            pool.submit(lambda case=case, one=candidate: ready.put((case, one, builder.build(one))))  # type: ignore[misc]
        for _ in work:
            case, candidate, built = ready.get()
            fault, seconds = _verdict(builder, bench, case, candidate, built, timing)
            faults[fault] = faults.get(fault, 0) + 1
            spent += seconds
    total = time.perf_counter() - begin
    return {
        "candidates": len(work),
        "problems": len(cases),
        "builders": options.builders,
        "timing": timing,
        "each_s": round(total / len(work), 3),
        "bench_each_s": round(spent / len(work), 3),
        "verdicts": faults,
    }


if __name__ == "__main__":
    main()
