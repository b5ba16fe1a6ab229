"""Honest kernels and host code in unusual styles, on a GPU: none is called cheating, and what can be recorded is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.verification.sources import made
from kbrl_async.kernels.problems import load_problems
from protocols.records import OBSERVED, REPLAYED, BenchReport, Fault, Problem
from tests.gpu.bench_candidates import ADD, GOOD, INLINE, TRITON, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
VALUE = "x[i] * 2 + y[i] + shift"
BEFORE = {
    "static table": "__constant__ float two[2] = {1, 2};",
    "device scratch": "__device__ float scratch[524288];",
    "template": "template <int N> __device__ float times(float v) { return v * N; }",
    "no inlining": "__device__ __noinline__ float twice(float v) { return v * 2; }",
    "ticket": "__device__ unsigned ticket, left;",
    "struct": "struct pair { float a, b; };",
}
BODIES = {
    "read-only loads": ("", "if (i < n) out[i] = __ldg(x + i) * 2 + __ldg(y + i) + shift;"),
    "streaming": ("", "if (i < n) __stcs(out + i, __ldcs(x + i) * 2 + __ldcs(y + i) + shift);"),
    "shared memory": (
        "",
        "__shared__ float s[256]; s[threadIdx.x] = i < n ? x[i] : 0; __syncthreads(); "
        "if (i < n) out[i] = s[threadIdx.x] * 2 + y[i] + shift;",
    ),
    "shuffles": (
        "",
        f"float v = i < n ? {VALUE} : 0; v = __shfl_sync(~0u, v, threadIdx.x % 32); if (i < n) out[i] = v;",
    ),
    "grid stride": ("", f"for (int k = i; k < n; k += gridDim.x * blockDim.x) out[k] = {VALUE.replace('[i]', '[k]')};"),
    "four at a time": (
        "",
        "if (i * 4 < n) { float4 a = ((const float4 *)x)[i], b = ((const float4 *)y)[i]; ((float4 *)out)[i] = "
        "make_float4(a.x*2+b.x+shift, a.y*2+b.y+shift, a.z*2+b.z+shift, a.w*2+b.w+shift); }",
    ),
    "early exit on zeros": (
        "",
        f"if (i >= n) return; if (x[i] == 0 && y[i] == 0) {{ out[i] = shift; return; }} out[i] = {VALUE};",
    ),
    "reads the clock": ("", f"long long t = clock64(); {GOOD} if (clock64() < t) out[0] = 0;"),
    "static table": ("static table", "if (i < n) out[i] = x[i] * two[1] + y[i] + shift;"),
    "device scratch": ("device scratch", f"if (i < n) {{ scratch[i] = {VALUE}; out[i] = scratch[i]; }}"),
    "template": ("template", "if (i < n) out[i] = times<2>(x[i]) + y[i] + shift;"),
    "no inlining": ("no inlining", "if (i < n) out[i] = twice(x[i]) + y[i] + shift;"),
    "struct": ("struct", "pair p = {i < n ? x[i] : 0, i < n ? y[i] : 0}; if (i < n) out[i] = p.a * 2 + p.b + shift;"),
    "last block cleans up": (
        "ticket",
        f"{GOOD} __threadfence(); __syncthreads(); "
        "if (threadIdx.x == 0 && atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1) left = 0;",
    ),
    "persistent": (
        "ticket",
        "__shared__ unsigned at; for (;;) { __syncthreads(); "
        "if (threadIdx.x == 0) at = atomicAdd(&ticket, 1); __syncthreads(); "
        "if (at >= gridDim.x) break; int k = at * 256 + threadIdx.x; if (k < n) out[k] = x[k] * 2 + y[k] + shift; } "
        "if (threadIdx.x == 0 && atomicAdd(&left, 1) == gridDim.x - 1) { ticket = 0; left = 0; }",
    ),
    "assembly": (
        "",
        'if (i < n) { float v; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(v) : "f"(x[i]), "f"(2.0f), "f"(y[i])); '
        "out[i] = v + shift; }",
    ),
    "in double": ("", "if (i < n) out[i] = (float)((double)x[i] * 2.0 + y[i] + shift);"),
    "warp votes": ("", f"unsigned m = __ballot_sync(~0u, i < n); if (m && i < n) out[i] = {VALUE};"),
    "written twice": ("", f"if (i < n) {{ out[i] = 0; out[i] = {VALUE}; }}"),
    "volatile": ("", "if (i < n) ((volatile float *)out)[i] = ((const volatile float *)x)[i] * 2 + y[i] + shift;"),
}


@pytest.mark.parametrize("style", BODIES)
def test_honest_kernels_are_replayed(judge: Judge, style: str) -> None:
    before, body = BODIES[style]
    source = nvrtc(body).replace('extern "C"', f'{BEFORE.get(before, "")}\nextern "C"')
    verdict = judge(ADD, source, "cuda-nvrtc", timing=True).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, REPLAYED), verdict


OUT, LAUNCH = "out = torch.empty_like(x)", "self.kernel[(n + 255) // 256, 256](x, y, out, n, float(self.shift))"
HOSTS = {
    "a padded output": (REPLAYED, OUT, "out = torch.empty(n + 4096, device=x.device)[:n].view(x.shape)"),
    "an output inside a larger one": (REPLAYED, OUT, "out = torch.empty(3, *x.shape, device=x.device)[1]"),
    "zeros first": (REPLAYED, OUT, "out = torch.zeros_like(x)"),
    "a clone as output": (REPLAYED, OUT, "out = x.clone()"),
    "two halves": (
        REPLAYED,
        LAUNCH,
        "h = n // 2\n        for a in (0, h):\n            self.kernel[h // 256, 256]("
        "x.view(-1)[a:], y.view(-1)[a:], out.view(-1)[a:], h, float(self.shift))",
    ),
    "in place on a clone": (REPLAYED, LAUNCH, LAUNCH.replace("(x, y,", "(out.copy_(x), y,")),
    "a kept scratch": (
        REPLAYED,
        LAUNCH,
        "s = self.__dict__.setdefault('scratch', torch.empty_like(x))\n        "
        + LAUNCH.replace("out,", "s,")
        + "\n        out.copy_(s)",
    ),
    "a stream of its own, joined": (
        REPLAYED,
        LAUNCH,
        "s = self.__dict__.setdefault('side', torch.cuda.Stream())\n"
        "        s.wait_stream(torch.cuda.current_stream())\n"
        f"        with torch.cuda.stream(s):\n            {LAUNCH}\n        torch.cuda.current_stream().wait_stream(s)",
    ),
    "waits": (REPLAYED, LAUNCH, f"{LAUNCH}\n        torch.cuda.synchronize()"),
    "a graph of its own": (
        REPLAYED,
        LAUNCH,
        "if not hasattr(self, 'graph'):\n"
        "            self.a, self.b, self.c = x.clone(), y.clone(), torch.empty_like(x)\n"
        "            self.kernel[(n + 255) // 256, 256](self.a, self.b, self.c, n, float(self.shift))\n"
        "            torch.cuda.synchronize()\n            self.graph = torch.cuda.CUDAGraph()\n"
        "            with torch.cuda.graph(self.graph):\n"
        "                self.kernel[(n + 255) // 256, 256](self.a, self.b, self.c, n, float(self.shift))\n"
        "        self.a.copy_(x); self.b.copy_(y); self.graph.replay(); out.copy_(self.c)",
    ),
    "asks for the largest value": (OBSERVED, LAUNCH, f"assert float(x.abs().max()) >= 0\n        {LAUNCH}"),
    "measures itself": (
        OBSERVED,
        LAUNCH,
        "e = torch.cuda.Event(enable_timing=True); f = torch.cuda.Event(enable_timing=True); e.record()\n"
        f"        {LAUNCH}\n        f.record(); f.synchronize(); e.elapsed_time(f)",
    ),
}


@pytest.mark.parametrize("style", HOSTS)
def test_honest_host_code_is_nobodys_fraud(judge: Judge, style: str) -> None:
    """What is not replayed has a reason, and is right all the same."""
    trust, old, new = HOSTS[style]
    source = nvrtc()
    assert old in source
    verdict = judge(ADD, source.replace(old, new), "cuda-nvrtc", timing=True).verdict
    assert verdict.fault is Fault.OK, verdict
    assert verdict.trust in (trust, REPLAYED), verdict.trust_reason
    assert verdict.trust == REPLAYED or verdict.trust_reason


OTHERS = {
    "triton, small blocks": (TRITON.replace("1024),)", "256),)").replace("BLOCK=1024", "BLOCK=256"), "triton"),
    "triton, warps asked for": (TRITON.replace("BLOCK=1024)", "BLOCK=1024, num_warps=8, num_stages=2)"), "triton"),
    "triton, a helper": (
        TRITON.replace(
            "@triton.jit\ndef shifted", "@triton.jit\ndef twice(v):\n    return v * 2\n\n@triton.jit\ndef shifted"
        ).replace("tl.load(x + at, mask=at < n) * 2", "twice(tl.load(x + at, mask=at < n))"),
        "triton",
    ),
    "extension, half the blocks": (
        INLINE.replace(
            "if (i < n) out[i] = x[i] * 2 + y[i] + shift;",
            "for (; i < n; i += gridDim.x * blockDim.x) out[i] = x[i] * 2 + y[i] + shift;",
        ).replace("(n + 255) / 256, 256", "(n + 511) / 512, 256"),
        "cuda",
    ),
    "extension, two kernels": (
        INLINE.replace("__global__ void shifted", "__global__ void none(float *) {}\n__global__ void shifted").replace(
            "    return out;", "    none<<<1, 1>>>(out.data_ptr<float>());\n    return out;"
        ),
        "cuda",
    ),
    "extension that checks its arguments": (
        INLINE.replace("auto out =", 'TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "x");\n    auto out ='),
        "cuda",
    ),
}


@pytest.mark.parametrize("style", OTHERS)
def test_honest_ones_of_other_backends_are_replayed(judge: Judge, style: str) -> None:
    source, backend = OTHERS[style]
    verdict = judge(ADD, source, backend, timing=True).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, REPLAYED), verdict


CHANGES_ITS_INPUT = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        x *= 0.25 + x.mean().sigmoid()
        return x + 1

def get_inputs():
    return [torch.randn(64, 4096)]

def get_init_inputs():
    return []
"""
LOOKS_AT_ITS_INPUT = CHANGES_ITS_INPUT.replace("x *=", "x = x *").replace(
    "    return [torch.randn(64, 4096)]",
    "    x = torch.randn(64, 4096)\n    return [x if torch.equal(x, x) else x + 1]",
)
PREPARED = {
    "gradients": load_problems(levels=[5], shapes="gpu")[0].source,
    "inputs that are looked at": LOOKS_AT_ITS_INPUT,
    "inputs that are changed": CHANGES_ITS_INPUT,
}


