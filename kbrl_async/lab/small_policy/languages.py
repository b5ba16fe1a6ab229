"""In which languages an author can answer. To add one: a function from spec and author to a response, a line in
`LANGUAGES`; to teach a further family CUDA: a function from spec and author to `KernelAnswer`, a line in `_IN_CUDA`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kbrl_async.errors import ConfigError
from kbrl_async.lab.small_policy.author import Author
from kbrl_async.lab.small_policy.cuda import matrices, pointwise, rows
from kbrl_async.lab.small_policy.cuda.source import render
from kbrl_async.lab.small_policy.families.blocks import Attention, Perceptron
from kbrl_async.lab.small_policy.families.elementwise import Elementwise
from kbrl_async.lab.small_policy.families.images import DepthwiseConv, Pooling
from kbrl_async.lab.small_policy.families.linear import Linear
from kbrl_async.lab.small_policy.families.rows import RowNorm, RowReduce
from kbrl_async.lab.small_policy.families.source import KernelAnswer, ProblemFamily, render_answer

_IN_CUDA: dict[type, Callable[[Any, Author], KernelAnswer]] = {
    Elementwise: pointwise.elementwise,
    Pooling: pointwise.pool,
    DepthwiseConv: pointwise.depthwise,
    RowNorm: rows.norm,
    RowReduce: rows.reduce,
    Linear: matrices.linear,
    Perceptron: matrices.perceptron,
    Attention: matrices.attention,
}


def _in_c(spec: ProblemFamily, author: Author) -> str:
    return render_answer(spec.module(), spec.answer(author), author)


def _in_cuda(spec: ProblemFamily, author: Author) -> str:
    return render(spec.module(), _IN_CUDA[type(spec)](spec, author), author)


LANGUAGES: Mapping[str, Callable[[ProblemFamily, Author], str]] = {"c": _in_c, "cuda-nvrtc": _in_cuda}
"""By backend."""


def respond(spec: ProblemFamily, author: Author, backend: str) -> str:
    """The author's response to the problem of `spec`, a fenced file with slips and all."""
    try:
        return LANGUAGES[backend](spec, author)
    except KeyError:
        known = ", ".join(LANGUAGES)
        raise ConfigError(f"the small policy can't be taught backend={backend}", f"It learns {known}") from None
