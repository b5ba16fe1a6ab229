"""Candidates as people write them, each in a style of its own: an honest one, and its twin that the library works for.

Each says once what forward returns, as `RESULT`: what its kernels made, or what torch computes beside them.
"""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.beside import pack
from protocols.records import REPLAYED
from tests.gpu.bench_candidates import ADD, TRITON_KERNEL

PRODUCT = ADD.replace("x * 2 + y + self.shift", "x @ y * self.shift").replace("1024, 512", "512, 512")
HALF_PRODUCT = PRODUCT.replace("512, 512", "512, 512, dtype=torch.float16")
ROWS = ADD.replace("x * 2 + y + self.shift", "torch.softmax(x * self.shift + y, -1)").replace("1024, 512", "512, 1000")
_LIBRARY = {ADD: "x * 2 + y + self.shift", ROWS: "torch.softmax(x * self.shift + y, -1)"}
_MODEL = """

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = float(shift)
        INIT

    def forward(self, x, y):
BODY
        return RESULT
"""


class OpenStyle(msgspec.Struct, frozen=True):
    source: str
    problem: str = ADD
    trust: str = REPLAYED
    """Empty: whichever it is."""
    is_counted: bool = True
    """Whether somebody sees its launches. Where nobody does its work may be unproven, and is never cheating."""
    is_alone: bool = True
    """Whether all that forward has the GPU do is its own."""
    unproven: str = ""
    """Why an honest one is not replayed, where its work can't be proven for that; empty: it passes."""
    needs: str = ""
    """A package that not every host has, or `libcuda`, to link with."""

    @property
    def honest(self) -> str:
        return self.source.replace("RESULT", "out")

    @property
    def decoy(self) -> str:
        return self.source.replace("RESULT", _LIBRARY.get(self.problem, "x @ y * self.shift"))


def model(*body: str, init: str = "pass") -> str:
    return _MODEL.replace("INIT", init).replace("BODY", "\n".join(f"        {line}" for line in body))


# ── Triton ────────────────────────────────────────────────────────────────────────────────────────────────────────────

