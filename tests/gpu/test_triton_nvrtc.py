"""What the farm built runs on the GPU: Triton from its bundle, NVRTC's machine code through our launcher, plans."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.launch.plan_module import load
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from kbrl_async.launch import cuda_kernel
from protocols.records import BenchReport, Candidate, Fault, Problem

pytestmark = pytest.mark.gpu

SCALE = r"""
#include <cuda_fp16.h>
template <typename T> __global__ void scale(const T *x, T *y, long n, T factor) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor;
}
__global__ void reverse(const float *x, float *y, int n) {
    extern __shared__ float shared[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = shared[n - 1 - i];
}
"""
TRITON = """
import torch
import torch.nn as nn
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.autotune([triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 512})], key=["n"])
@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)

@triton.jit
def copy_kernel(source, target, pair, BLOCK: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    target.store([m, n], source.load([m, n]) + tl.load(pair[0]).to(tl.float16) * pair[1])

@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    sum = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * N + n[None, :])
        sum += tl.dot(left, right)
    tl.store(c + m[:, None] * N + n[None, :], sum.to(tl.float16))

class ModelNew(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, a, b):
        c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
        M, K = a.shape
        N = b.shape[1]
        matmul_kernel[(M // 64, N // 64)](a, b, c, M, N, K, BM=64, BN=64, BK=32)
        y = torch.empty_like(c)
        scale_kernel[lambda meta: (triton.cdiv(c.numel(), meta["BLOCK"]),)](c, y, c.numel(), self.factor)
        z = torch.empty_like(y)
        pair = [TensorDescriptor(item, item.shape, item.stride(), [64, 64]) for item in (y, z)]
        copy_kernel[(M // 64, N // 64)](*pair, (self.zero, 3), BLOCK=64)
        return z
"""
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, a, b):
        return a @ b * self.factor

def get_inputs():
    return [torch.randn(256, 128).half(), torch.randn(128, 192).half()]

def get_init_inputs():
    return [0.5]
"""
CHILD = """
import json, os, subprocess, sys, tempfile, time
os.environ["TMPDIR"] = tempfile.mkdtemp()
candidate, problem, artifact = (open(path).read() for path in sys.argv[1:3]), None, sys.argv[3]
candidate, problem = list(candidate)
import linecache, torch, types
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.backends.launch.recorder import RECORDER
triton_cache.preload()
torch.zeros(1, device="cuda")

def refuse(*args, **named):
    raise AssertionError("a program was started")

subprocess.Popen.__init__ = refuse
begin = time.perf_counter()
triton_cache.prepare(artifact, "cuda")
prepared = time.perf_counter() - begin
def load(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    linecache.cache[name + ".py"] = (len(source), None, source.splitlines(keepends=True), name + ".py")
    exec(compile(source, name + ".py", "exec"), module.__dict__)
    return module
torch.manual_seed(0)
reference, module = load("problem", problem), load("candidate", candidate)
init = reference.get_init_inputs()
inputs = [item.cuda() for item in reference.get_inputs()]
expected = reference.Model(*init)(*inputs)
model = module.ModelNew(*init).cuda().requires_grad_(False)
begin = time.perf_counter()
got = model(*inputs)
torch.cuda.synchronize()
first = time.perf_counter() - begin
RECORDER.is_on = True
model(*inputs)
RECORDER.is_on = False
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = model(*inputs)
graph.replay()
torch.cuda.synchronize()
begin = time.perf_counter()
for _ in range(200):
    model(*inputs)
each = (time.perf_counter() - begin) / 200
torch.cuda.synchronize()
close = lambda a: torch.allclose(a, expected, rtol=2e-2, atol=2e-2)
print(json.dumps(dict(right=close(got), graph=close(captured), misses=int(os.environ.get(triton_cache.MISSES, "0")),
    launches={name: count for name, (count, _) in RECORDER.launches.items()}, first_ms=first * 1e3,
    each_us=each * 1e6, prepare_ms=prepared * 1e3)))
"""


@pytest.fixture(scope="module")
def builder(gpu_builder: Builder) -> Builder:
    return gpu_builder


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda.forget()


def run_child(folder: Path, artifact: Path) -> dict[str, object]:
    (folder / "candidate.py").write_text(TRITON)
    (folder / "problem.py").write_text(PROBLEM)
    command = [sys.executable, "-c", CHILD, str(folder / "candidate.py"), str(folder / "problem.py"), str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result


def test_a_bundle_from_the_farm_makes_triton_warm(builder: Builder, tmp_path: Path) -> None:
    report = builder.build(Candidate(TRITON, "triton"), Problem("L1/01_x", 1, "x", PROBLEM))
    assert report.fault is Fault.OK, report
    path = builder.store.path(next(iter(report.artifacts.values())))
    assert path is not None
    result = run_child(tmp_path, path)
    assert (result["right"], result["graph"], result["misses"]) == (True, True, 0)
    assert result["launches"] == {"matmul_kernel": 1, "scale_kernel": 1, "copy_kernel": 1}


def test_what_the_farm_left_out_of_tuning_is_not_compiled_on_the_bench(tmp_path: Path) -> None:
    with Builder(ArtifactStore(tmp_path / "store"), CompileFarm(tuning_s=1e-6)) as hasty:
        report = hasty.build(Candidate(TRITON, "triton"), Problem("L1/01_x", 1, "x", PROBLEM))
        assert (report.fault, report.hint) == (Fault.OK, "tuned over 1 configurations, 1 left out for time")
        path = hasty.store.path(next(iter(report.artifacts.values())))
        assert path is not None
        result = run_child(tmp_path, path)
    assert (result["right"], result["misses"]) == (True, 0)


def test_what_the_farm_could_not_foresee_is_compiled_without_starting_a_program(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(bundle.pack({}))
    result = run_child(tmp_path, empty)
    assert (result["right"], result["graph"]) == (True, True)
    assert result["misses"] == 4


def test_a_kernel_is_compiled_on_demand_for_a_person() -> None:
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    cuda_kernel(SCALE, "scale<float>")[4, 256](x, y, 1000, 2.5)
    assert torch.equal(y, x * 2.5)
    half = x.half()
    out = torch.empty_like(half)
    cuda_kernel(SCALE, "scale<__half>")[4, 256](half, out, 1000, 0.5)
    assert torch.equal(out, half * 0.5)


def test_more_than_48_kb_of_shared_memory_are_allowed_by_themselves() -> None:
    n = 20_000
    x = torch.randn(n, device="cuda")
    y = torch.empty_like(x)
    cuda_kernel(SCALE, "reverse")[1, 1024, 4 * n](x, y, n)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        cuda_kernel(SCALE, "reverse")[1, 1024, 400_000](x, y, n)


def test_a_launch_goes_to_the_current_stream_and_into_graphs() -> None:
    x = torch.randn(1000, device="cuda")
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    kernel = cuda_kernel(SCALE, "scale<float>")
    kernel[4, 256](x, y, 1000, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[4, 256](x, z, 1000, 3.0)
    assert not z.any()
    x.fill_(2.0)
    graph.replay()
    assert torch.equal(z, torch.full_like(z, 6.0))


def test_a_launch_costs_few_microseconds() -> None:
    x = torch.zeros(32, device="cuda")
    kernel = cuda_kernel(SCALE, "scale<float>")

    def seconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            kernel[1, 32](x, x, 32, 1.0)
        return (time.perf_counter() - begin) / 100

    best = min(seconds() for _ in range(10))
    print(f"launch {best * 1e6:.1f} us")
    assert best < 20e-6


def test_what_the_farm_built_is_what_runs(builder: Builder) -> None:
    source = f"""
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel
SOURCE = {SCALE!r}
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = cuda_kernel(SOURCE, "scale<float>")
        self.second = torch.cuda._compile_kernel(SOURCE, "reverse")
    def forward(self, x):
        y = torch.empty_like(x)
        z = torch.empty_like(x)
        self.first[4, 256](x, y, x.numel(), 2.0)
        self.second(grid=(1, 1, 1), block=(256, 1, 1), args=[y, z, z.numel()], shared_mem=4 * x.numel())
        return z
"""
    report = builder.build(Candidate(source, "cuda-nvrtc"))
    assert report.fault is Fault.OK, report
    cuda.prepare({key: str(builder.store.path(address)) for key, address in report.artifacts.items()})
    space: dict[str, object] = {}
    exec(source, space)
    x = torch.randn(1000, device="cuda")
    assert torch.equal(space["ModelNew"]()(x), (x * 2).flip(0))  # type: ignore[operator]


def test_a_plan_runs_without_any_python_of_the_candidate() -> None:
    source = f"""
SOURCE = {SCALE!r}
PLAN = {{
    "inputs": ["x"], "init": ["factor"], "sizes": {{"n": "x.numel"}},
    "kernels": {{"scale": {{"source": SOURCE, "name": "scale<float>"}}, "reverse": {{"source": SOURCE}}}},
    "buffers": {{"y": {{"shape": ["n"]}}, "z": {{"shape": ["n"]}}}},
    "steps": [
        {{"kernel": "scale", "args": ["x", "y", "n", "factor * 2"], "grid": ["cdiv(n, 256)"], "block": [256]}},
        {{"kernel": "reverse", "args": ["y", "z", "n"], "shared": "4 * n"}},
    ],
    "outputs": ["z"],
}}
"""
    loaded = load(source)
    assert loaded is not None
    x = torch.randn(1000, device="cuda")
    assert torch.equal(loaded.ModelNew(1.5)(x), (x * 3).flip(0))


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((torch.zeros(4), torch.zeros(4), 4, 1.0), "on the GPU"),
        ((4, None, 4, 1.0), "must be a tensor"),
        ((None, None, 4.5, 1.0), "is an integer"),
        ((None, None, 4), "takes 4 arguments"),
    ],
)
def test_wrong_arguments_are_named(args: tuple[object, ...], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        cuda_kernel(SCALE, "scale<float>")[1, 32](*args)


PLAN = f"""
SOURCE = {SCALE!r}
PLAN = {{
    "inputs": ["a", "b"], "init": ["factor"], "sizes": {{"n": "a.numel"}},
    "kernels": {{"scale": {{"source": SOURCE, "name": "scale<__half>"}}}},
    "buffers": {{"y": {{"shape": ["a.shape[0]", "a.shape[1]"], "dtype": "float16"}}}},
    "steps": [{{"kernel": "scale", "args": ["a", "y", "n", "factor"], "grid": ["cdiv(n, 256)"]}}],
    "outputs": ["y"],
}}
"""
SCALED = PROBLEM.replace("a @ b * self.factor", "a * self.factor")


@pytest.mark.parametrize(
    ("source", "backend", "problem", "fault"),
    [
        (TRITON, "triton", PROBLEM, Fault.OK),
        (TRITON.replace("sum += tl.dot", "sum = tl.dot"), "triton", PROBLEM, Fault.INCORRECT),
        (
            TRITON.replace("c + m[:, None] * N", "c + m[:, None].to(tl.int64) * (1 << 40)"),
            "triton",
            PROBLEM,
            Fault.ILLEGAL_ACCESS,
        ),
        (PLAN, "cuda-nvrtc", SCALED, Fault.OK),
        (PLAN.replace('"n", "factor"]', '"n", "factor * 2"]'), "cuda-nvrtc", SCALED, Fault.INCORRECT),
        (
            PLAN.replace('"n", "factor"', '"n * 1000000000", "factor"').replace("cdiv(n,", "cdiv(n * 100000,"),
            "cuda-nvrtc",
            SCALED,
            Fault.ILLEGAL_ACCESS,
        ),
    ],
    ids=["triton", "triton-wrong", "triton-illegal", "plan", "plan-wrong", "plan-illegal"],
)
def test_the_bench_judges_what_the_farm_built(
    judge: Callable[..., BenchReport], source: str, backend: str, problem: str, fault: Fault
) -> None:
    verdict = judge(problem, source, backend).verdict
    assert verdict.fault is fault, verdict
