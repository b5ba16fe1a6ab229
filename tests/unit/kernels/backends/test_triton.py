"""Backend `triton`: compiled for real launch arguments on a host without a GPU."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.launch.pretend import inputs_of
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.backends.triton import tuning
from kbrl_async.kernels.backends.triton.arguments import BoundArguments
from kbrl_async.kernels.backends.triton.driver import Launcher
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from kbrl_async.kernels.verify.cpu.trace import OperatorWatch, recorded
from protocols.records import BuildReport, Candidate, Fault, Problem

pytest.importorskip("triton", reason="triton is not installed here")

_PROBLEM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
    def forward(self, x):
        return self.linear(x) * 2
def get_inputs():
    return [torch.randn({shape})]
def get_init_inputs():
    return [64]
"""
_TEXT = """
import torch
import torch.nn as nn
import triton
import triton.language as tl
{head}
@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, {expression}, mask=at < n)

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        assert x.is_cuda and x.device.type == "cuda"
        x = self.linear(x)
        y = torch.empty_like(x)
{body}
        return y
"""
_LAUNCH = "scale[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 2.0, BLOCK=256)"


@pytest.fixture(scope="module")
def builder(warm_builder: Builder) -> Builder:
    return warm_builder


def make(expression: str = "value * factor", body: str = _LAUNCH, head: str = "") -> Candidate:
    return Candidate(_TEXT.format(expression=expression, body=textwrap.indent(body, " " * 8), head=head), "triton")


def build(builder: Builder, candidate: Candidate, shape: str = "1 << 20, 64") -> BuildReport:
    return builder.build(candidate, Problem("L1/01_x", 1, "x", _PROBLEM.format(shape=shape)))


def files_of(builder: Builder, report: BuildReport) -> dict[str, bytes]:
    path = builder.store.path(report.artifacts[next(iter(report.artifacts))])
    assert path is not None
    return bundle.unpack(path.read_bytes())


def test_machine_code_is_made_without_a_gpu_or_the_memory_of_the_inputs(builder: Builder) -> None:
    first, second = build(builder, make()), build(builder, make())
    assert (first.fault, first.hint, first.cached, second.cached) == (Fault.OK, "", False, True)
    assert list(first.artifacts) == [triton_cache.key(make().source)]
    assert first.kernels == ["scale"]
    files = files_of(builder, first)
    assert sorted(name.rpartition(".")[2] for name in files) == ["cubin", "json"]
    assert next(files[name] for name in files if name.endswith("cubin")).startswith(b"\x7fELF")


def test_inputs_may_depend_on_values_that_were_drawn(builder: Builder) -> None:
    """They can't be made of shapes alone; without machine code from here a kernel can't be replayed."""
    looks = "    x = torch.randn(2)\n    assert torch.equal(x, x)\n    return [torch.randn"
    text = _PROBLEM.format(shape="1024, 64").replace("    return [torch.randn", looks)
    report = builder.build(make(), Problem("L1/01_looks", 1, "looks", text))
    assert (report.fault, report.kernels, report.hint) == (Fault.OK, ["scale"], "")


def test_inputs_have_memory_only_where_they_are_looked_at() -> None:
    def looks() -> list[torch.Tensor]:
        x = torch.ones(2)
        return [x] if torch.equal(x, x) else []

    with torch.device("meta"):
        plain = inputs_of(cast(Any, SimpleNamespace(get_inputs=lambda: [torch.ones(2)])))
        looked_at = inputs_of(cast(Any, SimpleNamespace(get_inputs=looks)))
    assert [tensor.device.type for tensor in plain + looked_at] == ["meta", "cpu"]


def test_what_is_launched_decides_what_is_compiled(builder: Builder) -> None:
    """Another size's divisibility is another specialisation, and so another key."""
    aligned = build(builder, make(), "1024, 64")
    odd = build(builder, make().__class__(make().source + "\n", "triton"), "1023, 63").artifacts
    shifted = build(builder, make(body="x = x.flatten()[1:]\n" + _LAUNCH), "1024, 64")
    assert odd != aligned.artifacts
    assert set(files_of(builder, aligned)) != set(files_of(builder, shifted))


GRADIENTS = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x)
BACKWARD = "inputs"
WORKLOADS = [{"shape": {"rows": 64}}, {"shape": {"rows": 63}}]
def get_inputs(rows=64):
    return [torch.randn(rows, 33)]
def get_init_inputs():
    return []
"""
WITH_BACKWARD = """
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def go(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.extra.cuda.libdevice.tanh(tl.load(x + at, mask=at < n)), mask=at < n)

