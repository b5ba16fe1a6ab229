"""Draws that come about where they are to lie: what `get_inputs` asks of `torch.rand` and `torch.randn` is written into
the places of the inputs. Else a draw is in memory twice, as it was made and as it is handed over.

What is handed out is another tensor over the same memory: `get_inputs` may turn it round or ask for its gradient, and
the place stays as it was.

The values are the same: both functions are an empty tensor filled by the generator, and so they are here. What
`get_inputs` does to them afterwards, or how else it makes inputs, is its own, and is copied as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MADE = (torch.rand, torch.randn)
_PLAIN = {"device", "dtype"}


class DrawnInPlace(TorchFunctionMode):
    """`places`: tensors of the inputs' shapes, each given out once, to the first who asks for one like it. Enter it
    outside of a device: as a context, that says which one is meant.
    """

    def __init__(self, places: list[torch.Tensor]) -> None:
        super().__init__()
        self._left = list(places)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        place = self._place(args, given) if func in _MADE and given.keys() <= _PLAIN else None
        return func(*args, **given) if place is None else func(place.shape, out=place.detach())

    def _place(self, args: tuple[Any, ...], given: dict[str, Any]) -> torch.Tensor | None:
        shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        dtype, device = given.get("dtype") or torch.get_default_dtype(), given.get("device") or "cpu"
        for number, place in enumerate(self._left):
            is_alike = (tuple(place.shape), place.dtype) == (shape, dtype) and place.is_contiguous()
            if is_alike and _is_on(place, torch.device(device)):
                return self._left.pop(number)
        return None


def _is_on(place: torch.Tensor, device: torch.device) -> bool:
    return place.device.type == device.type and place.device.index in (device.index or 0, None)


def settled(tensors: list[torch.Tensor], places: list[torch.Tensor], arena: tuple[int, int]) -> list[torch.Tensor]:
    """The same, copied where they lie in the arena, a stretch of addresses, and not where they belong: what is written
    to its place might be a part of them.
    """
    found = []
    for tensor, place in zip(tensors, places, strict=True):
        is_inside = tensor.numel() > 0 and arena[0] <= tensor.data_ptr() < arena[1]
        found.append(tensor.clone() if is_inside and not is_there(tensor, place) else tensor)
    return found


def is_there(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether it is just what lies there."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        place.data_ptr(),
        place.shape,
        place.stride(),
        place.dtype,
    )
