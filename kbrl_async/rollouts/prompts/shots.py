"""Worked examples that come with the project, for prompt_option=one_shot and few_shot: three modules in each backend.

They are none of the suite's problems nor KernelBench's, and right rather than fastest: they show the form of an answer.
To give a further backend examples: three kernels in `_KERNELS`.
"""

from __future__ import annotations

import msgspec

_HEAD = "import torch\nimport torch.nn as nn\n"
_REFERENCES = {
    "gate": """
class Model(nn.Module):
    def forward(self, x, y):
        return x * torch.sigmoid(y)
""",
    "centre": """
class Model(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=-1, keepdim=True)
""",
    "weighted": """
class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows))

    def forward(self, x):
        return (x * self.weight[:, None]).sum(dim=0)
""",
}
_INIT = {
    "gate": "    def __init__(self):\n        super().__init__()\n",
    "centre": "    def __init__(self):\n        super().__init__()\n",
    "weighted": "    def __init__(self, rows):\n        super().__init__()\n"
    "        self.weight = nn.Parameter(torch.rand(rows))\n",
}
_ARGUMENTS = {"gate": "x, y", "centre": "x", "weighted": "x"}
_LOOPS = {
    "gate": """void run(const float *x, const float *y, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] / (1.0f + expf(-y[i]));
}""",
    "centre": """void run(const float *x, float *out, long rows, long cols) {
    for (long r = 0; r < rows; r++) {
        float s = 0.0f;
        for (long c = 0; c < cols; c++) s += x[r * cols + c];
        for (long c = 0; c < cols; c++) out[r * cols + c] = x[r * cols + c] - s / cols;
    }
}""",
    "weighted": """void run(const float *x, const float *w, float *out, long rows, long cols) {
    for (long c = 0; c < cols; c++) out[c] = 0.0f;
    for (long r = 0; r < rows; r++) {
        for (long c = 0; c < cols; c++) out[c] += w[r] * x[r * cols + c];
    }
}""",
}
_DEVICE = {
    "gate": """__global__ void run(const float *x, const float *y, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + expf(-y[i]));
}""",
    "centre": """__global__ void run(const float *x, float *out, long rows, long cols) {
    __shared__ float part[256];
    long r = blockIdx.x;
    float s = 0.0f;
    for (long c = threadIdx.x; c < cols; c += blockDim.x) s += x[r * cols + c];
    part[threadIdx.x] = s;
    __syncthreads();
    for (int k = 128; k > 0; k /= 2) {
        if (threadIdx.x < k) part[threadIdx.x] += part[threadIdx.x + k];
        __syncthreads();
    }
    for (long c = threadIdx.x; c < cols; c += blockDim.x) out[r * cols + c] = x[r * cols + c] - part[0] / cols;
}""",
    "weighted": """__global__ void run(const float *x, const float *w, float *out, long rows, long cols) {
    long c = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float s = 0.0f;
    for (long r = 0; r < rows; r++) s += w[r] * x[r * cols + c];
    out[c] = s;
}""",
}
_GRIDS = {"gate": "(x.numel() + 255) // 256", "centre": "x.shape[0]", "weighted": "(x.shape[1] + 255) // 256"}
_HOST_GRIDS = {"gate": "(x.numel() + 255) / 256", "centre": "x.size(0)", "weighted": "(x.size(1) + 255) / 256"}
_OUT = {
    "gate": "torch.empty_like(x)",
    "centre": "torch.empty_like(x)",
    "weighted": "torch.empty(x.shape[1], device=x.device)",
}
_PASSED = {
    "gate": "x, y, out, x.numel()",
    "centre": "x, out, x.shape[0], x.shape[1]",
    "weighted": "x, self.weight, out, x.shape[0], x.shape[1]",
}
_HOST_OUT = dict.fromkeys(("gate", "centre"), "torch::empty_like(x)") | {
    "weighted": "torch::empty({x.size(1)}, x.options())"
}
_HOST_PASSED = {
    "gate": "x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), x.numel()",
    "centre": "x.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1)",
    "weighted": "x.data_ptr<float>(), w.data_ptr<float>(), out.data_ptr<float>(), x.size(0), x.size(1)",
}
_HOST_PARAMETERS = {
    "gate": "torch::Tensor x, torch::Tensor y",
    "centre": "torch::Tensor x",
    "weighted": "torch::Tensor x, torch::Tensor w",
}
_TRITON = {
    "gate": """@triton.jit
def run(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n) * tl.sigmoid(tl.load(y + at, mask=at < n))
    tl.store(out + at, v, mask=at < n)
""",
    "centre": """@triton.jit
def run(x, out, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + at, mask=at < cols, other=0.0)
    tl.store(out + row * cols + at, v - tl.sum(v) / cols, mask=at < cols)
""",
    "weighted": """@triton.jit
def run(x, w, out, rows, cols, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(rows):
        total += tl.load(w + r) * tl.load(x + r * cols + at, mask=at < cols, other=0.0)
    tl.store(out + at, total, mask=at < cols)
""",
}
_TRITON_LAUNCH = {
    "gate": "run[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)",
    "centre": "run[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))",
    "weighted": "run[(triton.cdiv(x.shape[1], 256),)](x, self.weight, out, x.shape[0], x.shape[1], BLOCK=256)",
}


