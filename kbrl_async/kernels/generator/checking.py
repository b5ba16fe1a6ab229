"""Whether a drawn problem can tell right from wrong, found out by running it.

* every step and every input matters: without a step, or with another draw of one input, the outputs differ;
* nothing cheap passes: zeros, constants, another input's outputs, half of the rows;
* rounding decides nothing: fp64, and inputs moved by one rounding error, agree with it;
* outputs are finite, and of a size that a tolerance means something for;
* in every workload nothing cheap passes, and rounding decides nothing; the rest is asked of the first.

The text was written here, from our own operators, so it runs in this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbrl_async.kernels.audit import trials
from kbrl_async.kernels.problems.cases import cases
from kbrl_async.kernels.problems.model_contract import load, seed
from kbrl_async.kernels.verify import compare, inputs
from protocols.records import Problem

Values = list[torch.Tensor]
KERNELBENCH, KERNELBENCH_HALF = 1e-4, 1e-2
"""Its tolerances, relative and absolute: a problem is to be sound there, too."""
_SMALLEST, _LARGEST = 1e-3, 1e5
_MODEL_SEED, _FIRST, _SECOND, _MOVES = 1, 2, 3, 4


class Unsound(Exception):  # noqa: N818 - the answer of a check, with its reason in a word or two
    pass


def check(source: str, shortened: Sequence[tuple[str, str]]) -> str:
    """Why it is left out, in a few words; empty where it is sound.

    :param shortened: the program without one of its steps: that step's operator, and the text.
    """
    try:
        _check(source, shortened)
    except Unsound as reason:
        return str(reason)
    return ""


def _check(source: str, shortened: Sequence[tuple[str, str]]) -> None:
    first, *others = texts_of(source)
    program = CheckedModule(first)
    given, other, expected, allowed = _tells(program)
    for number in range(len(given)):
        swapped = [other[n] if n == number else value for n, value in enumerate(given)]
        if trials.verified(program.run(swapped), expected, allowed).passes:
            raise Unsound("an input does not matter")
    for operator, text in shortened:
        if trials.verified(CheckedModule(texts_of(text)[0]).run(given), expected, allowed).passes:
            raise Unsound(f"{operator} changes nothing")
    for text in others:
        _tells(CheckedModule(text))


def texts_of(source: str) -> list[str]:
    """A problem of each workload."""
    bounds = cases(Problem("", 0, "", source), random.Random(0))
    return [bound.problem.source for bound in bounds] or [source]


def _tells(program: CheckedModule) -> tuple[Values, Values, Values, list[compare.Tolerance]]:
    """Two draws, what the first gives, and what is allowed there.

    :raises Unsound: something cheap would pass, or no tolerance means anything.
    """
    given, other = program.draw(_FIRST), program.draw(_SECOND)
    expected, elsewhere = program.run(given), program.run(other)
    allowed = _tolerance(program, given, expected)
    figure = KERNELBENCH if program.dtype == torch.float32 else KERNELBENCH_HALF
    for name, cheap in {
        "zeros": trials.zeros(expected),
        "a constant": trials.constants(elsewhere),
        "another input's outputs": elsewhere,
        "half of the rows": trials.half_rows(expected),
    }.items():
        if cheap is None:
            continue
        if trials.verified(cheap, expected, allowed).passes or trials.all_fit(cheap, expected, figure).passes:
            raise Unsound(f"{name} would pass")
    return given, other, expected, allowed


class CheckedModule:
    """A source that was run, with its model."""

    def __init__(self, source: str) -> None:
        module = load("drawn", source)
        seed(_MODEL_SEED)
        self._get_inputs: Callable[[], list[Any]] = module.get_inputs
        self.model: torch.nn.Module = module.Model(*module.get_init_inputs()).eval()
        self.dtype = next((v.dtype for v in self.draw(_FIRST) if v.is_floating_point()), torch.float32)

    def draw(self, number: int) -> Values:
        seed(number)
        return [value for value in self._get_inputs() if isinstance(value, torch.Tensor)]

    def run(self, given: Values) -> Values:
        """:raises Unsound: it fails on what it was given."""
        try:
            with torch.no_grad():
                out = self.model(*given)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise Unsound(f"it fails: {str(error).splitlines()[0][:60]}") from None
        return [out] if isinstance(out, torch.Tensor) else list(out)


def _tolerance(program: CheckedModule, given: Values, expected: Values) -> list[compare.Tolerance]:
    """As a verdict would allow, so that what passes here passes there."""
    moved = program.run(inputs.moved(given, random.Random(_MOVES)))
    wide = _wide(program, given)
    scales = [compare.output_scale(tensor) for tensor in expected]
    for tensor, scale in zip(expected, scales, strict=True):
        if not bool(torch.isfinite(tensor).all()) or not _SMALLEST <= scale <= _LARGEST:
            raise Unsound("outputs too small, too large or not finite")
    allowed = [
        compare.tolerance(one, far, scale, error=compare.largest_error(one, near))
        for one, far, scale, near in zip(expected, wide, scales, moved, strict=True)
    ]
    if any(tolerance.ill for tolerance in allowed):
        raise Unsound("rounding errors decide")
    return allowed


def _wide(program: CheckedModule, given: Values) -> Sequence[torch.Tensor | None]:
    """The same in fp64; nothing where a cast inside forbids it."""
    program.model.double()
    try:
        return program.run([value.double() if value.is_floating_point() else value for value in given])
    except Unsound:
        return [None]
    finally:
        program.model.to(program.dtype)
