"""Problems and Triton candidates of low precision: fp8 products, and weights of four bits."""

from __future__ import annotations

_HEAD = """
import torch
import torch.nn as nn

"""
_TRITON = _HEAD + "import triton\nimport triton.language as tl\n"
LINEAR = (
    _HEAD
    + """
class Model(nn.Module):
    def __init__(self, width, height):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(height, width, dtype=torch.bfloat16))

    def forward(self, x):
        return x @ self.weight.T

def get_inputs():
    return [torch.randn(256, 1024, dtype=torch.bfloat16)]

def get_init_inputs():
    return [1024, 512]
"""
)
"""In bfloat16, where nothing is declared."""
SCALED = (
    _HEAD
    + """
class Model(nn.Module):
    def forward(self, x, w, scale_x, scale_w):
        return torch._scaled_mm(x, w.T, scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16)

def get_inputs():
    x, w = torch.randn(256, 4096), torch.randn(512, 4096)
    return [x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.rand(()) + 0.5, torch.rand(()) + 0.5]

def get_init_inputs():
    return []
"""
)
"""Its inputs are fp8."""
PACKED = (
    _HEAD
    + """
class Model(nn.Module):
    def forward(self, x, packed, scales):
        whole = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).to(x.dtype) - 8
        return x @ (whole * scales.repeat_interleave(32, 0))

def get_inputs():
    packed = torch.randint(0, 256, (512, 512), dtype=torch.uint8)
    scales = (torch.rand(32, 512) * 0.02 + 0.005).bfloat16()
    return [torch.randn(256, 1024, dtype=torch.bfloat16), packed, scales]

def get_init_inputs():
    return []
"""
)
"""Its weights come as two in a byte, with a scale for 32."""

_FP8 = """
@triton.jit
def product(x, w, scale_x, scale_w, out, N, K, BY_ROW: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns, at = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    total = tl.zeros((M, M), tl.float32)
    for begin in range(0, K, BLOCK):
        left = tl.load(x + rows[:, None] * K + begin + at[None, :])
        right = tl.load(w + columns[None, :] * K + begin + at[:, None])
        total = tl.dot(left, right, total)
    if BY_ROW:
        total = total * tl.load(scale_x + rows)[:, None] * tl.load(scale_w + columns)[None, :]
    else:
        total = total * tl.load(scale_x) * tl.load(scale_w)
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))


def multiplied(x, w, scale_x, scale_w, by_row):
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    product[(m // 64, n // 64)](x, w, scale_x, scale_w, out, n, k, BY_ROW=by_row, M=64, BLOCK=128)
    return out
"""
FP8_SCALED = (
    _TRITON
    + _FP8
    + """
class ModelNew(nn.Module):
    def forward(self, x, w, scale_x, scale_w):
        return multiplied(x, w, scale_x, scale_w, False)
"""
)
"""For `SCALED`."""
FP8_LINEAR = (
    _TRITON
    + _FP8
    + """
@triton.jit
def narrow(x, out, scales, K: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, K)
    value = tl.load(x + row * K + at).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * K + at, (value / scale).to(tl.float8e4nv))


def narrowed(x):
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    narrow[(x.shape[0],)](x, out, scales, K=x.shape[1])
    return out, scales


class ModelNew(nn.Module):
    def __init__(self, width, height):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(height, width, dtype=torch.bfloat16))

    def forward(self, x):
        (few, scale), (weight, weight_scale) = narrowed(x), narrowed(self.weight)
        return multiplied(few, weight, scale, weight_scale, True)
"""
)
"""For `LINEAR`: a scale for each row of both."""
_INT4 = """
@triton.jit
def product(x, packed, scales, out, N, K, M: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * M + tl.arange(0, M)
    total = tl.zeros((M, M), tl.float32)
    for begin in range(0, K, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        left = tl.load(x + rows[:, None] * K + at[None, :])
        both = tl.load(packed + (at // 2)[:, None] * N + columns[None, :]).to(tl.int32)
        whole = ((both >> ((at % 2) * 4)[:, None]) & 15).to(tl.float32) - 8.0
        scale = tl.load(scales + (at // 32)[:, None] * N + columns[None, :]).to(tl.float32)
        total = tl.dot(left, (whole * scale).to(tl.bfloat16), total)
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))


def multiplied(x, packed, scales):
    (m, k), n = x.shape, packed.shape[1]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    product[(m // 64, n // 64)](x, packed, scales, out, n, k, M=64, BLOCK=64)
    return out
"""
INT4_PACKED = (
    _TRITON
    + _INT4
    + """
class ModelNew(nn.Module):
    def forward(self, x, packed, scales):
        return multiplied(x, packed, scales)
"""
)
"""For `PACKED`."""
INT4_LINEAR = (
    _TRITON
    + _INT4
    + """
class ModelNew(nn.Module):
    def __init__(self, width, height):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(height, width, dtype=torch.bfloat16))

    def forward(self, x):
        weight = self.weight.T.float().unflatten(0, (-1, 32))
        scales = weight.abs().amax(1, keepdim=True) / 7
        whole = ((weight / scales).round() + 8).clamp(0, 15).flatten(0, 1).to(torch.uint8)
        return multiplied(x, (whole[::2] | whole[1::2] << 4).contiguous(), scales.squeeze(1).bfloat16())
"""
)
"""For `LINEAR`: weights of four bits, a scale for 32 of them."""


def declaring(problem: str, precision: str) -> str:
    return f'{problem}\nPRECISION = "{precision}"\n'
