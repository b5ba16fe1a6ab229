"""Which attention kernel computes gradients: only one whose numbers were held against fp32."""

from __future__ import annotations

import math

import pytest
import torch

from kbrl_async.learning.fused import attention
from kbrl_async.learning.fused.attention import TOLERANCE, MeasuredKernel, best, error_of, fastest, plain
from kbrl_async.learning.recompute import again

SHAPE = (4, 2, 16, 512, torch.bfloat16, torch.device("cpu"))


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is a third too large."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.33


def wrong_key_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, WrongGradient.apply(k), v)  # type: ignore[no-untyped-call]


def wrong_where_scores_are_low(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, k, v) * math.nan if float(q.detach().mean()) > 1.0 else plain(q, k, v)


def wrong_behind_a_prefix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    is_padded = not q[:, :, 0].any()
    return plain(q, k, v) * (0.9 if is_padded else 1.0)


def wrong_in_long_ones(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return wrong_key_gradient(q, k, v) if q.shape[2] > 1024 else plain(q, k, v)


def test_a_kernel_is_asked_at_the_length_that_it_is_chosen_for() -> None:
    long = (2, 1, 16, 2048, torch.bfloat16, torch.device("cpu"))
    assert error_of(plain, *long) < TOLERANCE / 2
    assert error_of(wrong_in_long_ones, *long) > TOLERANCE
    assert error_of(wrong_in_long_ones, *SHAPE) < TOLERANCE


def test_where_long_ones_find_no_memory_a_shorter_one_is_asked() -> None:
    asked: list[int] = []

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        asked.append(q.shape[2])
        if q.shape[2] > 1024:
            raise torch.OutOfMemoryError("no memory for its scores")
        return plain(q, k, v)

    assert error_of(full, 2, 1, 16, 2048, torch.bfloat16, torch.device("cpu")) < TOLERANCE / 2
    assert set(asked) == {1948, 924}


def test_torchs_own_is_right() -> None:
    assert error_of(plain, *SHAPE) < TOLERANCE / 2


def test_it_is_right_under_autocast_too() -> None:
    shape = (8, 2, 128, 600, torch.bfloat16, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert error_of(plain, *shape) < TOLERANCE


@pytest.mark.parametrize("wrong", [wrong_key_gradient, wrong_where_scores_are_low, wrong_behind_a_prefix])
def test_a_kernel_that_is_wrong_in_one_place_is_found(wrong: object) -> None:
    assert error_of(wrong, *SHAPE) > TOLERANCE  # type: ignore[arg-type]


def test_nothing_wrong_is_chosen_however_fast() -> None:
    found = {
        "cudnn": MeasuredKernel(1.0, 0.35),
        "nan": MeasuredKernel(0.5, math.inf),
        "flash": MeasuredKernel(2.0, 0.004),
        "x": MeasuredKernel(3.0, 0.003),
    }
    assert best(found) == "flash"
    assert best({"a": MeasuredKernel(1.0, 0.3), "b": MeasuredKernel(2.0, 0.1)}) == "b"


def test_measuring_inside_of_a_layer_that_is_computed_again_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(attention, "CANDIDATES", {"plain": plain})
    x = torch.ones(3, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        assert fastest(2, 1, 8, 512, torch.float32, torch.device("cpu")) == "plain"  # measured once only
        return (x * x).sum()

    try:
        again(layer, x).backward()
    finally:
        fastest.cache_clear()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
