"""What a candidate of each backend has to look like, told to a model that never saw it: an example that scales by two.

To add one: one entry in `CONTRACTS`; `docs/backends.md` says the same to people.
"""

from __future__ import annotations

_OPENING = """You write fast {what}. Replace the module `Model` below by `ModelNew` with the
same constructor, parameters and results. Answer with one fenced Python file {how}:

```python
"""
_CLOSING = """
The module to replace:

```python
{source}```
"""
_HEAD = "import torch\nimport torch.nn as nn\n"
_CALL = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {make}

    def forward(self, x):
        {prepare}out = torch.empty_like(x)
        {launch}
        return out
```
"""


def _contract(what: str, how: str, code: str, rules: str) -> str:
    opening = _OPENING.replace("{what}", what).replace("{how}", how)
    return opening + code.lstrip("\n") + "\n" + rules.strip() + "\n" + _CLOSING


def _module(make: str, launch: str, prepare: str = "") -> str:
    return _CALL.replace("{make}", make).replace("{launch}", launch).replace("{prepare}", prepare)


_C_SOURCE = '''
from kbrl_async.launch import c_kernel

SOURCE = r"""
void run(const float *x, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = 2.0f * x[i];
}
"""
'''
_CUDA_SOURCE = '''
SOURCE = r"""
__global__ void run(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * x[i];
}
"""
'''
_EXTENSION_SOURCE = '''
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
{include}
torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    {body}
    return out;
}
"""
extension = load_inline(name="run", {arguments}, functions=["run"])

class ModelNew(nn.Module):
    def forward(self, x):
        return extension.run(x.contiguous())
```
'''


def _extension(include: str, body: str, arguments: str) -> str:
    text = _EXTENSION_SOURCE.replace("{include}", include).replace("{body}", body)
    return _HEAD + text.replace("{arguments}", arguments).lstrip("\n")


_CUDA_INCLUDE = """#include <torch/extension.h>
__global__ void scale(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * x[i];
}"""
_CUDA_BODY = "scale<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());"
_CPP_BODY = """const float *from = x.data_ptr<float>();
    float *to = out.data_ptr<float>();
    for (long i = 0; i < x.numel(); i++) to[i] = 2.0f * from[i];"""
_TRITON = (
    _HEAD
    + """import triton
import triton.language as tl

@triton.jit
def run(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2.0 * tl.load(x + at, mask=at < n), mask=at < n)

class ModelNew(nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        run[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
```
"""
)
_PLAN = '''
SOURCE = r"""
{kernel}
"""
PLAN = {
    "inputs": ["x"],
    "sizes": {"n": "x.numel"},
    "kernels": {"run": {"source": SOURCE}},
    "buffers": {"out": {"shape": ["x.shape[0]", "x.shape[1]"], "dtype": "float32"}},
    "steps": [{"kernel": "run", "args": ["x", "out", "n"]{where}}],
    "outputs": ["out"],
}
```
'''
_PLAN_RULES = """
The file holds literals only: a launch plan, run without any Python of yours. Sizes are expressions over numbers,
earlier sizes, `x.shape[0]`, `x.numel`, + - * / // %, max, min, cdiv, next_pow2 and sqrt. `"init"` names the
constructor's arguments; a weight is the argument `"param:NAME"` with its name in the module's state dict. Buffers are
new in each call, and empty unless they say `"zero": True`.
"""


def _plan(kernel: str, where: str) -> str:
    return _PLAN.replace("{kernel}", kernel.strip()).replace("{where}", where)


CONTRACTS: dict[str, str] = {
    "c": _contract(
        "CPU kernels in C",
        "that declares its C code with `c_kernel`\nand launches it in `forward`",
        _HEAD
        + _C_SOURCE.lstrip("\n")
        + _module('self.kernel = c_kernel(SOURCE, "run")', "self.kernel(x, out, x.numel())"),
        """
Tensors arrive as pointers to contiguous data, Python integers as `long`, Python floats as `float`. OpenMP and the
standard headers are there. `forward` may allocate and reshape, but all arithmetic must happen in your C code.
""",
    ),
    "cpp": _contract(
        "CPU kernels in C++",
        "that builds them with `load_inline(cpp_sources=…)`",
        _extension("#include <torch/extension.h>", _CPP_BODY, "cpp_sources=SOURCE"),
        "All arithmetic must happen in your C++ code; the library may do a sub-step, never the whole.",
    ),
    "cuda": _contract(
        "CUDA kernels",
        "that builds them with `load_inline(cuda_sources=…)`",
        _extension(_CUDA_INCLUDE, _CUDA_BODY, 'cpp_sources="torch::Tensor run(torch::Tensor x);", cuda_sources=SOURCE'),
        "Launch on the current stream. The library may do a sub-step, never the whole.",
    ),
    "cuda-nvrtc": _contract(
        "CUDA kernels",
        "that declares device code with `cuda_kernel`\nand launches it in `forward`",
        _HEAD
        + "from kbrl_async.launch import cuda_kernel\n"
        + _CUDA_SOURCE
        + _module(
            'self.kernel = cuda_kernel(SOURCE, "run")',
            "self.kernel[(x.numel() + 255) // 256, 256](x, out, x.numel())",
            "x = x.contiguous()\n        ",
        ),
        """
`kernel[grid, block](…)` or `kernel[grid, block, shared_bytes](…)`; grid and block are integers or tuples of up to
three. Tensors must be contiguous and on the GPU, and arrive as pointers; numbers arrive as the parameters are declared.
CUDA's headers are there (cuda_fp16.h, mma.h, cooperative_groups.h), templates are named as "run<float>". No host code.
""",
    ),
    "triton": _contract(
        "GPU kernels in Triton",
        "that defines `@triton.jit` kernels and launches\nthem in `forward`",
        _TRITON,
        "`torch` may allocate, view and do a sub-step; the kernels must do the work. `@triton.autotune` may try a few.",
    ),
    "c plan": _contract(
        "CPU kernels in C",
        "that declares C code and a launch plan",
        _plan(_C_SOURCE.split('r"""')[1].rpartition('"""')[0], ""),
        _PLAN_RULES,
    ),
    "cuda-nvrtc plan": _contract(
        "CUDA kernels",
        "that declares device code and a launch plan",
        _plan(_CUDA_SOURCE.split('r"""')[1].rpartition('"""')[0], ', "grid": ["cdiv(n, 256)"], "block": [256]'),
        _PLAN_RULES,
    ),
}
"""By backend; `"… plan"` is the same backend's contract for a candidate that is data."""