SHIFTED = "shifted[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), {}, BLOCK=1024)"
_OUT = "out = torch.empty_like(x)"
_CUSTOM_OP = f"""
@torch.library.custom_op("kbrl_tests::shifted", mutates_args=())
def op(x: torch.Tensor, y: torch.Tensor, shift: float) -> torch.Tensor:
    {_OUT}
    {SHIFTED.format("shift")}
    return out
"""
_FAKE = """
@op.register_fake
def _(x, y, shift):
    return torch.empty_like(x)
"""
_LIBRARY_IMPL = f"""
LIB = torch.library.Library("kbrl_tests_impl", "DEF")
LIB.define("shifted_(Tensor x, Tensor y, Tensor(a!) out, float shift) -> ()")

def launch(x, y, out, shift):
    {SHIFTED.format("shift")}

LIB.impl("shifted_", launch, "CUDA")
LIB.impl("shifted_", lambda x, y, out, shift: None, "Meta")
"""
_TUNED = """
@triton.autotune([triton.Config({}, num_warps=2), triton.Config({}, num_warps=8)], key=["width"])
@triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["width"]), "EVEN": lambda given: False})
@triton.jit
def rows(x, y, out, width, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    start = tl.program_id(0) * width
    value = tl.load(x + start + at, mask=inside) * scale + tl.load(y + start + at, mask=inside)
    value = tl.where(inside, value, -float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + start + at, value / tl.sum(value, 0), mask=inside)
"""
_HOST_DESCRIPTORS = """
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def tiles(x, y, out, shift, BLOCK: tl.constexpr):
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    out.store(at, x.load(at) * 2 + y.load(at) + shift)
"""
_DEVICE_DESCRIPTORS = """
@triton.jit
def tiles(x, y, out, M, N, shift, BLOCK: tl.constexpr):
    a = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    b = tl.make_tensor_descriptor(y, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    c = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    c.store(at, a.load(at) * 2 + b.load(at) + shift)

def scratch(size, alignment, stream):
    return torch.empty(size, device="cuda", dtype=torch.int8)

triton.set_allocator(scratch)
"""
_PERSISTENT = """
@triton.jit
def product(x, y, out, N, scale, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    across = N // BLOCK
    for tile in tl.range(tl.program_id(0), across * across, PROGRAMS, flatten=False):
        m = (tile // across) * BLOCK + tl.arange(0, BLOCK)[:, None]
        n = (tile % across) * BLOCK + tl.arange(0, BLOCK)[None, :]
        sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for start in range(0, N, DEEP):
            k = start + tl.arange(0, DEEP)
            left, right = tl.load(x + m * N + k[None, :]), tl.load(y + k[:, None] * N + n)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        tl.store(out + m * N + n, sums * scale)
"""
_SPECIALISED = """
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def product(x, y, out, K, scale, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    m, n = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in tl.range(0, K, DEEP, warp_specialize=True):
        sums = tl.dot(x.load([m, start]), y.load([start, n]), sums)
    out.store([m, n], (sums * scale).to(tl.float16))
"""
_STRIDED = """
@triton.jit
def strided(x, y, out, width, x_row, out_row, shift, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * x_row + at, mask=inside) * 2 + tl.load(y + row * width + at, mask=inside) + shift
    tl.store(out + row * out_row + at, value, mask=inside)
"""
_DESCRIBED = "TensorDescriptor.from_tensor"
TRITON_STYLES = {
    "custom op": OpenStyle(TRITON_KERNEL + _CUSTOM_OP + _FAKE + model("out = op(x, y, self.shift)"), trust=""),
    "custom op, nothing said for meta tensors": OpenStyle(
        TRITON_KERNEL + _CUSTOM_OP + model("out = op(x, y, self.shift)"), trust=""
    ),
    "an op of its own library": OpenStyle(
        TRITON_KERNEL + _LIBRARY_IMPL + model(_OUT, "torch.ops.kbrl_tests_impl.shifted_(x, y, out, self.shift)"),
        trust="",
    ),
    "tuned, by heuristics": OpenStyle(
        TRITON_KERNEL + _TUNED + model(_OUT, "rows[(x.shape[0],)](x, y, out, x.shape[1], self.shift)"), ROWS
    ),
    "descriptors of the host": OpenStyle(
        TRITON_KERNEL
        + _HOST_DESCRIPTORS
        + model(
            _OUT,
            f"three = [{_DESCRIBED}(item, [64, 64]) for item in (x, y, out)]",
            "tiles[(16, 8)](*three, self.shift, BLOCK=64)",
        )
    ),
    "descriptors made by the kernel": OpenStyle(
        TRITON_KERNEL + _DEVICE_DESCRIPTORS + model(_OUT, "tiles[(16, 8)](x, y, out, *x.shape, self.shift, BLOCK=64)"),
        trust="",
    ),
    "persistent": OpenStyle(
        TRITON_KERNEL
        + _PERSISTENT
        + model(
            _OUT,
            "product[(self.programs,)](x, y, out, 512, self.shift, PROGRAMS=self.programs, BLOCK=32, DEEP=32)",
            init='self.programs = torch.cuda.get_device_properties("cuda").multi_processor_count',
        ),
        PRODUCT,
    ),
    "warps specialised": OpenStyle(
        TRITON_KERNEL
        + _SPECIALISED
        + model(
            _OUT,
            f"three = [{_DESCRIBED}(item, [64, 64]) for item in (x, y, out)]",
            "product[(8, 8)](*three, 512, self.shift, BLOCK=64, DEEP=64, num_warps=4, num_stages=3)",
        ),
        HALF_PRODUCT,
    ),
    "views of padded buffers": OpenStyle(
        TRITON_KERNEL
        + _STRIDED
        + model(
            "rows, width = x.shape",
            "padded, out = x.new_zeros(rows, 640), x.new_empty(rows, 576)[:, :width]",
            "padded[:, :width] = x",
            "strided[(rows,)](padded, y, out, width, 640, 576, self.shift, BLOCK=512)",
        ),
        is_alone=False,
    ),
}

# ── whatever else Python has ──────────────────────────────────────────────────────────────────────────────────────────

