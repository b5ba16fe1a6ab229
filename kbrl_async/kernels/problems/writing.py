"""How a problem file that we write is laid out: a `Module` as text.

Every line stands alone on purpose: the small policy's tokenizer merges whole lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


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
    declared: tuple[str, ...] = ()
    """What the problem says of itself: lines such as `DTYPE = "bfloat16"`."""
    free: tuple[str, ...] = ()
    """Names of shapes that `get_inputs` takes as arguments."""


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
            *module.declared,
            "",
            "",
            f"def get_inputs({', '.join(f'{name}={name}' for name in module.free)}):",
            f"    return [{', '.join(module.inputs)}]",
            "",
            "",
            "def get_init_inputs():",
            f"    return [{', '.join(module.init_arguments)}]",
            "",
        ]
    )
