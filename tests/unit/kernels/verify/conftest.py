"""One zygote and one bench for all tests of this folder: starting torch takes a second."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.sandbox import Child, Limits, Zygote
from kbrl_async.kernels.sandbox.client import DEATH_S
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from protocols.records import BenchReport, Candidate, Problem, Verdict
from tests.unit.kernels.verify import pretended_gpu

SCALE_AND_SHIFT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return x * 2 + self.shift

def get_inputs():
    return [torch.randn(16, 33)]

def get_init_inputs():
    return [1.5]
"""

Evaluate = Callable[..., BenchReport]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with zygote_for("cpu") as started:
        yield started


@pytest.fixture(scope="session")
def bench(zygote: Zygote) -> Iterator[Bench]:
    options = bench_options(
        TimingBench(deadline_s=10.0), call_floor_s=1.0, limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20)
    )
    with contextlib.closing(Bench(zygote, options)) as made:
        yield made


@pytest.fixture(scope="session")
def watching(zygote: Zygote) -> Iterator[Bench]:
    """A bench that judges every candidate in its own process: what guards there is needed wherever nothing can be
    recorded."""
    options = bench_options(
        TimingBench(deadline_s=10.0),
        call_floor_s=1.0,
        limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20),
        replay=False,
    )
    with contextlib.closing(Bench(zygote, options)) as made:
        yield made


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


@pytest.fixture(scope="session")
def evaluate(watching: Bench) -> Evaluate:
    """Evaluate a candidate as it stands, in its own process: no static check stands before the bench.

    Backend `torch` brings no kernels of its own, and the bench asks for none: everything else is checked.
    """

    def run(
        source: str, *, problem: str = SCALE_AND_SHIFT, timing: bool = False, backend: str = "", **artifacts: Path
    ) -> BenchReport:
        chosen = Candidate(source, backend or ("c" if artifacts else "torch"))
        return watching.evaluate(Problem("L1/01_test", 1, "test", problem), chosen, dict(artifacts), timing=timing)

    return run


@pytest.fixture
def built_and_judged(bench: Bench, watching: Bench, builder: Builder) -> Callable[..., Verdict]:
    """Of a candidate in C for a problem's text, replayed or in its own process."""

    def run(source: str, problem: str, replay: bool = True) -> Verdict:
        candidate = Candidate(source, "c")
        paths = artifact_paths(builder.store, builder.build(candidate))
        judge = bench if replay else watching
        return judge.evaluate(Problem("L1/01_a", 1, "a", problem), candidate, paths, timing=False).verdict

    return run


@pytest.fixture
def slow_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which whoever dies is still there for longer than anybody waits who does not know that it dies."""
    honest, awaited = Child.has_ended, list[Child]()

    def has_ended(self: Child, within_s: float = 0.0) -> bool:
        if within_s >= DEATH_S:
            awaited.append(self)
        return any(one is self for one in awaited) and honest(self, within_s)

    monkeypatch.setattr(Child, "has_ended", has_ended)


@pytest.fixture
def compile_raw(tmp_path: Path) -> Callable[[str], dict[str, Path]]:
    """A C source straight through gcc, hostile or not."""

    def run(source: str) -> dict[str, Path]:
        target = tmp_path / "raw.so"
        command = ["gcc", "-O1", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(target)]
        subprocess.run(command, input=source.encode(), check=True)
        return {launch.source_key(source): target}

    return run


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[pretended_gpu.Memory]:
    with torch.no_grad():
        yield pretended_gpu.pretend(monkeypatch)
