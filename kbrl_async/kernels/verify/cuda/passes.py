"""What verifying does to whole tensors, in one pass over memory each: our own kernels in the trusted process.

::

    got, expected ─▶ how many are wrong, the worst of all, the worst of the wrong, NaNs      one read of both, no writes
    two blocks    ─▶ are they the same bytes?        one block ─▶ is it all one byte?

By torch's operators a comparison takes sixteen passes over memory, and inputs of a GPU's shapes have half a gigabyte:
that was most of what a verdict cost.
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import torch

from kbrl_async.errors import MissingTool
from kbrl_async.kernels import cuda_driver
from kbrl_async.kernels.verify.fused import Allowed, Counted

_THREADS, _BLOCKS_A_PROCESSOR = 256, 16
_MOST = (1 << 32) - 1
"""Elements: a place has 32 bits."""
_LOADS = {
    torch.float32: ("f32", "float", "v"),
    torch.float16: ("f16", "unsigned short", "half(v)"),
    torch.bfloat16: ("bf16", "unsigned short", "__uint_as_float((unsigned)v << 16)"),
}
_HEAD = r"""
typedef unsigned long long u64;
__device__ __forceinline__ float half(unsigned short v) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
    return out;
}
__device__ __forceinline__ u64 all_sum(u64 v) {
    for (int lane = 16; lane; lane >>= 1) v += __shfl_xor_sync(0xffffffffu, v, lane);
    return v;
}
__device__ __forceinline__ u64 all_max(u64 v) {
    for (int lane = 16; lane; lane >>= 1) { u64 o = __shfl_xor_sync(0xffffffffu, v, lane); v = o > v ? o : v; }
    return v;
}
extern "C" __global__ void unlike(const u64 *a, const u64 *b, u64 count, u64 *out) {
    u64 found = 0, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) found |= a[i] ^ b[i];
    if (found) out[0] = 1;
}
extern "C" __global__ void other(const u64 *a, u64 wanted, u64 count, u64 *out) {
    u64 found = 0, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) found |= a[i] ^ wanted;
    if (found) out[0] = 1;
}
"""
_COMPARE = r"""
extern "C" __global__ void compare_NAME(const TYPE *got, const TYPE *expected, u64 count,
                                        float relative, float absolute, float honest, u64 *out) {
    u64 wrong = 0, nans = 0, worst = 0, worst_wrong = 0, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        TYPE v = got[i];
        float g = LOAD;
        v = expected[i];
        float w = LOAD;
        float error = fabsf(g - w), limit = fmaxf(__fadd_rn(__fmul_rn(fabsf(w), relative), absolute), honest);
        limit = fminf(limit, __uint_as_float(0x7f7fffffu));  // what is to be infinite must be
        bool both = g != g && w != w;
        u64 place = 0xffffffffu - (unsigned)i;
        nans += g != g;
        if (!(error <= limit) && g != w && !both) {
            unsigned bits = error != error ? 0x7fc00000u : __float_as_uint(error);
            u64 packed = (u64)bits << 32 | place;
            worst_wrong = packed > worst_wrong ? packed : worst_wrong;
            ++wrong;
        }
        if (error == error) {
            u64 packed = (u64)__float_as_uint(error) << 32 | place;
            worst = packed > worst ? packed : worst;
        }
    }
    wrong = all_sum(wrong); nans = all_sum(nans); worst = all_max(worst); worst_wrong = all_max(worst_wrong);
    if (threadIdx.x % 32 == 0) {
        if (wrong) atomicAdd(out, wrong);
        if (nans) atomicAdd(out + 1, nans);
        atomicMax(out + 2, worst);
        if (worst_wrong) atomicMax(out + 3, worst_wrong);
    }
}
"""
_VALUES = r"""
extern "C" __global__ void values_NAME(const TYPE *got, const TYPE *expected, u64 *out) {
    u64 packed = out[0] ? out[3] : out[2], place = packed ? 0xffffffffull - (packed & 0xffffffffull) : 0;
    TYPE v = got[place];
    float g = LOAD;
    v = expected[place];
    float w = LOAD;
    out[4] = (u64)__double_as_longlong((double)g);
    out[5] = (u64)__double_as_longlong((double)w);
}
"""
"""Behind a comparison: what lies at the place that it names, so that nobody has to wait for the device once more."""
_FAR = r"""
extern "C" __global__ void furthest_NAME(const float *a, const TYPE *b, u64 count, u64 *out) {
    u64 worst = 0, step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        double error = fabs((double)a[i] - (double)b[i]);
        u64 bits = (u64)__double_as_longlong(error);
        if (bits < 0x7ff0000000000000ull && bits > worst) worst = bits;
    }
    worst = all_max(worst);
    if (threadIdx.x % 32 == 0 && worst) atomicMax(out, worst);
}
"""
_FURTHEST = {(torch.float32, torch.float32): ("f32", "float"), (torch.float32, torch.float64): ("f64", "double")}
SOURCE = "".join(
    (
        _HEAD,
        *(
            (_COMPARE + _VALUES).replace("NAME", one[0]).replace("TYPE", one[1]).replace("LOAD", one[2])
            for one in _LOADS.values()
        ),
        *(_FAR.replace("NAME", one[0]).replace("TYPE", one[1]) for one in _FURTHEST.values()),
    )
)
NAMES = [
    *("unlike", "other"),
    *(f"{what}_{name}" for name, _, _ in _LOADS.values() for what in ("compare", "values")),
    *(f"furthest_{name}" for name, _ in _FURTHEST.values()),
]


class Passes:
    """On one GPU; a `fused.Fused`.

    :raises MissingTool: its kernels can't be compiled here.
    """

    def __init__(self, device: torch.device) -> None:
        from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc

        found = torch.cuda.get_device_properties(device)
        try:
            built = nvrtc.compile_source(SOURCE, NAMES, f"sm_{found.major}{found.minor}")
        except (MissingTool, nvrtc.CompileError, OSError) as error:
            raise MissingTool(f"no kernels that compare: {error}", "pip install nvidia-cuda-nvrtc") from error
        self._grid = (_BLOCKS_A_PROCESSOR * int(found.multi_processor_count), 1, 1)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self._out = torch.zeros(6, dtype=torch.int64, device=device)
            module = cuda_driver.driver().load_module(built.cubin)
            self._functions = {name: cuda_driver.driver().function(module, built.names[name]) for name in NAMES}

    def difference(self, got: torch.Tensor, expected: torch.Tensor, allowed: Allowed) -> Counted | None:
        known = _LOADS.get(got.dtype)
        count = expected.numel()
        if known is None or not 0 < count <= _MOST or not _are_alike(got, expected):
            return None
        figures = (ctypes.c_float(one) for one in (allowed.relative, allowed.absolute, allowed.honest))
        self._out.zero_()
        self._launch(f"compare_{known[0]}", self._grid, got, expected, ctypes.c_uint64(count), *figures)
        self._launch(f"values_{known[0]}", (1, 1, 1), got, expected, threads=1)
        wrong, nans, worst, worst_wrong, *values = self._counts()
        there = _number(values[0]), _number(values[1])
        return Counted(wrong, nans, unpacked(worst), unpacked(worst_wrong) if wrong else None, there)

    def furthest(self, a: torch.Tensor, b: torch.Tensor) -> float | None:
        kind, count = _FURTHEST.get((a.dtype, b.dtype)), a.numel()
        if kind is None or not count or a.shape != b.shape or not (a.is_contiguous() and b.is_contiguous()):
            return None
        bits = self._run(f"furthest_{kind[0]}", a, b, ctypes.c_uint64(count))[0]
        return _number(bits)

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool | None:
        words = _words(a)
        if not words or not _are_alike(a, b) or b.data_ptr() % 8:
            return None
        return not self._run("unlike", a, b, ctypes.c_uint64(words))[0]

    def is_all(self, block: torch.Tensor, byte: int) -> bool | None:
        words = _words(block)
        if not words or not block.is_contiguous():
            return None
        pattern = int.from_bytes(bytes([byte]) * 8, "little")
        return not self._run("other", block, ctypes.c_uint64(pattern), ctypes.c_uint64(words))[0]

    def _run(self, name: str, *arguments: Any) -> list[int]:
        self._out.zero_()
        self._launch(name, self._grid, *arguments)
        return self._counts()

    def _launch(self, name: str, grid: tuple[int, int, int], *arguments: Any, threads: int = _THREADS) -> None:
        given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in (*arguments, self._out)]
        packed = cuda_driver.Arguments(given)
        stream = torch._C._cuda_getCurrentRawStream(self._out.device.index)  # type: ignore[attr-defined, unused-ignore]
        cuda_driver.driver().launch(self._functions[name], grid, (threads, 1, 1), 0, stream, packed)

    def _counts(self) -> list[int]:
        return [number % (1 << 64) for number in self._out.tolist()]


def _number(bits: int) -> float:
    """A double by its bits."""
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and b.is_contiguous()


def _words(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return 0 if size % 8 or tensor.data_ptr() % 8 else size // 8


def unpacked(packed: int) -> tuple[float, int]:
    """An error, and the number of its element: the first one of those that have it; the first element where none has.

    >>> unpacked(0x3F800000_FFFFFFFE), unpacked(0)
    ((1.0, 1), (0.0, 0))
    """
    if not packed:  # NaN at one place, infinities of one sign: nothing has a distance
        return 0.0, 0
    error = ctypes.c_float.from_buffer(ctypes.c_uint32(packed >> 32)).value
    return (math.inf if math.isnan(error) else error), _MOST - (packed & _MOST)
