"""Candidates by how they do their work, each with what its recording consists of, or why it can't be recorded."""

from __future__ import annotations

import msgspec

_HEAD = """
import torch
import torch.nn as nn
"""
_PROBLEM = (
    _HEAD
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        return {result}

def get_inputs():
    return [torch.randn(512, 1024)]

def get_init_inputs():
    return []
"""
)
TWICE = _PROBLEM.format(init="pass", result="x * 2")
LINEAR = _PROBLEM.format(init="self.linear = nn.Linear(1024, 256)", result="self.linear(x) * 2")
_MODEL = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
{body}
"""
_TRITON = (
    _HEAD
    + """
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def tiles(source, target, BLOCK: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    target.store([m, n], source.load([m, n]) * 2)
"""
)
_LAUNCH = "twice[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024"
_CUDA = (
    _HEAD
    + '''
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <ATen/cuda/CUDAContext.h>
__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty_like(x);
BODY
  return y;
}
"""
extension = load_inline(
    name="e", cpp_sources="torch::Tensor run(torch::Tensor x);", cuda_sources=CUDA, functions=["run"]
)
'''
)
_ARGUMENTS = "(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());"
_PLAIN = f"  twice<<<(x.numel() + 255) / 256, 256>>>{_ARGUMENTS}"
_NVRTC = (
    _HEAD
    + '''
from kbrl_async.launch import cuda_kernel

SOURCE = r"""
__device__ int calls = 0;
extern "C" __global__ void twice(const float *x, float *y, int n) {
    extern __shared__ float held[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) calls++;
    held[threadIdx.x] = i < n ? x[i] : 0.0f;
    if (i < n) y[i] = 2.0f * held[threadIdx.x];
}
"""
'''
)


class Kind(msgspec.Struct, frozen=True):
    source: str
    backend: str
    nodes: tuple[str, ...] = ()
    """Of one forward, by type; of operators, their names."""
    refused: str = ""
    """Part of the reason."""
    problem: str = TWICE


def model(*body: str, init: str = "pass") -> str:
    return _MODEL.format(init=init, body="\n".join(f"        {line}" for line in body))


def triton(*body: str, init: str = "pass") -> str:
    return _TRITON + model(*body, init=init)


def cuda(*body: str) -> str:
    return _CUDA.replace("BODY", "\n".join(body)) + model("return extension.run(x)")


def graphed(*body: str, init: str = "pass") -> str:
    """Once it captures these lines, which take `self.a` to `self.y`; then it replays them."""
    return triton(
        "if not hasattr(self, 'graph'):",
        "    self.a, self.y = x.clone(), torch.empty_like(x)",
        *(f"    {line}" for line in body),
        "    torch.cuda.synchronize()",
        "    self.graph = torch.cuda.CUDAGraph()",
        "    with torch.cuda.graph(self.graph):",
        *(f"        {line}" for line in body),
        "self.a.copy_(x)",
        "self.graph.replay()",
        "return self.y.clone()",
        init=init,
    )


def launched(more: str = "") -> tuple[str, str, str]:
    return "y = torch.empty_like(x)", f"{_LAUNCH}{more})", "return y"


KINDS = {
    "triton": Kind(triton(*launched()), "triton", ("Kernel",)),
    "triton, tuned": Kind(
        triton(
            "y = torch.empty_like(x)",
            'tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())',
            "return y",
        ),
        "triton",
        ("Kernel",),
    ),
    "triton, descriptors": Kind(
        triton(
            "y = torch.empty_like(x)",
            "pair = [TensorDescriptor.from_tensor(item, [64, 64]) for item in (x, y)]",
            "tiles[(8, 16)](*pair, BLOCK=64)",
            "return y",
        ),
        "triton",
        ("Kernel",),
    ),
    "triton, cluster": Kind(triton(*launched(", num_ctas=2")), "triton", ("Kernel",)),
    "triton, cooperative": Kind(
        triton(
            "y = torch.empty_like(x)",
            "twice[(64,)](x, y, x.numel(), BLOCK=8192, launch_cooperative_grid=True)",
            "return y",
        ),
        "triton",
        ("Kernel",),
    ),
    "triton, overlapping launches": Kind(
        triton(
            "z = torch.empty_like(x)",
            _LAUNCH.replace(" y,", " z,") + ", launch_pdl=True)",
            *launched(", launch_pdl=True"),
        ),
        "triton",
        ("Kernel", "Kernel"),
    ),
    "triton, two streams": Kind(
        triton(
            "half = x.numel() // 2",
            "y = torch.empty_like(x)",
            "self.side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(self.side):",
            "    twice[(256,)](x, y, half, BLOCK=1024)",
            "twice[(256,)](x.view(-1)[half:], y.view(-1)[half:], half, BLOCK=1024)",
            "torch.cuda.current_stream().wait_stream(self.side)",
            "return y",
            init="self.side = torch.cuda.Stream()",
        ),
        "triton",
        ("Kernel", "Kernel"),
    ),
    "triton, waits": Kind(triton(*launched()[:2], "torch.cuda.synchronize()", "return y"), "triton", ("Kernel",)),
    "triton behind a product": Kind(
        triton(
            "x = torch.addmm(self.linear.bias, x, self.linear.weight.t())",
            *launched(),
            init="self.linear = nn.Linear(1024, 256)",
        ),
        "triton",
        ("aten::addmm", "Kernel"),
        problem=LINEAR,
    ),
    "nvrtc": Kind(
        _NVRTC
        + model(
            "y = torch.empty_like(x)",
            "self.kernel[(x.numel() + 255) // 256, 256, 65536](x, y, x.numel())",
            "return y",
            init='self.kernel = cuda_kernel(SOURCE, "twice")',
        ),
        "cuda-nvrtc",
        ("Kernel",),
    ),
    "extension": Kind(cuda(_PLAIN), "cuda", ("Kernel",)),
    "extension, torch's stream": Kind(
        cuda(_PLAIN.replace(", 256>>>", ", 256, 0, at::cuda::getCurrentCUDAStream()>>>")), "cuda", ("Kernel",)
    ),
    "extension, waits": Kind(cuda(_PLAIN, "  cudaDeviceSynchronize();"), "cuda", ("Kernel",)),
    "extension, fills and copies": Kind(
        cuda(
            "  auto z = torch::empty_like(x);",
            "  cudaMemsetAsync(y.data_ptr(), 0, y.nbytes());",
            "  cudaMemcpyAsync(z.data_ptr(), x.data_ptr(), x.nbytes(), cudaMemcpyDeviceToDevice);",
            "  x = z;",
            _PLAIN,
        ),
        "cuda",
        ("Memset", "Memcpy", "Kernel"),
    ),
    "extension that calls torch": Kind(cuda("  x = at::mul(x, 1.0);", _PLAIN), "cuda", ("aten::mul.Scalar", "Kernel")),
    "memory of its own": Kind(
        cuda(
            "  static float* own = nullptr;",
            "  if (!own) cudaMalloc(&own, x.nbytes());",
            _PLAIN.replace("y.data_ptr<float>()", "own"),
            _PLAIN,
        ),
        "cuda",
        refused="memory that torch has not allocated",
    ),
    "reads back": Kind(triton("f = float(x[0, 0])", *launched()), "triton", refused="reads from it"),
    "draws": Kind(triton("x = x + 0 * torch.rand_like(x)", *launched()), "triton", refused="draws random numbers"),
    "a graph of its own": Kind(
        graphed("twice[(512,)](self.a, self.y, x.numel(), BLOCK=1024)"), "triton", ("Memcpy", "Kernel", "Memcpy")
    ),
    "a graph of its own with operators": Kind(
        graphed(
            "h = torch.addmm(self.linear.bias, self.a, self.linear.weight.t())",
            "self.y = torch.empty_like(h)",
            "twice[(128,)](h, self.y, h.numel(), BLOCK=1024)",
            init="self.linear = nn.Linear(1024, 256)",
        ),
        "triton",
        ("Memcpy", "aten::addmm", "Kernel", "Memcpy"),
        problem=LINEAR,
    ),
    "a graph of its own that draws": Kind(
        graphed(
            "self.a.add_(torch.rand_like(self.a), alpha=0)",
            "twice[(512,)](self.a, self.y, x.numel(), BLOCK=1024)",
        ),
        "triton",
        refused="in a CUDA graph of its own, aten::rand_like draws random numbers",
    ),
    "fails": Kind(triton('raise ValueError("no")'), "triton", refused="ValueError: no"),
    "faults": Kind(
        cuda(_PLAIN.replace("y.data_ptr<float>()", "(float*)(1ll << 45)")), "cuda", refused="ILLEGAL_ADDRESS"
    ),
}