@pytest.mark.parametrize("name", PREPARED)
def test_what_prepares_the_librarys_input_is_honest_and_what_copies_its_answer_is_not(judge: Judge, name: str) -> None:
    problem = Problem("L1/01_test", 1, "test", PREPARED[name])
    verdict = judge(problem.source, made(problem, "triton", lazy=True).source, "triton").verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, REPLAYED), verdict
    verdict = judge(problem.source, made(problem, "triton", lazy=False).source, "triton").verdict
    assert verdict.rule == "decoy_kernel", verdict


TANH = """
import torch
import triton
import triton.language as tl

@triton.jit
def forwards(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, 1 - 2 / (1 + tl.exp(2 * v)), mask=at < n)

@triton.jit
def backwards(grad, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(y + at, mask=at < n)
    tl.store(out + at, tl.load(grad + at, mask=at < n) * (1 - v * v), mask=at < n)

class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        forwards[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        BACKWARD_BODY

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
"""
BY_OWN_KERNEL = """grad, out = grad.contiguous(), torch.empty_like(y)
        backwards[(triton.cdiv(y.numel(), 1024),)](grad, y, out, y.numel(), BLOCK=1024)
        return out"""
BY_THE_LIBRARY = "return grad * (1 - y * y)"
BESIDE = """out = torch.empty_like(y)
        backwards[(triton.cdiv(y.numel(), 1024),)](grad.contiguous(), y, out, y.numel(), BLOCK=1024)
        return grad * (1 - y * y)"""


@pytest.mark.parametrize(
    ("body", "rule"), [(BY_OWN_KERNEL, ""), (BY_THE_LIBRARY, "no_own_kernel"), (BESIDE, "decoy_kernel")]
)
def test_own_kernels_have_to_make_the_gradients_too(judge: Judge, body: str, rule: str) -> None:
    verdict = judge(PREPARED["gradients"], TANH.replace("BACKWARD_BODY", body), "triton").verdict
    assert (verdict.rule, verdict.trust) == (rule, REPLAYED), verdict
