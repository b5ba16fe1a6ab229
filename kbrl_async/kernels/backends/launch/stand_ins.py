"""What a call of an own function that returns tensors gives while own kernels are off: tensors alike, of no values.

::

    a recorded call ─▶ each function's results, outlined in turn ─▶ the same call with own functions left out
                                                                    ─▶ such tensors, of bytes that are NaN as floats

An honest forward goes on with them to a wrong answer, where on None it would fail, which proves nothing. What a
function wrote into an argument and returned is that argument, as it is.
"""

from __future__ import annotations

import contextlib
import functools
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


class StandIns:
    """Of one recorded call; other functions than there, or results other than tensors, have none."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any]] = []
        self._next = 0

    def note(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        outline = None
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor that has no memory
            outline = _outlined(result, _tensors(function, args))
        self._seen.append((name, outline))

    def begin(self) -> None:
        self._next = 0

    def give(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """None where the calls came in another order."""
        if self._next >= len(self._seen) or self._seen[self._next][0] != name:
            return None
        outline = self._seen[self._next][1]
        self._next += 1
        return _made(outline, _tensors(function, args))


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
    if isinstance(result, (list, tuple)):
        return type(result)(_outlined(item, given) for item in result) if type(result) in (list, tuple) else None
    if type(result) is dict:
        return {key: _outlined(item, given) for key, item in result.items()}
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    where = result.untyped_storage().data_ptr()
    alike = (one.untyped_storage().data_ptr() == where for one in given)
    place = next((n for n, is_alike in enumerate(alike) if is_alike and where), -1)
    return _Outline(result.size(), result.stride(), result.dtype, result.device, place, int(result.storage_offset()))


def _made(outline: Any, given: list[torch.Tensor]) -> Any:
    if isinstance(outline, _Outline):
        if 0 <= outline.place < len(given):
            memory = given[outline.place].untyped_storage()  # its numbers may be of another type there
            none = torch.empty(0, dtype=outline.dtype, device=outline.device)
            return none.set_(memory, outline.offset, outline.size, outline.stride)
        made = torch.empty_strided(outline.size, outline.stride, dtype=outline.dtype, device=outline.device)
        torch.empty(0, dtype=torch.uint8, device=outline.device).set_(made.untyped_storage()).fill_(_NO_VALUE)
        return made
    if isinstance(outline, (list, tuple)):
        return type(outline)(_made(item, given) for item in outline)
    if isinstance(outline, dict):
        return {key: _made(item, given) for key, item in outline.items()}
    return None
