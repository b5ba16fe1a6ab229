"""Answers in CUDA, for backend=cuda-nvrtc: the same problems as in C, with a GPU's own ways to be wrong and slow.

To teach a further family CUDA: one function from spec and author to `CudaAnswer`, one line in `_WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.cuda import matrices, pointwise, rows
from kbrl_async.lab.small_policy.cuda.source import CudaAnswer, render
from kbrl_async.lab.small_policy.families.blocks import Attention, Perceptron
from kbrl_async.lab.small_policy.families.elementwise import Elementwise
from kbrl_async.lab.small_policy.families.images import DepthwiseConv, Pool
from kbrl_async.lab.small_policy.families.linear import Linear
from kbrl_async.lab.small_policy.families.rows import RowNorm, RowReduce
from kbrl_async.lab.small_policy.families.source import Family

_WRITERS: dict[type, Callable[[Any, Author], CudaAnswer]] = {
    Elementwise: pointwise.elementwise,
    Pool: pointwise.pool,
    DepthwiseConv: pointwise.depthwise,
    RowNorm: rows.norm,
    RowReduce: rows.reduce,
    Linear: matrices.linear,
    Perceptron: matrices.perceptron,
    Attention: matrices.attention,
}


def respond(spec: Family, author: Author) -> str:
    """The author's whole response to the problem of `spec`."""
    return render(spec.module(), _WRITERS[type(spec)](spec, author), author)
