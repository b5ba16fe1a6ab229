"""Extensions: built the fast way, in full, and by torch itself; and run on this host's device."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch as pytorch

from benchmarks.harness import CORES, Result, command, say
from benchmarks.verification.cuda_candidates import CPP, CUDA, NEED_FULL, Case
from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.inline.flags import chosen
from kbrl_async.kernels.backends.inline.recording import read
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.funnel import Builder, artifact_paths
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Candidate, Fault

_TOLERANCES = {pytorch.float16: 1e-2, pytorch.bfloat16: 1e-2}


def build(
    backend: Literal["cuda", "cpp"] = "cuda",
    candidates: Annotated[int, "distinct ones of the sustained part"] = 16,
    parallel: int = len(CORES),
    torch: Annotated[int, "so many by torch itself too: the first alone, the others at once"] = 0,
    equality: Annotated[bool, "the whole corpus fast and in full"] = False,
    execute: Annotated[bool, "the fast-built corpus on this host's device, against its references"] = False,
    arch: str = "sm_90",
) -> Result:
    """How fast extensions are built, against torch's own `load_inline`; and whether verdicts are equal."""
    cases = CUDA if backend == "cuda" else CPP
    result: Result = {"backend": backend, "toolchain": toolchain().label(True)}
    with (
        tempfile.TemporaryDirectory() as root,
        Builder(ArtifactStore(Path(root)), CompileFarm(deadline_s=60.0, arch=arch)) as builder,
        ThreadPoolExecutor(parallel) as pool,
    ):
        result |= {"parallel": parallel, **_speed(builder, cases, candidates, pool)}
        if execute:
            result |= _execute(builder, cases, pool)
        if equality:
            result |= _equality(builder, cases, pool)
    return result | (_torch(cases[0], torch) if torch else {})


def _speed(builder: Builder, cases: list[Case], count: int, pool: ThreadPoolExecutor) -> Result:
    """The first is warm-up: it starts the zygotes and reads torch's headers once."""
    good = [case for case in cases if case.compiles and case.name not in NEED_FULL]

    def way(candidate: Candidate) -> str:
        report = builder.build(candidate)
        return report.toolchain.rpartition(" ")[2] if report.fault is Fault.OK else report.message

    way(good[0].variant("warm-up"))
    alone = []
    for number in range(3):
        begin = time.perf_counter()
        assert way(good[0].variant(f"alone {number}")) == "fast"
        alone.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    ways = list(pool.map(way, (good[number % len(good)].variant(f"variant {number}") for number in range(count))))
    spent = time.perf_counter() - begin
    slow = [found for found in ways if found != "fast"]
    say(f"fast: alone {min(alone):.2f} s; {count} in {spent:.1f} s; not fast: {slow[:5]}")
    sustained = {"sustained_candidates": count, "fast_each_s": spent / count, "not_built_fast": len(slow)}
    return {"fast_alone_s": median(alone), **sustained}


def _equality(builder: Builder, cases: list[Case], pool: ThreadPoolExecutor) -> Result:
    """Each case both ways. The full build is made even where the fast one was enough."""
    begin = time.perf_counter()
    workshop = builder.context

    def both(case: Case) -> tuple[str, str, str]:
        extensions = read(ast.parse(case.candidate.source))
        assert extensions is not None, "the corpus is written to be read"
        flags = chosen(extensions[0], workshop.farm.arch)
        build = Build(extensions[0], flags, toolchain(), workshop)
        fast = build.fast()
        try:
            full = build.full(fast.failed_units)
        except MissingTool as error:
            return case.name, "built" if fast.is_built else "failed", f"not here: {error.cause}"
        is_full = full.is_built and not full.open_symbols
        return case.name, "built" if fast.is_built else "failed", "built" if is_full else "failed"

    rows = list(pool.map(both, cases))
    expected = {case.name: "built" if case.compiles else "failed" for case in cases}
    # A failed fast build says nothing: the full one is asked. So a verdict differs where fast built what full refuses.
    differing = [name for name, fast, full in rows if fast == "built" and full != "built"]
    surprising = [name for name, _, full in rows if full in ("built", "failed") and full != expected[name]]
    asked = [name for name, fast, full in rows if fast == "failed" and full == "built"]
    absent = [name for name, _, full in rows if full.startswith("not here")]
    return {
        "equality_cases": len(rows),
        "equality_s": time.perf_counter() - begin,
        "verdicts_that_differ": differing,
        "verdicts_not_expected": surprising,
        "built_by_the_full_way_only": asked,
        "full_not_possible_here": absent,
    }


