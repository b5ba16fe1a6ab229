"""How worked examples enter a prompt (RA-ICL): other modules with the kernels that replaced them, before the problem.

::

    compact                      zero_shot
    ┌ class Model … ### ModelNew   ┌ Worked examples … module … its kernel
    │ ```python … ```              │ …
    ├ … (the next example)         ├ …
    └ class Model … ### ModelNew   └ the contract, the module to replace

Invariants
* The best example stands last, next to the problem.
* An example is shown whole or not at all: what exceeds `MAX_CHARACTERS` or what is left of the token budget is dropped.
* Without examples the prompt is that of the template alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kbrl_async.rollouts.prompts.templates import INTRODUCTION, render_prompt, worked_example
from protocols.records import Problem

MAX_CHARACTERS = 10_000
"""Of one example, as it stands in the prompt."""


class Worked(Protocol):
    """A reference and its kernel, such as a hit of the index."""

    @property
    def reference(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    @property
    def speedup(self) -> float | None: ...


class Prompted(msgspec.Struct, frozen=True):
    """A prompt, and which of the offered examples are in it, by position."""

    text: str
    shown: tuple[int, ...] = ()


def render_with_examples(
    option: str,
    problem: Problem,
    offered: Sequence[Worked],
    count_tokens: Callable[[str], int],
    max_tokens: int,
    contract: str = "c",
    hardware: str = "",
) -> Prompted:
    """The prompt of `problem` with as many of `offered` (best first) as `max_tokens` of prompt allow."""
    bare = render_prompt(option, problem, contract, hardware)
    best, blocks = Prompted(bare), list[str]()
    for place, worked in enumerate(offered):
        block = render_example(option, worked)
        if len(block) > MAX_CHARACTERS:
            continue
        text = _joined(option, [*blocks, block], bare)
        if count_tokens(text) <= max_tokens:
            blocks.append(block)
            best = Prompted(text, (*best.shown, place))
    return best


def render_example(option: str, worked: Worked) -> str:
    """One example in the form of the template."""
    kernel = worked.kernel.rstrip() + "\n"
    if option == "compact":
        # the very form in which the small policy's own answers stand, so that it can copy lines
        return f"{render_prompt(option, Problem('', 0, '', worked.reference))}```python\n{kernel}```\n"
    return worked_example(worked.reference, worked.kernel, worked.speedup)


def _joined(option: str, blocks: Sequence[str], bare: str) -> str:
    best_last = [*reversed(blocks), bare]
    return "".join(best_last) if option == "compact" else "\n".join([INTRODUCTION, *best_last])
