"""The CUDA launch helper, as far as no GPU is needed: declarations, conversions, configurations."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.errors import MissingTool
from kbrl_async.kernels import cuda_driver
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.backends.nvrtc.launch import cuda_kernel, parameters

SOURCE = """
template <typename T, int N> __global__ void __launch_bounds__(256) scale(const T* __restrict__ x, // in
    T *y, size_t n, T factor, bool flag) { }
extern "C" __global__ void plain() { }
__global__ void halves(const __half *x, half a, __nv_bfloat16 b, unsigned u, long long int l, double d) {}
__global__ void odd(float4 v) {}
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """Launches instead of the driver's: grid, block, shared bytes, and the cells' values."""
    seen: list[tuple[Any, ...]] = []

    def start(self: cuda.CudaKernel, grid: Any, block: Any, shared: int) -> None:
        seen.append((grid, block, shared, [cell.value for cell in self.arguments.cells]))

    path = tmp_path / "bundle"
    path.write_bytes(bundle.pack(cuda.to_bundle(nvrtc.Compiled(b"code", {}))))
    monkeypatch.setattr(torch.cuda, "_compile_kernel", None, raising=False)  # put back afterwards
    cuda.prepare({cuda.source_key(SOURCE): str(path)})
    monkeypatch.setattr(cuda.CudaKernel, "start", start)
    yield seen
    cuda.forget()


def test_declarations_are_parsed_past_attributes_and_templates() -> None:
    assert parameters(SOURCE, "scale<float, 4>") == [
        "const float* __restrict__ x",
        "float *y",
        "size_t n",
        "float factor",
        "bool flag",
    ]
    assert parameters(SOURCE, "plain") == []
    assert parameters(SOURCE, "missing") is None


def test_numbers_are_passed_as_they_are_declared(launched: list[tuple[Any, ...]]) -> None:
    cuda_kernel(SOURCE, "scale<float, 4>")[7, (16, 2), 64](None, None, 1 << 40, 2, 1)
    assert launched[-1] == ((7, 1, 1), (16, 2, 1), 64, [None, None, 1 << 40, 2.0, True])
    cuda_kernel(SOURCE, "halves")[(1, 2, 3), 32](None, 1.0, 1.0, 5, -6, 0.1)
    assert launched[-1] == ((1, 2, 3), (32, 1, 1), 0, [None, 0x3C00, 0x3F80, 5, -6, 0.1])


def test_a_kernel_without_arguments_is_launched(launched: list[tuple[Any, ...]]) -> None:
    cuda_kernel(SOURCE, "plain")[1, 1]()
    assert launched == [((1, 1, 1), (1, 1, 1), 0, [])]


def test_torchs_own_call_finds_the_same_kernel(launched: list[tuple[Any, ...]]) -> None:
    kernel = torch.cuda._compile_kernel(SOURCE, "halves")
    kernel(grid=(4, 1, 1), block=(8, 1, 1), args=[None, 0.5, 0.5, 1, 2, 3.0], shared_mem=16)
    assert launched[-1][:3] == ((4, 1, 1), (8, 1, 1), 16)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: cuda_kernel(SOURCE, "missing"), "defines no `__global__ void missing"),
        (lambda: cuda_kernel(SOURCE, "odd"), "type that can't be passed"),
        (lambda: cuda_kernel(SOURCE + " ", "plain"), "not compiled"),
        (lambda: cuda_kernel(SOURCE, "plain")(), "kernel\\[grid, block\\]"),
        (lambda: cuda_kernel(SOURCE, "plain")[1], "kernel\\[grid, block\\]"),
        (lambda: cuda_kernel(SOURCE, "plain")[0, 1](), "positive integers"),
        (lambda: cuda_kernel(SOURCE, "plain")[(1, 1, 1, 1), 1](), "positive integers"),
        (lambda: cuda_kernel(SOURCE, "plain")[1, 1](1), "takes 0 arguments"),
        (lambda: cuda_kernel(SOURCE, "halves")[1, 1](torch.zeros(2), 1, 1, 1, 1, 1), "on cpu"),
        (lambda: cuda_kernel(SOURCE, "halves")[1, 1](7, 1, 1, 1, 1, 1), "must be a tensor"),
        (lambda: cuda_kernel(SOURCE, "halves")[1, 1](None, 1, 1, 1.5, 1, 1), "is an integer"),
    ],
)
@pytest.mark.usefixtures("launched")
def test_wrong_uses_are_named(call: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        call()


def test_argument_blocks_hold_the_addresses_of_their_cells() -> None:
    block = cuda_driver.Arguments([ctypes.c_int32(), ctypes.c_void_p()])
    block.cells[0].value = 41
    pointers = (ctypes.c_void_p * 2).from_address(block.address)
    assert ctypes.c_int32.from_address(pointers[0] or 0).value == 41


def test_without_nvrtc_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library_path", lambda: "")
    nvrtc.library.cache_clear()
    with pytest.raises(MissingTool, match="cuda-build"):
        nvrtc.compile_source("", [], "sm_90")
