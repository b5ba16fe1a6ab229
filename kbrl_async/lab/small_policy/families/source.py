"""How a problem file and an answer are laid out as text, whatever the family.

A family describes itself as a `Module` (the PyTorch side) and writes a `KernelAnswer`; both are rendered here.
Every line stands alone on purpose: the small policy's tokenizer merges whole lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from kbrl_async.lab.small_policy.author import Author


class NamedSize(msgspec.Struct, frozen=True):
    """A named size: `cpu` makes ≥ 0.2 ms of eager work on one core, `gpu` fills a GPU."""

    name: str
    cpu: int
    gpu: int

    def line(self) -> str:
        return f"{self.name} = {self.cpu}  # gpu: {self.gpu}"


class Module(msgspec.Struct, frozen=True):
    """The PyTorch side: what `Model` holds and does."""

    title: str
    shapes: tuple[NamedSize, ...]
    forward: tuple[str, ...]
    """Statements that assign `x` last."""
    inputs: tuple[str, ...]
    """Expressions of `get_inputs`, in the order of `arguments`."""
    arguments: tuple[str, ...] = ("x",)
    init_arguments: tuple[str, ...] = ()
    """Names of shapes that the constructor takes."""
    members: tuple[str, ...] = ()
    """Statements of the constructor, the same in `Model` and `ModelNew`."""


class KernelAnswer(msgspec.Struct, frozen=True):
    """What an author writes: the kernels' source, the statements of `ModelNew.forward`, and what they launch."""

    kernel: tuple[str, ...]
    forward: tuple[str, ...]
    kernels: tuple[str, ...] = ("run",)


class Family(Protocol):
    """One problem of a family."""

    def module(self) -> Module: ...

    def answer(self, author: Author) -> KernelAnswer: ...


def indent(lines: Sequence[str], depth: int) -> list[str]:
    return [" " * 4 * depth + line if line else "" for line in lines]


def render_problem(module: Module) -> str:
    """The text of a KernelBench problem file."""
    functional = any("F." in line for line in (*module.forward, *module.members))
    signature = ", ".join(("self", *module.init_arguments))
    return "\n".join(
        [
            "import torch",
            "import torch.nn as nn",
            *(["import torch.nn.functional as F"] if functional else []),
            "",
            "",
            "class Model(nn.Module):",
            f'    """{module.title}"""',
            "",
            f"    def __init__({signature}):",
            "        super().__init__()",
            *indent(module.members, 2),
            "",
            f"    def forward({', '.join(('self', *module.arguments))}):",
            *indent(module.forward, 2),
            "        return x",
            "",
            "",
            *[shape.line() for shape in module.shapes],
            "",
            "",
            "def get_inputs():",
            f"    return [{', '.join(module.inputs)}]",
            "",
            "",
            "def get_init_inputs():",
            f"    return [{', '.join(module.init_arguments)}]",
            "",
        ]
    )


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
