"""A problem that is being drawn: its value's layout, and the lines written so far.

::

    start(layout) ─▶ operator(draft) … operator(draft) ─▶ module() ─▶ text
"""

from __future__ import annotations

import math
import random
import re

import msgspec

from kbrl_async.kernels.problems.writing import Module, NamedSize

ROWS, SEQUENCE, IMAGE, HEADS = "rows", "sequence", "image", "heads"
LAYOUTS = {
    ROWS: ("rows", "cols"),
    SEQUENCE: ("batch", "length", "width"),
    IMAGE: ("batch", "channels", "height", "breadth"),
    HEADS: ("batch", "heads", "length", "dim"),
}
"""What the dimensions of a value are called, by layout."""
_CPU: dict[str, tuple[int, ...]] = {
    "rows": (192, 256, 384, 500, 512, 640, 768),
    "cols": (256, 384, 500, 512, 768, 1000, 1024),
    "batch": (2, 4, 6, 8),
    "length": (64, 96, 100, 128, 192, 256),
    "width": (64, 96, 128, 192, 256),
    "channels": (8, 12, 16, 24, 32),
    "height": (24, 28, 32, 48, 56),
    "breadth": (24, 28, 32, 48, 56),
    "heads": (2, 4, 8),
    "dim": (32, 64),
    "hidden": (64, 128, 192, 256, 384),
    "classes": (10, 50, 100, 256),
    "entries": (100, 500, 1000),
}
_ON_GPU = {"rows": 32, "cols": 8, "batch": 2, "length": 8, "width": 8, "channels": 4, "height": 4, "breadth": 4,
           "heads": 2, "dim": 2, "hidden": 8, "classes": 4, "entries": 16}  # fmt: skip


_MOST_CPU, _MOST_GPU = 1 << 21, 1 << 29
"""Elements of a value."""


class Unfit(Exception):  # noqa: N818 - an operator's answer, not a failure
    """The operator can't follow here; another one is drawn."""