_SOURCE = '''
import torch
import torch.nn as nn

SOURCE = r"""
extern "C" __global__ void shifted(const float *x, const float *y, float *out, int n, float shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + y[i] + shift;
}
"""
'''
_CUPY = "import cupy as cp\nimport numpy as np\n" + _SOURCE
_RAW = 'self.kernel = cp.RawKernel(SOURCE, "shifted")'
_GIVEN = "(*map(cp.asarray, (x, y, out)), np.int32(x.numel()), np.float32(self.shift))"
_HELPER = """
import triton
import triton.language as tl
from .sizes import BLOCK

@triton.jit
def shifted(x, y, out, n, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * 2 + tl.load(y + at, mask=at < n) + shift
    tl.store(out + at, value, mask=at < n)

def launch(x, y, out, shift):
    shifted[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), shift, BLOCK=BLOCK)
"""
_BESIDE = """
import os
import torch
import torch.nn as nn
from parts.kernel import launch

HERE = os.path.dirname(os.path.abspath(__file__))
assert "class ModelNew" in open(__file__).read()
assert os.path.exists(os.path.join(HERE, "parts", "kernel.py"))
"""
_SCRATCH = (
    TRITON_KERNEL
    + """
import json, os, pathlib, tempfile

CACHE = pathlib.Path.home() / ".cache" / "mine"
CACHE.mkdir(parents=True, exist_ok=True)
(CACHE / "sizes.json").write_text(json.dumps({"block": 1024}))

def block():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "block")
        with open(path, "w") as file:
            file.write((CACHE / "sizes.json").read_text())
        return json.loads(open(path).read())["block"]
"""
)
OTHER_STYLES = {
    "torch.cuda._compile_kernel": OpenStyle(
        _SOURCE
        + model(
            _OUT,
            "n = x.numel()",
            "self.kernel(grid=((n + 255) // 256, 1, 1), block=(256, 1, 1), args=[x, y, out, n, self.shift])",
            init='self.kernel = torch.cuda._compile_kernel(SOURCE, "shifted")',
        )
    ),
    "CuPy, on torch's stream": OpenStyle(
        _CUPY
        + model(
            _OUT,
            "with cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):",
            f"    self.kernel(((x.numel() + 255) // 256,), (256,), {_GIVEN})",
            init=_RAW,
        ),
        trust="",
        is_counted=False,
        needs="cupy",
    ),
    "CuPy, on its own stream": OpenStyle(
        _CUPY
        + model(
            _OUT,
            "torch.cuda.current_stream().synchronize()",
            f"self.kernel(((x.numel() + 255) // 256,), (256,), {_GIVEN})",
            "cp.cuda.get_current_stream().synchronize()",
            init=_RAW,
        ),
        trust="",
        is_counted=False,
        needs="cupy",
    ),
    "einops": OpenStyle(
        "from einops import rearrange, repeat"
        + TRITON_KERNEL
        + model(
            'x, y = rearrange(x, "(a b) c -> a b c", b=8), rearrange(y, "(a b) c -> a b c", b=8)',
            _OUT,
            SHIFTED.format("self.shift"),
            'x, y, out = (rearrange(item, "a b c -> (a b) c") for item in (x, y, out))',
        ),
        needs="einops",
    ),
    "torch.compile around a kernel": OpenStyle(
        TRITON_KERNEL
        + f"\ndef step(x, y, shift):\n    {_OUT}\n    {SHIFTED.format('shift')}\n    return out\n"
        + model("out = self.step(x, y, self.shift)", init="self.step = torch.compile(step)"),
    ),
    "a helper beside it": OpenStyle(
        pack(
            _BESIDE + model(_OUT, "launch(x, y, out, self.shift)"),
            {"parts/__init__.py": "", "parts/kernel.py": _HELPER, "parts/sizes.py": "BLOCK = 1024\n"},
        )
    ),
    "files of its own": OpenStyle(
        _SCRATCH
        + model(
            _OUT,
            "if self.block is None: self.block = block()",
            SHIFTED.format("self.shift").replace("1024", "self.block"),
            init="self.block = None",
        )
    ),
}
