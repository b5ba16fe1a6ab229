"""How an answer in CUDA is laid out as text, and the pieces that several families share.

As in C every line stands alone, so that the small policy's tokenizer merges whole lines.
"""

from __future__ import annotations

from kbrl_async.kernels.problems.writing import Module, indent
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.families.rows import Alone
from kbrl_async.lab.small_policy.families.source import KernelAnswer, answer_file
from kbrl_async.lab.small_policy.ops import ChainStep
from kbrl_async.lab.small_policy.ops import chain_function as function_of

ITEM = "long i = blockIdx.x * (long)blockDim.x + threadIdx.x;"
"""One thread an item."""
BLOCK = 256


def render(module: Module, answer: KernelAnswer, author: Author) -> str:
    """The policy's response: a fenced Python file that defines `ModelNew`."""
    closing = author.slip("fence", "```\n", "")
    kernels = {name: name for name in answer.kernels}
    return answer_file(module, "cuda_kernel", ["#include <math.h>", *answer.kernel], kernels, answer.forward) + closing


def chain_function(steps: tuple[ChainStep, ...], author: Author, join: str = "") -> list[str]:
    """`f(v)`, or `f(v, w)` where `join` says how a second value comes in first."""
    return function_of("f", steps, author, linkage="__device__", join=join)


def items(author: Author, count: str, each: int = BLOCK) -> str:
    """Grid of a kernel whose blocks take `each` items."""
    return author.slip("argument", f"({count} + {each - 1}) // {each}", f"{count} // {4 * each}", str(each))


def launch(kernel: str, grid: str, *arguments: str, block: int = BLOCK) -> str:
    return f"self.{kernel}[{grid}, {block}]({', '.join(arguments)})"


TOTAL = (
    "__device__ float total(float s) {",
    "    __shared__ float part[32];",
    "    for (int k = 16; k > 0; k /= 2) s += __shfl_xor_sync(0xffffffff, s, k);",
    "    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;",
    "    __syncthreads();",
    "    s = 0.0f;",
    "    for (int k = 0; k < blockDim.x / 32; k++) s += part[k];",
    "    __syncthreads();",
    "    return s;",
    "}",
)
"""Sum over a block; every thread gets it."""
LARGEST = (
    "__device__ float largest(float m) {",
    "    __shared__ float part[32];",
    "    for (int k = 16; k > 0; k /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, k));",
    "    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = m;",
    "    __syncthreads();",
    "    m = part[0];",
    "    for (int k = 1; k < blockDim.x / 32; k++) m = fmaxf(m, part[k]);",
    "    __syncthreads();",
    "    return m;",
    "}",
)
"""Maximum over a block; every thread gets it."""


class RowGroup(Alone, frozen=True):
    """Who works on one row: one thread alone (slow), or a block together (fast)."""

    together: bool

    def loop(self, *body: str) -> list[str]:
        head = "for (long c = threadIdx.x; c < cols; c += blockDim.x) {"
        return [head, *indent(body, 1), "}"] if self.together else super().loop(*body)

    def sum(self, name: str = "s") -> list[str]:
        return [f"{name} = total({name});"] if self.together else []

    def max(self, *start: str) -> list[str]:
        return [*start, *self.loop("m = fmaxf(m, b[c]);"), *self.join_max()]

    def join_max(self) -> list[str]:
        return ["m = largest(m);"] if self.together else []

    def helpers(self, *helpers: tuple[str, ...]) -> list[str]:
        return [line for helper in helpers for line in helper] if self.together else []

    def prologue(self, author: Author, rows: str = "rows") -> list[str]:
        if self.together:
            return ["long r = blockIdx.x;"]
        bound = author.slip("bound", f"r >= {rows}", f"r >= {rows} - 1", f"r >= {rows} / 2")
        return ["long r = blockIdx.x * (long)blockDim.x + threadIdx.x;", f"if ({bound}) return;"]

    def grid(self, author: Author, rows: str) -> str:
        if self.together:
            return author.slip("bound", rows, f"{rows} - 1", f"{rows} // 2")
        return items(author, rows, 64)

    @property
    def block(self) -> int:
        return BLOCK if self.together else 64
