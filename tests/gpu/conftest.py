"""GPU tests run where there is a CUDA device and are skipped, with the reason, elsewhere.

Several share a GPU, but for those that need its memory or its time for themselves, which come after them::

    pytest tests/gpu -n 5 -m 'not alone'
    pytest tests/gpu -m alone

Where there are several GPUs, workers are spread over them: ten for two GPUs, and ``-n 2 -m alone`` gives each test a
GPU of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.runs.config.placement import VISIBLE, inventory
from protocols.records import BenchReport, Candidate, Fault, Problem

Evaluate = Callable[..., BenchReport]


def _own_gpu() -> None:
    """Of several GPUs a worker sees one only. Before anything asks CUDA, which reads the variable once; whoever is
    started by a test inherits it.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    gpus = inventory(os.environ) if worker else []
    if len(gpus) > 1:
        os.environ[VISIBLE] = gpus[int(worker.removeprefix("gw")) % len(gpus)].id


_own_gpu()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this host"))


@pytest.fixture(scope="session")
def gpu_bench() -> Iterator[Bench]:
    with (
        zygote_for("cuda:0") as zygote,
        contextlib.closing(Bench(zygote, bench_options(TimingBench(), device="cuda:0"))) as bench,
    ):
        yield bench


@pytest.fixture(scope="session")
def gpu_builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as builder:
        yield builder


@pytest.fixture(scope="session")
def open_builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """As of `kbrl verify`: any Python that runs confined. Five workers that build eight at once each took 16 cores'
    builds beyond the usual 20 s."""
    farm = CompileFarm(nice=0, rules="open", deadline_s=120.0)
    with Builder(ArtifactStore(tmp_path_factory.mktemp("open")), farm) as builder:
        yield builder


@pytest.fixture(scope="session")
def judge(gpu_bench: Bench, gpu_builder: Builder) -> Evaluate:
    """From source to report. Backend `torch`: neither checked nor built, and no kernel of its own is asked for."""

    def run(problem: str, source: str, backend: str = "torch", *, timing: bool = False) -> BenchReport:
        posed, candidate = Problem("L1/01_test", 1, "test", problem), Candidate(source, backend)
        if backend == "torch":
            return gpu_bench.evaluate(posed, candidate, {}, timing=timing)
        built = gpu_builder.build(candidate, posed)
        assert built.fault is Fault.OK, built.message
        paths = {key: gpu_builder.store.path(address) for key, address in built.artifacts.items()}
        found = {key: path for key, path in paths.items() if path is not None}
        return gpu_bench.evaluate(posed, candidate, found, timing=timing)

    return run
