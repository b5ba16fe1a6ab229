"""What the library does in one operator, done in products that can be narrowed: see `lowering`.

::

    LSTM, GRU, RNN ─▶ a product for each step          cdist ─▶ norms, and the product of the two
    bilinear       ─▶ two products after each other    attention that is large ─▶ blocks of its rows
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SCORES = 1 << 24
"""Of one block of an attention's; what has more is done in several."""


class TakenApart(TorchFunctionMode):
    """While it is entered. What gradients are asked of is left as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = _INSTEAD.get(getattr(function, "__name__", ""))
        given = functools.partial(function, *args, **(kwargs or {}))
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if instead is None or not tensors or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)):
            return given()
        return instead(given, *args, **(kwargs or {}))


def _recurrent(given: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    with _steps():
        return given()


@contextlib.contextmanager
def _steps() -> Iterator[None]:
    """Without the libraries that have a recurrent layer as a whole."""
    binding: Any = torch._C
    before = binding._get_cudnn_enabled(), binding._get_mkldnn_enabled()
    try:
        binding._set_cudnn_enabled(False)
        binding._set_mkldnn_enabled(False)
        yield
    finally:
        binding._set_cudnn_enabled(before[0])
        binding._set_mkldnn_enabled(before[1])


def _cdist(given: Callable[[], Any], one: torch.Tensor, other: torch.Tensor, p: float = 2.0, *_: Any, **__: Any) -> Any:
    """By the product, as a kernel of matrix units has it. Of other norms there is no product."""
    if p != 2 or not one.is_floating_point():
        return given()
    squares = one.square().sum(-1)[..., :, None] + other.square().sum(-1)[..., None, :]
    return (squares - 2 * (one @ other.mT)).clamp_min(0).sqrt()


def _bilinear(
    given: Callable[[], Any],
    one: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Any:
    outputs, left, right = weight.shape
    found = one.reshape(-1, left) @ weight.transpose(0, 1).reshape(left, -1)
    found = (found.view(-1, outputs, right) @ other.reshape(-1, right, 1)).view(*one.shape[:-1], outputs)
    return found if bias is None else found + bias


def _attention(
    given: Callable[[], Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    rows, keys = query.shape[-2], key.shape[-2]
    before = query.shape[:-2]
    if dropout_p or math.prod(before) * rows * keys <= SCORES:
        return given()
    if enable_gqa:
        key, value = (one.repeat_interleave(before[-1] // one.shape[-3], -3) for one in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(*before, rows, keys)
    found = query.new_empty(*before, rows, value.shape[-1])
    key, value = (one.expand(*before, *one.shape[-2:]) for one in (key, value))
    step = max(1, SCORES // keys)
    for place in _places(before):
        for first in range(0, rows, step):
            block = slice(first, first + step)
            scores = (query[place][block].float() * factor) @ key[place].float().mT
            if is_causal:
                places = torch.arange(max(rows, keys), device=scores.device)
                scores.masked_fill_(places[:keys] > places[:rows][block, None], -math.inf)
            if mask is not None and mask.dtype is torch.bool:
                scores.masked_fill_(~mask[place][block], -math.inf)
            elif mask is not None:
                scores += mask[place][block]
            shares = torch.softmax(scores, -1).nan_to_num_(0.0)  # of a row in which nothing may be looked at
            found[place][block] = (shares @ value[place].float()).to(found.dtype)
    return found


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for number in range(math.prod(shape)):
        place = list[int]()
        for size in reversed(shape):
            number, left = divmod(number, size)
            place.insert(0, left)
        yield tuple(place)


_INSTEAD: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "cdist": _cdist,
    "bilinear": _bilinear,
    "scaled_dot_product_attention": _attention,
}