class Shot(msgspec.Struct, frozen=True):
    """A reference and its kernel."""

    reference: str
    kernel: str
    speedup: float | None = None


def _source(text: str) -> str:
    return f'SOURCE = r"""\n{text}\n"""\n'


def _module(name: str, launch: str, *, make: str = "", imports: str = "", top: str = "") -> str:
    contiguous = "".join(f"        {a} = {a}.contiguous()\n" for a in _ARGUMENTS[name].split(", "))
    return (
        f"{_HEAD}{imports}\n{top}\nclass ModelNew(nn.Module):\n{_INIT[name]}{make}\n"
        f"    def forward(self, {_ARGUMENTS[name]}):\n{contiguous}        out = {_OUT[name]}\n"
        f"        {launch}\n        return out\n"
    )


def _c(name: str) -> str:
    return _module(
        name,
        f"self.kernel({_PASSED[name]})",
        make='        self.kernel = c_kernel(SOURCE, "run")\n',
        imports="from kbrl_async.launch import c_kernel\n",
        top=_source("#include <math.h>\n" + _LOOPS[name]),
    )


def _nvrtc(name: str) -> str:
    return _module(
        name,
        f"self.kernel[{_GRIDS[name]}, 256]({_PASSED[name]})",
        make='        self.kernel = cuda_kernel(SOURCE, "run")\n',
        imports="from kbrl_async.launch import cuda_kernel\n",
        top=_source(_DEVICE[name]),
    )


def _triton(name: str) -> str:
    imports = "import triton\nimport triton.language as tl\n"
    return _module(name, _TRITON_LAUNCH[name], imports=imports, top=_TRITON[name])


def _extension(name: str, kernel: str, call: str, arguments: str) -> str:
    """A candidate over `load_inline`, whose C++ function is `launch`."""
    text = (
        f"#include <torch/extension.h>\n{kernel}\ntorch::Tensor launch({_HOST_PARAMETERS[name]}) {{\n"
        f"    auto out = {_HOST_OUT[name]};\n    {call}\n    return out;\n}}"
    )
    passed = {"gate": "x, y", "centre": "x", "weighted": "x, self.weight"}[name]
    made = f'extension = load_inline(name="launch_{name}", {arguments}, functions=["launch"])\n'
    contiguous = ", ".join(f"{a}.contiguous()" if a in ("x", "y") else a for a in passed.split(", "))
    return (
        f"{_HEAD}from torch.utils.cpp_extension import load_inline\n\n{_source(text)}{made}\n"
        f"class ModelNew(nn.Module):\n{_INIT[name]}\n    def forward(self, {_ARGUMENTS[name]}):\n"
        f"        return extension.launch({contiguous})\n"
    )


def _cpp(name: str) -> str:
    return _extension(name, _LOOPS[name], f"run({_HOST_PASSED[name]});", "cpp_sources=SOURCE")


def _cuda(name: str) -> str:
    launch = f"run<<<{_HOST_GRIDS[name]}, 256>>>({_HOST_PASSED[name]});"
    declared = f'cpp_sources="torch::Tensor launch({_HOST_PARAMETERS[name]});", cuda_sources=SOURCE'
    return _extension(name, _DEVICE[name], launch, declared)


_KERNELS = {"c": _c, "cpp": _cpp, "cuda": _cuda, "cuda-nvrtc": _nvrtc, "triton": _triton}
SHOTS: dict[str, tuple[Shot, ...]] = {
    backend: tuple(Shot(_HEAD + _REFERENCES[name], write(name)) for name in _REFERENCES)
    for backend, write in _KERNELS.items()
}
"""By backend, the plainest first."""
COUNTS = {"zero_shot": 0, "one_shot": 1, "few_shot": 3}
