"""How a problem file and an answer are laid out as text, whatever the family.

A family describes itself as a `Module` (the PyTorch side) and writes a `KernelAnswer`; both are rendered here.
Every line stands alone on purpose: the small policy's tokenizer merges whole lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kbrl_async.kernels.problems.writing import Module, indent
from kbrl_async.lab.small_policy.author import Author


class KernelAnswer(msgspec.Struct, frozen=True):
    """What an author writes: the kernels' source, the statements of `ModelNew.forward`, and what they launch."""

    kernel: tuple[str, ...]
    forward: tuple[str, ...]
    kernels: tuple[str, ...] = ("run",)


class ProblemFamily(Protocol):
    """One problem of a family."""

    def module(self) -> Module: ...

    def answer(self, author: Author) -> KernelAnswer: ...


def render_answer(module: Module, answer: KernelAnswer, author: Author) -> str:
    """The policy's response: a fenced Python file that defines `ModelNew`."""
    closing = author.slip("fence", "```\n", "")
    pragma = author.style("", '#pragma GCC optimize("Ofast")')
    source = [*([pragma] if pragma else []), "#include <math.h>", *answer.kernel]
    return answer_file(module, "c_kernel", source, {"kernel": "run"}, answer.forward) + closing


def answer_file(
    module: Module, launcher: str, source: Sequence[str], kernels: Mapping[str, str], forward: Sequence[str]
) -> str:
    """A fenced Python file, its fence still open. `kernels`: functions of the source by their names in `ModelNew`."""
    lines = [
        "```python",
        "import torch",
        "import torch.nn as nn",
        f"from kbrl_async.launch import {launcher}",
        'SOURCE = r"""',
        *source,
        '"""',
        "class ModelNew(nn.Module):",
        f"    def __init__({', '.join(('self', *module.init_arguments))}):",
        "        super().__init__()",
        *indent(module.members, 2),
        *(f'        self.{name} = {launcher}(SOURCE, "{function}")' for name, function in kernels.items()),
        f"    def forward({', '.join(('self', *module.arguments))}):",
        *indent(forward, 2),
        "        return out",
    ]
    return "\n".join(lines) + "\n"


def statement(author: Author, text: str, wrong_name: tuple[str, str] | None = None) -> str:
    """A C statement in which the author may forget the semicolon or use a name that does not exist."""
    if wrong_name:
        text = author.slip("name", text, text.replace(*wrong_name))
    return author.slip("syntax", text, text.removesuffix(";"))
