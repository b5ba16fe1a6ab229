"""The library's operators, added up in another order: an honest second implementation of any module, in eager mode.

::

    product  ─▶ four parts of the inner dimension, the last part first       sum, mean, variance ─▶ the same
    convolution ─▶ two halves of the weights, the bias last                  running sums ─▶ part by part
    norm, softmax, loss, attention ─▶ torch's own decomposition, whose sums and products are as above

Types stay as they are; what is narrower than fp32 is added up in fp32 and rounded once, as the library does it. What
adds nothing up is as it was.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

_PARTS = 4
_aten = torch.ops.aten
_DECOMPOSED = (
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"),
    *("_fused_rms_norm", "_softmax", "_log_softmax", "logsumexp", "linalg_vector_norm", "norm", "mse_loss"),
    *("smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "nll_loss_forward"),
)
_ATTENTION = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
_Operator = Callable[..., Any]


class Reordered(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore] # torch's own hook is not typed
    """As long as it is entered. `changed`: operators that added up in another order so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.changed = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _WAYS:
            found = _WAYS[func](*args, **given)
            self.changed += found is not None
            return func(*args, **given) if found is None else found
        if func in _OPENED:
            with self:
                return decomposition_table[func](*args, **given)
        if func in _ATTENDING:
            first, *others = func(*args, **given)
            with self:
                return _attention(first, _named(func, args, given)), *others
        return self._by_parts(func, args, given)

    def _by_parts(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """What is made of other operators comes as these, but not from inside of one that was opened."""
        with self:
            found = func.decompose(*args, **given)
        return func(*args, **given) if found is NotImplemented else found


@contextlib.contextmanager
def step_by_step(model: torch.nn.Module) -> Iterator[None]:
    """Recurrent layers are made of operators, which the library else does in one."""
    if not any(isinstance(one, torch.nn.RNNBase) for one in model.modules()):
        yield
        return
    with warnings.catch_warnings(), contextlib.ExitStack() as off:
        warnings.simplefilter("ignore")  # torch sets flags of GPUs that are not there
        for library in (torch.backends.mkldnn, torch.backends.cudnn):
            off.enter_context(library.flags(enabled=False))
        yield


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Of matrices, or of as many in a row; None where nothing is added up."""
    if not _adds(a) or a.shape[-1] < 2:
        return None
    parts = min(_PARTS, a.shape[-1])
    both = list(zip(_wide(a).tensor_split(parts, -1), _wide(b).tensor_split(parts, -2), strict=True))
    one, other = both.pop()
    found = one @ other
    for one, other in reversed(both):
        found = found.addmm_(one, other) if found.dim() == 2 else found.baddbmm_(one, other)
    return found


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    found = _product(a, b)
    return None if found is None else found.to(a.dtype)


def _addmm(
    more: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor | None:
    found = _product(a, b)
    if found is None:
        return None
    found = found if alpha == 1 else found * alpha
    return (found if beta == 0 else found + beta * more).to(a.dtype)


def _mv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    found = _mm(a, b.unsqueeze(1))
    return None if found is None else found.squeeze(1)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    found = _mv(a.unsqueeze(0), b)
    return None if found is None else found.squeeze(0)


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor | None:
    """One half of the weights is zero in each of two."""
    is_transposed, groups = how[3], how[5]
    half = _half(weight, is_transposed, groups)
    if half is None or not _adds(x):
        return None
    wide, weights = _wide(x), _wide(weight)
    found: torch.Tensor = _aten.convolution.default(wide, weights * ~half, None, *how)
    found += _aten.convolution.default(wide, weights * half, None, *how)
    if bias is not None:
        found += bias.view(-1, *[1] * (weight.dim() - 2))
    return found.to(x.dtype)


def _half(weight: torch.Tensor, is_transposed: bool, groups: int) -> torch.Tensor | None:
    """Of the weights that one output adds up, about half; None where there is but one."""
    inputs = weight.shape[0] // groups if is_transposed else weight.shape[1]
    taps = max(range(2, weight.dim()), key=lambda axis: weight.shape[axis])
    axis = taps if inputs < 2 else 0 if is_transposed else 1
    size = weight.shape[axis]
    if size < 2:
        return None
    places = torch.arange(size, device=weight.device)
    chosen = places % 2 == 0 if axis == 0 else places < size // 2
    return chosen.view(-1, *[1] * (weight.dim() - 1 - axis))


# ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sum(
    x: torch.Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    kind = dtype or x.dtype
    axes = _axes(x, dim)
    axis = max(axes, key=lambda one: x.shape[one], default=None)
    if axis is None or not _adds(x) or not kind.is_floating_point or x.shape[axis] < 2:
        return None
    wide = torch.promote_types(kind, torch.float32)
    parts = [*x.tensor_split(min(_PARTS, x.shape[axis]), axis)]
    found = parts.pop().sum(axes, keepdim, dtype=wide)
    for part in reversed(parts):
        found += part.sum(axes, keepdim, dtype=wide)
    return found.to(kind)


def _mean(
    x: torch.Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    kind = dtype or x.dtype
    found = _sum(x, dim, keepdim, dtype=torch.promote_types(kind, torch.float32))
    return None if found is None else (found / _count(x, dim)).to(kind)


def _moments(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Variance and mean: the mean first, and then what lies apart from it."""
    wide = _wide(x)
    mean = _mean(wide, dim, True)
    squares = None if mean is None else _sum((wide - mean).square_(), dim, keepdim)
    if mean is None or squares is None:
        return None
    shaped = mean if keepdim else mean.view(squares.shape)
    return squares / max(0.0, _count(x, dim) - (1.0 if correction is None else correction)), shaped


def _var_mean(x: torch.Tensor, *how: Any, **named: Any) -> tuple[torch.Tensor, ...] | None:
    found = _moments(x, *how, **named)
    return None if found is None else tuple(one.to(x.dtype) for one in found)


def _var(x: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor | None:
    found = _moments(x, *how, **named)
    return None if found is None else found[0].to(x.dtype)


def _std(x: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor | None:
    found = _moments(x, *how, **named)
    return None if found is None else found[0].sqrt().to(x.dtype)


def _running(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None, way: _Operator, join: _Operator) -> Any:
    kind = dtype or x.dtype
    if x.dim() == 0 or x.shape[dim] < 2 or not _adds(x) or not kind.is_floating_point:
        return None
    wide = x.to(torch.promote_types(kind, torch.float32))
    made: list[torch.Tensor] = []
    for part in wide.tensor_split(min(_PARTS, x.shape[dim]), dim):
        ahead = way(part, dim)
        made.append(join(ahead, made[-1].narrow(dim, -1, 1)) if made else ahead)
    return torch.cat(made, dim).to(kind)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return _running(x, dim, dtype=dtype, way=torch.cumsum, join=torch.add)


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return _running(x, dim, dtype=dtype, way=torch.cumprod, join=torch.mul)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(like: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """All scores at once. Its operators come to whoever is entered."""
    query, key, value = (_wide(given[name]) for name in ("query", "key", "value"))
    if key.shape[1] != query.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = (query * scale) @ key.transpose(-1, -2)
    mask = given.get("attn_mask") if given.get("attn_mask") is not None else given.get("attn_bias")
    if mask is not None:
        scores += mask
    if given.get("is_causal"):
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), -math.inf)
    return torch.empty_like(like).copy_(_aten._safe_softmax.default(scores, -1) @ value)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


# ── what all of them need ─────────────────────────────────────────────────────────────────────────────────────────


def _adds(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.numel() > 0


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _axes(x: torch.Tensor, dim: Sequence[int] | int | None) -> list[int]:
    asked = [dim] if isinstance(dim, int) else dim
    return [axis % x.dim() for axis in asked] if asked and x.dim() else list(range(x.dim()))


def _count(x: torch.Tensor, dim: Sequence[int] | int | None) -> int:
    return math.prod(x.shape[axis] for axis in _axes(x, dim))


def _overloads(names: Sequence[str]) -> Iterator[Any]:
    """Those that write into nothing that is there."""
    for packet in (getattr(_aten, name, None) for name in names):
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            if not any(one.is_out for one in found._schema.arguments):
                yield found


_WAYS: dict[Any, _Operator] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _addmm,
    _aten.mv.default: _mv,
    _aten.dot.default: _dot,
    _aten.convolution.default: _convolution,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.var_mean.correction: _var_mean,
    _aten.var.correction: _var,
    _aten.std.correction: _std,
    _aten.cumsum.default: _cumsum,
    _aten.cumprod.default: _cumprod,
}
_OPENED = {one for one in _overloads(_DECOMPOSED) if one in decomposition_table}
_ATTENDING = set(_overloads(_ATTENTION))