class Size(msgspec.Struct, frozen=True):
    """One dimension: an expression of named sizes, and what it is on a CPU and on a GPU."""

    text: str
    cpu: int
    gpu: int

    def over(self, count: int) -> Size:
        """`width // 4`; only where nothing is left over."""
        if self.cpu % count or self.gpu % count or self.cpu == count:
            raise Unfit
        return Size(f"{self._inner} // {count}", self.cpu // count, self.gpu // count)

    def times(self, count: int) -> Size:
        return Size(f"{self._inner} * {count}", self.cpu * count, self.gpu * count)

    def by(self, other: Size) -> Size:
        return Size(f"{self._inner} * {other._inner}", self.cpu * other.cpu, self.gpu * other.gpu)

    def plus(self, count: int) -> Size:
        sign = "+" if count > 0 else "-"
        return Size(f"{self._inner} {sign} {abs(count)}", self.cpu + count, self.gpu + count)

    @property
    def _inner(self) -> str:
        return self.text if self.text.isidentifier() else f"({self.text})"


def smaller(size: Size) -> list[int]:
    """What a CPU's size of that name may be instead."""
    return [cpu for cpu in _CPU[size.text] if cpu < size.cpu]


class Variation(msgspec.Struct, frozen=True):
    """What a problem has beside one case in fp32."""

    free: str = ""
    """The size that its workloads differ in; empty: there is one."""
    others: tuple[Size, ...] = ()
    """Of the workloads behind the first."""
    weights: tuple[int, ...] = ()
    """Of all workloads."""
    dtype: str = ""

    def lines(self) -> tuple[str, ...]:
        """As the problem's file declares them."""
        names = (self.free, *(size.text for size in self.others)) if self.free else ()
        rows = [
            f'{{"shape": {{"{self.free}": {name}}}{f""", "weight": {weight}""" if weight > 1 else ""}}}'
            for name, weight in zip(names, self.weights, strict=True)
        ]
        workloads = [f"WORKLOADS = [{', '.join(rows)}]"] if rows else []
        return *workloads, *([f'DTYPE = "{self.dtype}"'] if self.dtype else [])


class DraftStep(msgspec.Struct, frozen=True):
    """What one operator wrote into `forward`."""

    operator: str
    lines: tuple[str, ...]
    keeps_shape: bool
    """Without it the program still runs: whether it matters can be tried."""


class ProblemDraft:
    """Operators read `layout` and `dims`, and write by `do`, `member`, `given` and `size`."""

    def __init__(self, rng: random.Random, layout: str) -> None:
        self.rng, self.layout = rng, layout
        self.sizes: dict[str, Size] = {}
        self.dims = [self.size(name) for name in LAYOUTS[layout]]
        self.steps: list[DraftStep] = []
        self.members: list[str] = []
        self.arguments: dict[str, str] = {"x": f"torch.randn({self.shape()})"}
        self.is_ended = False
        """A loss or another scalar: nothing follows."""
        self.kept: dict[str, list[Size]] = {}
        """Values kept for later, by name."""
        self.gpu_elements = math.prod(size.gpu for size in self.dims)
        """Of `x`, and of what each step writes, on a GPU."""
        self._operator = ""

    # what an operator asks

    def size(self, name: str) -> Size:
        """The size of that name, drawn once."""
        if name not in self.sizes:
            cpu = self.rng.choice(_CPU[name])
            self.sizes[name] = Size(name, cpu, cpu * _ON_GPU[name])
        return self.sizes[name]

    def shape(self, dims: list[Size] | None = None) -> str:
        return ", ".join(size.text for size in (self.dims if dims is None else dims))

    @property
    def last(self) -> Size:
        return self.dims[-1]

    # what an operator writes

    def do(self, *lines: str, layout: str | None = None, dims: list[Size] | None = None) -> None:
        """Statements that assign `x`, which then has this layout and these dimensions.

        :raises Unfit: it would be too large.
        """
        after = self.dims if dims is None else dims
        if math.prod(size.cpu for size in after) > _MOST_CPU or math.prod(size.gpu for size in after) > _MOST_GPU:
            raise Unfit
        before = (self.layout, [size.cpu for size in self.dims])
        self.layout, self.dims = layout or self.layout, after
        self.gpu_elements += math.prod(size.gpu for size in after)
        same = before == (self.layout, [size.cpu for size in after])
        self.steps.append(DraftStep(self._operator, lines, same))

    def member(self, name: str, constructor: str) -> str:
        """A submodule or parameter of its own; its expression in `forward`."""
        taken = sum(re.match(rf"self\.{name}\d* = ", line) is not None for line in self.members)
        own = f"{name}{taken + 1}" if taken else name
        self.members.append(f"self.{own} = {constructor}")
        return f"self.{own}"

    def given(self, name: str, maker: str) -> str:
        """One more input; its name in `forward`."""
        own = name
        while own in self.arguments:
            own = f"{name}{len(self.arguments)}"
        self.arguments[own] = maker
        return own

    def take(self, operator: str) -> None:
        """The operator that writes next."""
        self._operator = operator

    # what comes out

    def free_names(self) -> list[str]:
        """Sizes that only inputs have, with those of the same name that are smaller."""
        written = "\n".join([*self.members, *(line for step in self.steps for line in step.lines)])
        made = "\n".join(self.arguments.values())
        return [
            name
            for name, size in self.sizes.items()
            if re.search(rf"\b{name}\b", made) and not re.search(rf"\b{name}\b", written) and smaller(size)
        ]

    def module(self, title: str, *, without: int = -1, variation: Variation | None = None) -> Module:
        """:param without: the number of a step that is left out."""
        lines = [line for number, step in enumerate(self.steps) if number != without for line in step.lines]
        wanted = "\n".join(self.members)
        init = tuple(name for name in self.sizes if re.search(rf"\b{name}\b", wanted))
        used = "\n".join([wanted, *self.arguments.values()])
        sizes = [size for name, size in self.sizes.items() if re.search(rf"\b{name}\b", used)]
        varied = variation or Variation()
        return Module(
            title,
            tuple(NamedSize(size.text, size.cpu, size.gpu) for size in (*sizes, *varied.others)),
            tuple(lines),
            tuple(self.arguments.values()),
            tuple(self.arguments),
            init,
            tuple(self.members),
            varied.lines(),
            (varied.free,) if varied.free else (),
        )
