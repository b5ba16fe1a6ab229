"""What a problem's `PRECISION` costs: its reference with the operands of matrix products rounded to those numbers.

::

    operands ─▶ a scale for each row of the one, each column of the other, or each block along the sum
             ─▶ rounded, and scaled back ─▶ the library's product        (all else as the reference has it)

As honest kernels do it: symmetric, to the nearest (tf32 cut); products of fp16 are kept in fp16, and may overflow.
Seen are operators of torch below `linear`, `matmul`, `einsum`, convolutions and grouped products; what is done in one
operator is `taken_apart`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from kbrl_async.kernels.problems.declared import PRECISIONS
from kbrl_async.kernels.verify.taken_apart import TakenApart
from kbrl_async.kernels.verify.tolerance import FP8_SUM

GRIDS = 8
"""Ways to lay the numbers that are left: of few outputs one way says little."""
_STEP = 1 / 64
_OPERANDS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "convolution", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
}
_WHOLE = {"int8": 127.0, "int4": 7.0}
_FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_CAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}
_BELOW_INT8 = (*_FP8, *_BLOCKS, "int4")
_LARGEST_E2M1, _LARGEST_E4M3 = 6.0, 448.0
_LEAST = 1e-30


def number(precision: str, grid: int = 0) -> int:
    """One small number for both: it travels in place of an operation's."""
    return PRECISIONS.index(precision) * GRIDS + grid


def lowered(call: Callable[[], Any], what: int) -> Any:
    """The call's result with products of narrower numbers; `what` as `number` gives it."""
    mode = _Lowered(PRECISIONS[what // GRIDS], 1.0 + what % GRIDS * _STEP)
    with mode, sdpa_kernel(SDPBackend.MATH), _in_steps(), TakenApart():
        return call()


@contextlib.contextmanager
def _in_steps() -> Iterator[None]:
    """Attention and encoder layers do all in one operator otherwise, where no gradients are asked for."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


class _Lowered(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore] # torch's own hook is not typed
    def __init__(self, precision: str, stretch: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore] # torch's is not typed
        self._precision, self._stretch = precision, stretch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and its first call imports the whole compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition(".")[0].removeprefix("aten::")
        if name == "_int_mm" and self._precision in _BELOW_INT8:
            return self._of_bytes(args[0], args[1])
        places = _OPERANDS.get(name.removesuffix("_"))
        if places is None and torch.is_inference_mode_enabled():  # what others are made of is not taken apart there
            with self:
                result = function.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if places is None or not all(_is_wide(args[place]) for place in places):
            return function(*args, **(kwargs or {}))
        given, is_transposed = list(args), name == "convolution" and bool(args[6])
        for place, sides in zip(places, _sides(name, args[places[1]].dim(), is_transposed), strict=True):
            given[place] = rounded(args[place], self._precision, *sides, self._stretch)
        result = function(*given, **(kwargs or {}))
        if self._precision in _FP8 and not name.endswith("_") and (not kwargs or name == "_grouped_mm"):
            sums = [one.abs() if _is_wide(one) else one for one in given]
            cut = function(*sums, **(kwargs or {})) * FP8_SUM
            result = result - torch.copysign(cut, result)  # towards zero, as they are cut
        if self._precision == "float16" and not name.endswith("_"):
            result = result.half().to(result.dtype)
        return result

    def _of_bytes(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Of whole numbers, which these have not all."""
        left = rounded(one.float(), self._precision, stretch=self._stretch)
        right = rounded(other.float(), self._precision, along=-2, stretch=self._stretch)
        return (left.double() @ right.double()).round().int()


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1


def _sides(name: str, second: int, is_transposed: bool) -> tuple[tuple[int | None, int], tuple[int | None, int]]:
    """Of both operands: the dimension whose parts have a scale each (None: all but the one summed over), and one that
    is summed over. `second`: dimensions of the second operand.
    """
    if name == "convolution":
        return (0, 1), ((1, 0) if is_transposed else (0, 1))
    return (None, -1), (None, -2 if second > 1 else -1)


def rounded(
    x: torch.Tensor, precision: str, kept: int | None = None, along: int = -1, stretch: float = 1
) -> torch.Tensor:
    """The values that are left of `x` as numbers of this kind. `kept`: the dimension whose parts share a scale; None:
    all but `along` do. `along`: one that is summed over, in which blocks lie. `stretch`: of the scale.
    """
    if x.numel() == 0:
        return x
    wide = x.float() if x.dtype.itemsize < 4 else x
    if precision in _BLOCKS:
        return _in_blocks(wide, precision, along, stretch).to(x.dtype)
    if precision in _WHOLE or precision in _FP8:
        over = [along] if kept is None else [place for place in range(x.dim()) if place != kept]
        most = _WHOLE.get(precision) or torch.finfo(_FP8[precision]).max
        scale = wide.abs().amax(over, keepdim=True).clamp_min(_LEAST) * (stretch / most)
        few = wide / scale
        left = few.round() if precision in _WHOLE else few.to(_FP8[precision]).to(wide.dtype)
        return (left * scale).to(x.dtype)
    return (_cast(wide * stretch, precision) / stretch).to(x.dtype)


def _cast(wide: torch.Tensor, precision: str) -> torch.Tensor:
    if precision == "tf32":  # cut, as tensor cores read it; who rounds it loses half as much
        return (wide.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).to(wide.dtype)
    return wide.to(_CAST[precision]).to(wide.dtype) if precision in _CAST else wide


def _in_blocks(wide: torch.Tensor, precision: str, along: int, stretch: float) -> torch.Tensor:
    """Blocks of e2m1 along one dimension, each with a scale: one in e4m3 over one of the tensor's (nvfp4), or a power
    of two (mxfp4, as OCP's specification rounds it: down)."""
    size, last = _BLOCKS[precision], wide.movedim(along, -1)
    count = last.shape[-1]
    blocks = torch.nn.functional.pad(last, (0, -count % size)).reshape(*last.shape[:-1], -1, size)
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(_LEAST)
    if precision == "mxfp4":
        scale = torch.exp2(most.log2().floor() - 2) * stretch
    else:
        whole = most.amax() / (_LARGEST_E4M3 * _LARGEST_E2M1)
        scale = (most / (_LARGEST_E2M1 * whole) * stretch).clamp(max=_LARGEST_E4M3)
        scale = scale.to(torch.float8_e4m3fn).to(wide.dtype).clamp_min(2.0**-9) * whole
    left = e2m1(blocks / scale) * scale
    return left.flatten(-2)[..., :count].movedim(-1, along)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round().mul_(step).clamp_(max=_LARGEST_E2M1).copysign(x)
