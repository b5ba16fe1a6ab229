"""What a call of an own function gives while own kernels are off: tensors and numbers alike, of no values.

::

    a recorded call ─▶ each function's results, outlined in turn ─▶ the same call with own functions left out
    one over other inputs ─▶ whole numbers, flags, words ─────┘     ─▶ such tensors, of bytes that are NaN as floats

An honest forward goes on with them to a wrong answer, where on None it would fail, which proves nothing. What a
function wrote into an argument and returned is that argument, as it is. A float is NaN: one of other inputs, such as a
mean, may be this one's, too. By whole numbers, flags and words forward goes its way (sizes, say); those of these very
inputs may be the answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_NO_VALUE = 0xFF


class _Outline(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: int = -1
    """Of the argument in whose memory it lies, `offset` elements into it."""
    offset: int = 0


class _AsGiven(NamedTuple):
    """What is neither tensor nor float."""

    value: Any


class StandIns:
    """Of one recorded call; other functions than there have none. `before`: of the call that was recorded before."""

    def __init__(self, before: StandIns | None = None) -> None:
        self._seen: list[tuple[str, Any]] = []
        self._before = [] if before is None else before._seen
        self._next = 0

    def note(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        outline = None
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor that has no memory
            outline = _outlined(result, _tensors(function, args))
        self._seen.append((name, outline))

    def begin(self) -> None:
        self._next = 0

    def give(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """As the next call of this function gave it, or else an earlier one: values that are none may lead forward
        another way. None where there was no such call.
        """
        order = (*range(self._next, len(self._seen)), *range(self._next))
        place = next((place for place in order if self._seen[place][0] == name), -1)
        if place < 0:
            return None
        self._next = place + 1
        outline, others = self._seen[place][1], self._before[place : place + 1]
        other = others[0][1] if others and others[0][0] == name else None
        return _made(outline, other, _tensors(function, args))


def _tensors(function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Those that it is called with, by keyword and in lists as well."""
    named = tuple(function.keywords.values()) if isinstance(function, functools.partial) else ()
    return [
        item for item in _leaves((*args, *named)) if isinstance(item, torch.Tensor) and item.layout is torch.strided
    ]


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, (list, tuple, dict)):
        for one in item.values() if isinstance(item, dict) else item:
            yield from _leaves(one)
    else:
        yield item


def _outlined(result: Any, given: list[torch.Tensor]) -> Any:
    if type(result) in (list, tuple):
        return type(result)(_outlined(item, given) for item in result)
    if type(result) is dict:
        return {key: _outlined(item, given) for key, item in result.items()}
    if isinstance(result, (list, tuple, dict)):
        return None
    if not isinstance(result, torch.Tensor):
        return _AsGiven(math.nan if isinstance(result, (float, complex)) else result)
    if result.layout is not torch.strided:
        return None
    where = result.untyped_storage().data_ptr()
    alike = (one.untyped_storage().data_ptr() == where for one in given)
    place = next((n for n, is_alike in enumerate(alike) if is_alike and where), -1)
    return _Outline(result.size(), result.stride(), result.dtype, result.device, place, int(result.storage_offset()))


def _made(outline: Any, other: Any, given: list[torch.Tensor]) -> Any:
    """`other`: the outline of what the same function gave over other inputs."""
    if isinstance(outline, _Outline):
        if 0 <= outline.place < len(given):
            memory = given[outline.place].untyped_storage()  # its numbers may be of another type there
            none = torch.empty(0, dtype=outline.dtype, device=outline.device)
            return none.set_(memory, outline.offset, outline.size, outline.stride)
        made = torch.empty_strided(outline.size, outline.stride, dtype=outline.dtype, device=outline.device)
        torch.empty(0, dtype=torch.uint8, device=outline.device).set_(made.untyped_storage()).fill_(_NO_VALUE)
        return made
    if isinstance(outline, _AsGiven):
        return other.value if isinstance(other, _AsGiven) else None
    if isinstance(outline, (list, tuple)):
        others = other if type(other) is type(outline) and len(other) == len(outline) else [None] * len(outline)
        return type(outline)(_made(*both, given) for both in zip(outline, others, strict=True))
    if isinstance(outline, dict):
        by_name = other if isinstance(other, dict) else {}
        return {key: _made(item, by_name.get(key), given) for key, item in outline.items()}
    return None
