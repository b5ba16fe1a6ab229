"""Large problems, one set at a time: the peak of a verification on a GPU against what was predicted of it, and what
lies on the host because it does not fit.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.known import Offloaded
from protocols.records import Candidate, Fault, Problem

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
BUDGET = 24 << 30
BESIDE = 4 << 30
"""Contexts, libraries and processes that wait are in nobody's plan."""
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, *given):
        {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
PROBLEMS = {
    "a reduction of 8 GiB": ("return given[0].sum(1)", "torch.rand(128, 4096, 4096)", True),
    "two inputs of 3.9 GiB": ("return (given[0] - given[1]).abs().amax(-1)", "*torch.rand(2, 32768, 32000)", False),
    "three of 2 GiB": (
        "return torch.relu(given[0] - given[1] * given[2])",
        "torch.rand(16384, 32768), torch.rand(16384, 32768), torch.rand(16384, 32768)",
        True,
    ),
}


class Watch(threading.Thread):
    """The most that was taken of the GPU, by whatever process, since it was started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        torch.cuda.synchronize()
        self._before = torch.cuda.mem_get_info()[0]
        self._ends, self.peak = threading.Event(), 0

    def run(self) -> None:
        while not self._ends.is_set():
            self.peak = max(self.peak, self._before - torch.cuda.mem_get_info()[0])
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()


@contextlib.contextmanager
def bench_with(budget: int) -> Iterator[Bench]:
    share = budget / torch.cuda.get_device_properties(0).total_memory
    options = bench_options(TimingBench(deadline_s=300.0), device="cuda:0", memory_share=share)
    with zygote_for("cuda:0") as zygote, contextlib.closing(Bench(zygote, options, random.Random(1))) as made:
        yield made


@pytest.fixture
def bench() -> Iterator[Bench]:
    with bench_with(BUDGET) as made:
        yield made


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_large_problem_takes_what_was_predicted(bench: Bench, name: str) -> None:
    forward, inputs, draws_there = PROBLEMS[name]
    source = PROBLEM.format(forward=forward, inputs=inputs)
    problem = Problem("L1/01_large", 1, "large", source)
    bench.references.get(problem)  # contexts and libraries are there
    bench.references.forget()
    torch.cuda.reset_peak_memory_stats()
    with Watch() as watch:
        found = bench.evaluate(problem, Candidate(source.replace("Model(", "ModelNew("), "torch"), {}, timing=False)
    reference = next(iter(bench.references.kept.values())).references[0]
    assert isinstance(reference, CudaReference)
    assert found.verdict.fault is Fault.OK, found.verdict
    assert not reference.keeps_sets
    assert reference.needed <= BUDGET
    assert (reference.drawn_beside < 1 << 30) is draws_there, "what `get_inputs` only draws comes about in its place"
    assert watch.peak < 1.1 * reference.needed + BESIDE, (watch.peak, reference.needed)
    own = sum(t.nbytes for t in reference.sets[0].blocks) + 3 * sum(t.nbytes for t in reference.sets[0].expected)
    assert torch.cuda.max_memory_allocated() < 1.1 * own + (1 << 30), "the bench's own: one set, and its outputs"


def test_a_set_that_was_lent_is_the_one_that_was_checked(bench: Bench) -> None:
    """What lies in the reference's arena is another set's as soon as that is looked at."""
    forward, inputs, _ = PROBLEMS["three of 2 GiB"]
    reference = bench.references.get(Problem("L1/01_large", 1, "large", PROBLEM.format(forward=forward, inputs=inputs)))
    sets = reference.references[0].sets
    sums = [[float(t.double().sum()) for t in (*one.blocks, *one.expected)] for one in sets]
    for one, before in zip(sets, sums, strict=True):
        assert [float(t.double().sum()) for t in (*one.blocks, *one.expected)] == before, one.name
        a, b, c = one.blocks
        assert torch.equal(torch.relu(a[:4096] - b[:4096] * c[:4096]), one.expected[0].flatten()[:4096])


FAR = {
    "inputs of 2 GiB": (
        PROBLEM.format(forward="return given[0].sum(1)", inputs="torch.rand(128, 2048, 2048)"),
        Offloaded(inputs=True),
        3.4,
    ),
    "weights of 2 GiB": (
        PROBLEM.format(forward="return self.linear(given[0])", inputs="torch.rand(16, 32768)").replace(
            "    def forward",
            "    def __init__(self):\n        super().__init__()\n"
            "        self.linear = nn.Linear(32768, 16384, bias=False)\n\n    def forward",
        ),
        Offloaded(weights=True),
        6.0,
    ),
}


@pytest.mark.parametrize("slower", [1, 4])
@pytest.mark.parametrize("name", FAR)
def test_what_lies_on_the_host_is_judged_and_timed_all_the_same(name: str, slower: int) -> None:
    source, offloaded, gib = FAR[name]
    again = "".join("        super().forward(*given)\n" for _ in range(slower - 1))
    candidate = source + (
        f"\n\nclass ModelNew(Model):\n    def forward(self, *given):\n{again}        return super().forward(*given)\n"
    )
    problem, budget = Problem("L1/01_large", 1, "large", source), int(gib * 2**30)
    with bench_with(budget) as bench:
        bench.references.get(problem)
        bench.references.forget()
        with Watch() as watch:
            found = bench.evaluate(problem, Candidate(candidate, "torch"), {})
        reference = next(iter(bench.references.kept.values())).references[0]
        assert isinstance(reference, CudaReference)
        assert reference.offloaded == offloaded
        assert found.verdict.fault is Fault.OK, found.verdict
        assert watch.peak < 1.1 * reference.needed + BESIDE, (watch.peak, reference.needed)
        assert found.timing is not None
        assert not found.timing.is_disturbed, found.timing
        assert 0.8 < found.timing.speedup * slower < 1.25, found.timing
        assert slower > 1 or found.timing.lo <= 1 <= found.timing.hi, found.timing
        bench.references.forget()
        assert bench.references.get(problem).references[0].host_bytes > 1 << 30, "made once more"


def test_one_that_is_wrong_by_a_single_value_is_found_from_the_host() -> None:
    source, _, gib = FAR["inputs of 2 GiB"]
    wrong = source.replace("Model(", "ModelNew(").replace("given[0].sum(1)", "given[0].sum(1).index_add_(0, *self.o())")
    wrong = wrong.replace(
        "    def forward",
        "    def o(self):\n        one = torch.zeros(1, 2048, device='cuda')\n        one[0, 7] = 1.0\n"
        "        return torch.tensor([3], device='cuda'), one\n\n    def forward",
    )
    with bench_with(int(gib * 2**30)) as bench:
        found = bench.evaluate(Problem("L1/01_large", 1, "large", source), Candidate(wrong, "torch"), {}, timing=False)
    assert found.verdict.fault is Fault.INCORRECT, found.verdict