@triton.jit
def back(y, g, d, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(y + at, mask=at < n)
    tl.store(d + at, tl.load(g + at, mask=at < n) * (1 - value * value), mask=at < n)

class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        go[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,), g = ctx.saved_tensors, g.contiguous()
        d = torch.empty_like(g)
        back[(triton.cdiv(g.numel(), 256),)](y, g, d, g.numel(), BLOCK=256)
        return d

class ModelNew(nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
"""


def test_kernels_of_a_backward_are_compiled_where_gradients_are_asked_for(builder: Builder) -> None:
    """What is first compiled on the bench is none that was built, and can't be replayed."""
    report = builder.build(Candidate(WITH_BACKWARD, "triton"), Problem("L5/01_x", 5, "x", GRADIENTS))
    assert (report.fault, report.kernels, report.hint) == (Fault.OK, ["back", "go"], "")
    cubins = [name for name in files_of(builder, report) if name.endswith("cubin")]
    assert len(cubins) == 4, "each for two sizes, one a multiple of 16"


TUNED = """
CONFIGS = [triton.Config({"BLOCK": size}, num_warps=warps) for size in (128, 256, 2048) for warps in (1, 4)]

@triton.autotune(CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned(x, y, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 1024, "two of the six fail, and four remain")
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n), mask=at < n)
"""
TUNED_LAUNCH = 'tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())'


def test_each_configuration_that_compiles_is_compiled(builder: Builder) -> None:
    report = build(builder, make(body=TUNED_LAUNCH, head=TUNED))
    assert (report.fault, report.hint) == (Fault.OK, "")
    assert sum(name.endswith(".cubin") for name in files_of(builder, report)) == 4
    assert tuning.FILE not in files_of(builder, report)


def test_what_a_tuners_budget_leaves_out_is_said_and_not_tried_on_the_bench(tmp_path: Path) -> None:
    farm = CompileFarm(tuning_s=1e-6)
    with Builder(ArtifactStore(tmp_path), farm) as builder:
        report = build(builder, make(body=TUNED_LAUNCH, head=TUNED))
        assert report.fault is Fault.OK
        assert report.hint == "tuned over 1 configurations, 5 left out for time"
        files = files_of(builder, report)
        assert sum(name.endswith(".cubin") for name in files) == 1
        assert list(msgspec.msgpack.decode(files[tuning.FILE])) == ["tuned"]


def test_tuning_has_its_own_minute_beside_what_a_build_may_take(tmp_path: Path) -> None:
    farm = CompileFarm(deadline_s=0.05)
    assert farm.tuning_s == 60.0
    with Builder(ArtifactStore(tmp_path), farm) as builder:
        assert build(builder, make(body=TUNED_LAUNCH, head=TUNED)).fault is Fault.OK
        plain = build(builder, make())
        assert (plain.fault, plain.message) == (Fault.COMPILE_ERROR, "compiling took longer than 0.05 s")


def test_streams_and_events_may_stand_in_annotations(builder: Builder) -> None:
    head = "def side(stream: torch.cuda.Stream | None = None, event: torch.cuda.Event | None = None): ..."
    report = build(builder, make(head=head))
    assert (report.fault, report.hint) == (Fault.OK, "")


class Tuner:
    def base_fn(self) -> None: ...


def test_what_is_launched_in_and_behind_a_graph_of_its_own_is_compiled(builder: Builder) -> None:
    head = "def captured(*arguments):\n    graph = torch.cuda.CUDAGraph()\n    with torch.cuda.graph(graph):\n"
    head += "        scale[(1,)](*arguments, BLOCK=64)\n    graph.replay()\n"
    report = build(builder, make(body="captured(x, y, x.numel(), 2.0)\n" + _LAUNCH, head=head))
    assert (report.fault, report.hint) == (Fault.OK, "")
    assert sum(name.endswith(".cubin") for name in files_of(builder, report)) == 2


def test_a_budget_is_that_of_all_tuners_and_one_configuration_of_each_is_free() -> None:
    times = iter(range(100))
    budget = tuning.TuningBudget(2.0, lambda: float(next(times)))
    other = type("Other", (), {"base_fn": staticmethod(build)})()
    made = [budget.compile(Tuner(), number, lambda number=number: number) for number in range(4)]  # type: ignore[misc]
    assert made == [0, 1, None, None]
    assert budget.compile(other, 7, lambda: 7) == 7
    assert budget.note == "tuned over 3 configurations, 2 left out for time"
    with pytest.raises(ValueError, match="no"):
        tuning.TuningBudget(1.0).compile(Tuner(), 0, lambda: int("no"))


@pytest.mark.parametrize(
    ("expression", "body", "message"),
    [
        ("tl.nothing(value)", _LAUNCH, "line 11: tl.store(y + at, tl.nothing(value), mask=at < n): "),
        ("value + tl.arange(0, 100)", _LAUNCH, "arange's range must be a power of 2"),
        ("value + undefined", _LAUNCH, "undefined is not defined"),
        ("value + tl.zeros((8, 8), tl.float32)", _LAUNCH, "line 11"),
        ("tl.device_assert_(value)", _LAUNCH, "has no attribute"),
    ],
)
def test_a_compile_error_is_found_by_the_farm(builder: Builder, expression: str, body: str, message: str) -> None:
    report = build(builder, make(expression, body))
    assert report.fault is Fault.COMPILE_ERROR
    assert message in report.message
    assert "triton_ahead" not in report.message
    assert len(report.message) <= 800
    assert report.hint


def test_too_much_shared_memory_is_found_by_the_farm(builder: Builder) -> None:
    head = """
@triton.jit
def product(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place = at[:, None] * BLOCK + at[None, :]
    sum = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(n):
        sum += tl.dot(tl.load(x + step + place), tl.load(y + step + place))
    tl.store(y + place, sum)
"""
    report = build(builder, make(body="product[(1,)](x, y, 9, BLOCK=64, num_stages=9)", head=head))
    assert report.fault is Fault.COMPILE_ERROR
    assert "out of resource: shared memory" in report.message
    assert "smaller blocks" in report.hint


@pytest.mark.parametrize(
    "body",
    [
        "n = int(x.sum().item())\n" + _LAUNCH,
        "raise ValueError('of the candidate')",
        "y = torch.relu(x)",
        "scale[(1,)](x, y)",
    ],
)
def test_what_is_no_compile_error_is_left_to_the_bench_with_a_note(builder: Builder, body: str) -> None:
    report = build(builder, make(body=body))
    assert report.fault is Fault.OK
    assert "not all was compiled ahead" in report.hint
    assert list(report.artifacts) == [triton_cache.key(make(body=body).source)]


def test_a_compiled_kernel_is_launched_with_its_constants_or_not_at_all() -> None:
    bound = BoundArguments(["*fp32", "constexpr", "i32"], None)
    bound.fill([4096, 7, 3])
    assert [cell.value for cell in bound.cells] == [4096, 3]
    for values in ([4096, 3], [4096, 7, 3, 3]):
        with pytest.raises(TypeError, match=rf"the 3 arguments .* \({len(values)} given\)"):
            bound.fill(values)


def test_what_a_launch_is_given_is_heard_where_it_is_left_out() -> None:
    """Who only copies the library's answer gives it to its kernel."""
    launcher = cast(Any, Launcher.__new__(Launcher))
    launcher._bound, launcher._scratch_cell, launcher._scratch = Mock(), Mock(), lambda *given: 0
    launcher._meta = SimpleNamespace(name="own")
    answer, watch = torch.ones(3), OperatorWatch({3})
    recorded(lambda: launcher(1, 1, 1, 0, 0, (), {}, None, None, answer, 3), watch, muted=True)
    assert [torch.equal(item, answer) for _, item in watch.kept] == [True]


def test_an_endless_loop_ends_at_the_deadline(builder: Builder) -> None:
    with Builder(builder.store, CompileFarm(deadline_s=1.0)) as hasty:
        report = build(hasty, make(body="while True: pass"))
        assert report.fault is Fault.COMPILE_ERROR
        assert "longer than 1 s" in report.message
        assert not build(hasty, make(body="while True: pass")).cached


def test_a_candidate_that_dies_in_the_farm_is_left_to_the_bench(builder: Builder) -> None:
    report = build(builder, make(body="torch.cuda.os._exit(0)"))
    assert report.fault is Fault.OK
    assert "without an answer" in report.hint


def test_without_a_problem_nothing_is_compiled(builder: Builder) -> None:
    report = builder.build(make())
    assert report.fault is Fault.OK
    assert report.kernels == []


def test_a_parameter_may_be_called_input(builder: Builder) -> None:
    named = make().source.replace("def forward(self, x):", "def forward(self, input):\n        x = input")
    assert "input" in named
    assert build(builder, Candidate(named, "triton")).fault is Fault.OK


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (make().source.replace("@triton.jit", ""), "no_kernel"),
        (make().source.replace("import torch\n", "import torch, os\n", 1), "import"),
        (make().source + "\nopen('x')", "forbidden_name"),
    ],
)
def test_what_must_not_be_built_is_refused_by_rule(builder: Builder, source: str, rule: str) -> None:
    assert build(builder, Candidate(source, "triton")).rule == rule