def _execute(builder: Builder, cases: list[Case], pool: ThreadPoolExecutor) -> Result:
    good = [case for case in cases if case.compiles]
    reports = dict(
        zip((c.name for c in good), pool.map(lambda c: builder.build(c.candidate, c.problem), good), strict=True)
    )
    unbuilt = {name: report.message for name, report in reports.items() if not report.artifacts}
    artifacts = {c.name: artifact_paths(builder.store, reports[c.name]) for c in good if c.name not in unbuilt}
    return {"executed": len(artifacts), "not_built": unbuilt, "wrong": executed(artifacts)}


def executed(artifacts: dict[str, dict[str, Path]]) -> Any:
    """What is wrong with built candidates of the corpus, by name; they run in a process of their own."""
    orders = {name: {key: str(path) for key, path in paths.items()} for name, paths in artifacts.items()}
    words = command("verification", "execute")
    done = subprocess.run(words, input=json.dumps(orders), capture_output=True, text=True, timeout=300, check=False)
    return json.loads((done.stdout.strip().splitlines() or [json.dumps({"died": done.stderr[-400:]})])[-1])


def execute() -> None:
    """Runs built candidates against their references: paths of artifacts on stdin, what is wrong on stdout."""
    orders: dict[str, dict[str, str]] = json.load(sys.stdin)
    inline.install({key: path for artifacts in orders.values() for key, path in artifacts.items()})
    wrong = {case.name: words for case in (*CUDA, *CPP) if case.name in orders and (words := _wrong(case))}
    print(json.dumps(wrong))


def _wrong(case: Case) -> str:
    """Empty where it is right."""
    try:
        _compare(case)
        message = ""
    except Exception as error:  # whatever it is, it is the answer
        message = f"{type(error).__name__}: {error}"
    if case.raises:
        return "" if case.raises in message else f"should raise {case.raises!r}: {message}"[:300]
    return message[:300]


def _compare(case: Case) -> None:
    device = "cuda" if case.cuda else "cpu"
    problem: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    exec(compile(case.problem.source, "problem.py", "exec"), problem)
    exec(compile(case.candidate.source, "candidate.py", "exec"), candidate)
    pytorch.manual_seed(0)
    inputs = [tensor.to(device) for tensor in problem["get_inputs"]()]
    expected = problem["Model"]()(*inputs)
    tolerance = _TOLERANCES.get(expected.dtype, 1e-4)
    pytorch.testing.assert_close(candidate["ModelNew"]()(*inputs), expected, atol=tolerance, rtol=tolerance)


_BY_TORCH = """
import sys, time
begin = time.perf_counter()
exec(open(sys.argv[1]).read())
print(time.perf_counter() - begin)
"""


def _torch(case: Case, count: int) -> Result:
    """torch's own way, in fresh processes with fresh build folders: one alone, then the others at once."""

    def seconds(number: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "candidate.py"
            source.write_text(case.variant(f"by torch {number} {time.time()}").source)
            environment = os.environ | {"TORCH_EXTENSIONS_DIR": folder, "TORCH_CUDA_ARCH_LIST": "9.0", "MAX_JOBS": "2"}
            words = [sys.executable, "-c", _BY_TORCH, str(source)]
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                say(done.stderr[-600:])
                return float("nan")
            return float(done.stdout.strip().splitlines()[-1])

    alone = seconds(0)
    result: Result = {"torch_alone_s": alone}
    if count > 1:
        begin = time.perf_counter()
        with ThreadPoolExecutor(count - 1) as pool:
            list(pool.map(seconds, range(1, count)))
        spent = time.perf_counter() - begin
        result |= {"torch_at_once": count - 1, "torch_at_once_s": spent}
        result["torch_each_s"] = spent / (count - 1)
    return result
