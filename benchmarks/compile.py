"""How fast extensions are built, against torch's own `load_inline` in the same run; and whether verdicts are equal.

Usage: `python -m benchmarks.compile [--candidates N] [--parallel N] [--torch N] [--equality] [--execute] [--backend B]`

`--torch N` also builds N candidates by torch itself, the first alone, the others at once. `--equality` builds the whole
corpus fast and in full and compares. `--execute` runs the fast-built corpus on this host's device against its
references. One JSON line last.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.cuda_candidates import CPP, CUDA, Case
from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.inline.flags import chosen
from kbrl_async.kernels.backends.inline.recording import read
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Fault


def main() -> None:
    options = _options()
    cases = CUDA if options.backend == "cuda" else CPP
    with tempfile.TemporaryDirectory() as root:
        build_options = CompileFarm(deadline_s=60.0, arch=options.arch)
        with Builder(ArtifactStore(Path(root)), build_options) as builder:
            result = {"benchmark": "compile", "backend": options.backend, "machine": _machine()}
            result |= _speed(builder, cases, options.candidates, options.parallel)
            if options.execute:
                result |= _execute(builder, cases, options.parallel)
            if options.equality:
                result |= _equality(builder, cases, options.parallel)
    if options.torch:
        result |= _torch(cases[0], options.torch, options.backend)
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpp"), default="cuda")
    parser.add_argument("--candidates", type=int, default=16, help="distinct candidates of the sustained part")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--torch", type=int, default=0, metavar="N")
    parser.add_argument("--equality", action="store_true")
    parser.add_argument("--execute", action="store_true")
    parser.add_argument("--arch", default="sm_90")
    return parser.parse_args()


def _machine() -> str:
    return f"{platform.node() and platform.machine()}, {os.cpu_count()} cores, {toolchain().label(True)}"


def _speed(builder: Builder, cases: list[Case], count: int, parallel: int) -> dict[str, Any]:
    """The first is warm-up: it starts the zygotes and reads torch's headers once."""
    good = [case for case in cases if case.compiles and case.name not in _NEED_FULL]
    builder.build(good[0].variant("warm-up"))
    alone = []
    for number in range(3):
        begin = time.perf_counter()
        report = builder.build(good[0].variant(f"alone {number}"))
        alone.append(time.perf_counter() - begin)
        assert report.fault is Fault.OK, report.message
    begin = time.perf_counter()
    with ThreadPoolExecutor(parallel) as pool:
        distinct = [good[number % len(good)].variant(f"variant {number}") for number in range(count)]
        reports = list(pool.map(_attempt(builder), distinct))
    spent = time.perf_counter() - begin
    wrong = [number for number, report in enumerate(reports) if report != "fast"]
    print(
        f"fast: alone {min(alone):.2f} s; {count} by {parallel} in {spent:.1f} s; not fast: {wrong[:5]}",
        file=sys.stderr,
    )
    return {
        "fast_alone_s": round(sorted(alone)[1], 3),
        "sustained_candidates": count,
        "parallel": parallel,
        "fast_each_s": round(spent / count, 3),
        "not_built_fast": len(wrong),
    }


_NEED_FULL = ("full_headers_needed", "cublas")


def _attempt(builder: Builder) -> Any:
    def attempt(candidate: Any) -> str:
        report = builder.build(candidate)
        return report.toolchain.rpartition(" ")[2] if report.fault is Fault.OK else report.message

    return attempt


def _equality(builder: Builder, cases: list[Case], parallel: int) -> dict[str, Any]:
    """Each case both ways. The full build is made even where the fast one was enough."""
    begin = time.perf_counter()
    workshop = builder._workshop

    def both(case: Case) -> tuple[str, str, str]:
        extensions = read(ast.parse(case.candidate.source))
        assert extensions is not None, "the corpus is written to be read"
        flags = chosen(extensions[0], workshop.options.arch)
        build = Build(extensions[0], flags, toolchain(), workshop)
        fast = build.fast()
        try:
            full = build.full(fast.failed_units)
        except MissingTool as error:
            return case.name, "built" if fast.is_built else "failed", f"not here: {error.cause}"
        is_full = full.is_built and not full.open_symbols
        return case.name, "built" if fast.is_built else "failed", "built" if is_full else "failed"

    with ThreadPoolExecutor(parallel) as pool:
        rows = list(pool.map(both, cases))
    expected = {case.name: "built" if case.compiles else "failed" for case in cases}
    # A failed fast build says nothing: the full one is asked. So a verdict differs where fast built what full refuses.
    differing = [name for name, fast, full in rows if fast == "built" and full != "built"]
    surprising = [name for name, _, full in rows if full in ("built", "failed") and full != expected[name]]
    asked = [name for name, fast, full in rows if fast == "failed" and full == "built"]
    absent = [name for name, _, full in rows if full.startswith("not here")]
    return {
        "equality_cases": len(rows),
        "equality_s": round(time.perf_counter() - begin, 1),
        "verdicts_that_differ": differing,
        "verdicts_not_expected": surprising,
        "built_by_the_full_way_only": asked,
        "full_not_possible_here": absent,
    }


def _execute(builder: Builder, cases: list[Case], parallel: int) -> dict[str, Any]:
    good = [case for case in cases if case.compiles]
    with ThreadPoolExecutor(parallel) as pool:
        reports = list(pool.map(lambda case: builder.build(case.candidate, case.problem), good))
    orders = []
    for case, report in zip(good, reports, strict=True):
        if not report.artifacts:
            continue
        paths = {key: str(builder.store.path(address)) for key, address in report.artifacts.items()}
        row = {"name": case.name, "source": case.candidate.source, "problem": case.problem.source}
        orders.append(row | {"artifacts": paths, "raises": case.raises})
    command = [sys.executable, "-m", "benchmarks.cuda_candidates.execute"]
    done = subprocess.run(command, input=json.dumps(orders), capture_output=True, text=True, timeout=300, check=False)
    answer = done.stdout.strip().splitlines()[-1:] or [json.dumps({"died": done.stderr[-400:]})]
    unbuilt = {case.name: report.message for case, report in zip(good, reports, strict=True) if not report.artifacts}
    return {"executed": len(good) - len(unbuilt), "not_built": unbuilt, "wrong": json.loads(answer[0])}


_BY_TORCH = """
import sys, time
begin = time.perf_counter()
exec(open(sys.argv[1]).read())
print(time.perf_counter() - begin)
"""


def _torch(case: Case, count: int, backend: str) -> dict[str, Any]:
    """torch's own way, in fresh processes with fresh build folders: one alone, then the others at once."""

    def build(number: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "candidate.py"
            source.write_text(case.variant(f"by torch {number} {time.time()}").source)
            environment = os.environ | {"TORCH_EXTENSIONS_DIR": folder, "TORCH_CUDA_ARCH_LIST": "9.0", "MAX_JOBS": "2"}
            command = [sys.executable, "-c", _BY_TORCH, str(source)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                print(done.stderr[-600:], file=sys.stderr)
                return float("nan")
            return float(done.stdout.strip().splitlines()[-1])

    alone = build(0)
    result: dict[str, Any] = {"torch_alone_s": round(alone, 1)}
    if count > 1:
        begin = time.perf_counter()
        with ThreadPoolExecutor(count - 1) as pool:
            list(pool.map(build, range(1, count)))
        spent = time.perf_counter() - begin
        result |= {"torch_at_once": count - 1, "torch_at_once_s": round(spent, 1)}
        result["torch_each_s"] = round(spent / (count - 1), 2)
    return result


if __name__ == "__main__":
    main()
