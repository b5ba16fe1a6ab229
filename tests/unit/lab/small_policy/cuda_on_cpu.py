"""Runs CUDA kernels on a CPU, thread by thread, so that answers in CUDA are proven right where there is no GPU.

::

    many SOURCEs ─ one C++ file, a namespace each ─▶ g++ ─▶ every thread of a block is a fibre; __syncthreads() and
                                                            __shfl_xor_sync() hand over until all threads are there

It knows what the small policy's answers use and no more. Times mean nothing.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kbrl_async.kernels.backends.nvrtc.build import kernels_of

_PRELUDE = r"""
#include <math.h>
#include <stdlib.h>
#include <ucontext.h>
#include <vector>
#include <functional>
#define __global__ static
#define __device__ static
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
struct dim { int x, y, z; };
static dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Fibre { ucontext_t context; std::vector<char> stack; bool done; float lane; };
static std::vector<Fibre> fibres(1024);
static ucontext_t host;
static int current;
static const std::function<void()> *work;
static void begin() { (*work)(); fibres[current].done = true; swapcontext(&fibres[current].context, &host); }
static void hand_over() { swapcontext(&fibres[current].context, &host); }
static void __syncthreads() { hand_over(); }
static float __shfl_xor_sync(unsigned, float v, int mask) {
    fibres[current].lane = v;
    hand_over();
    float other = fibres[current ^ mask].lane;
    hand_over();
    return other;
}
static void run_grid(const int *shape, const std::function<void()> &kernel) {
    gridDim = {shape[0], shape[1], shape[2]}; blockDim = {shape[3], 1, 1}; work = &kernel;
    for (int place = 0; place < gridDim.x * gridDim.y; place++) {
        blockIdx = {place % gridDim.x, place / gridDim.x, 0};
        for (int t = 0; t < blockDim.x; t++) {
            Fibre &f = fibres[t];
            if (f.stack.empty()) f.stack.resize(16384);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = 0;
            f.done = false;
            makecontext(&f.context, begin, 0);
        }
        for (bool more = true; more;) {
            more = false;
            for (current = 0; current < blockDim.x; current++) {
                if (fibres[current].done) continue;
                threadIdx = {current, 0, 0};
                swapcontext(&host, &fibres[current].context);
                more = more || !fibres[current].done;
            }
        }
    }
}
"""
_PARAMETER = re.compile(r"(const )?(float \*|long )(\w+)")


def compiled(sources: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The kernels of all candidates in one library; `k{candidate}_{kernel}` runs one."""
    text = [_PRELUDE]
    for number, source in enumerate(sources):
        kernels = kernels_of(source)
        code = "\n".join(line for line in kernels[0].source.splitlines() if not line.startswith("#include"))
        # fibres swap while a kernel runs, so that what it reads of its place must be its own
        for name in ("threadIdx", "blockIdx"):
            code = code.replace(name + ".", f"{name}_().")
        text.append(f"namespace k{number} {{\n{code}\n}}")
        text += [_launcher(number, kernel.name, kernel.source) for kernel in kernels]
    source_file, library = folder / "kernels.cpp", folder / "kernels.so"
    places = "static dim threadIdx_() { return threadIdx; }\nstatic dim blockIdx_() { return blockIdx; }\n"
    source_file.write_text(text[0] + places + "\n".join(text[1:]))
    flags = ["-O0", "-w", "-std=c++17", "-shared", "-fPIC", "-fpermissive"]
    done = subprocess.run(["g++", *flags, str(source_file), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(library))


def _launcher(number: int, name: str, source: str) -> str:
    found = re.search(rf"__global__ void {name}\(([^)]*)\)", source)
    assert found, source
    kinds = [kind for _, kind, _ in _PARAMETER.findall(found[1])]
    arguments = ", ".join(
        f"(float *)given[{i}]" if "*" in kind else f"(long)given[{i}]" for i, kind in enumerate(kinds)
    )
    return (
        f'extern "C" void k{number}_{name}(const int *shape, void **given) {{\n'
        f"    run_grid(shape, [=] {{ k{number}::{name}({arguments}); }});\n}}"
    )


class _Kernel:
    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, launch: tuple[Any, int]) -> Any:
        grid, block = launch
        sizes = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]

        def call(*arguments: Any) -> None:
            given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            self._function((ctypes.c_int * 4)(*sizes, block), (ctypes.c_void_p * len(given))(*given))

        return call


def module_of(source: str, number: int, library: ctypes.CDLL) -> type[torch.nn.Module]:
    """The candidate's `ModelNew`, whose kernels run on the CPU."""
    fake = ModuleType("kbrl_async.launch")
    fake.cuda_kernel = lambda _source, name: _Kernel(library[f"k{number}_{name}"])  # type: ignore[attr-defined]
    space: dict[str, Any] = {"cuda_kernel": fake.cuda_kernel}
    exec(source.replace("from kbrl_async.launch import cuda_kernel", ""), space)
    made: type[torch.nn.Module] = space["ModelNew"]
    return made
