"""Where a variation of ours is worse conditioned than what the problem draws, honest loops in float are right."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options, compare, sets
from kbrl_async.kernels.verify.input_set import InputSet
from kbrl_async.kernels.verify.tolerance import Tolerance, eased

NORM = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return F.instance_norm(x * 0.5 + 0.3)


def get_inputs():
    return [torch.randn(2, 16, 88, 88)]


def get_init_inputs():
    return []
"""
EPS = 1e-5


@pytest.fixture
def bench(zygote: Zygote) -> Iterator[Bench]:
    """One draw: of others a few leave the loop right without more room, too."""
    options = bench_options(TimingBench(), limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20))
    with contextlib.closing(Bench(zygote, options, random.Random(1))) as made:
        yield made


def added_up(rows: torch.Tensor) -> torch.Tensor:
    """One float, one element after the other."""
    return torch.from_numpy(np.add.accumulate(rows.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())


def in_a_loop(
    x: torch.Tensor, eps: float = EPS, narrow: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> torch.Tensor:
    y = narrow(x * 0.5 + 0.3).flatten(2)
    y = y - added_up(y) / y.shape[-1]
    return (y * (added_up(y * y) / y.shape[-1] + eps).rsqrt()).view(x.shape)


def is_wrong_on_small(bench: Bench, way: Callable[[torch.Tensor], torch.Tensor], problem: str = NORM) -> bool:
    reference = bench.references.get(parse_problem(problem, "L0/norm")).references[0]
    small = next(one for one in reference.sets if one.name == "small")
    got = way(small.blocks[0].view(2, 16, 88, 88))
    return compare.difference(got, small.expected[0], small.tolerances[0]).wrong > 0


def test_a_two_pass_norm_that_adds_up_in_one_float_is_right(bench: Bench) -> None:
    assert not is_wrong_on_small(bench, in_a_loop)


def test_it_was_wrong_without_more_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "eased", lambda found, *_: found)
    assert is_wrong_on_small(bench, in_a_loop, NORM + "# with a reference of its own\n")


ATTACKS = {
    "half precision inside": lambda x: in_a_loop(x, narrow=lambda y: y.half().float()),
    "no eps": lambda x: in_a_loop(x, eps=0.0),
    "half of the elements for the moments": lambda x: _of_half(x),
}


def _of_half(x: torch.Tensor) -> torch.Tensor:
    y = (x * 0.5 + 0.3).flatten(2)
    half = y[..., ::2]
    return ((y - half.mean(-1, keepdim=True)) * (half.var(-1, keepdim=True, correction=0) + EPS).rsqrt()).view(x.shape)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_wrong_there_stays_wrong_where_more_is_allowed(bench: Bench, name: str) -> None:
    assert is_wrong_on_small(bench, ATTACKS[name])


ATTENTION = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, q, k, v):
        return torch.softmax(q @ k.T / 8.0, dim=-1) @ v


def get_inputs():
    return [torch.randn(320, 64), torch.randn(320, 64), torch.randn(320, 64)]


def get_init_inputs():
    return []
"""
SINE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.sin(x)


def get_inputs():
    return [torch.randn(160, 1024)]


def get_init_inputs():
    return []
"""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 16 bits behind the leading one, as two numbers in bfloat16 keep them."""
    return ((x.contiguous().view(torch.int32) + 64) & ~127).view(torch.float32)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
    """The shares added up one after the other."""
    found = q @ k.T / 8.0 if scores is None else scores
    shares = (found - found.amax(-1, keepdim=True)).exp()
    return (shares / added_up(shares)) @ v


CASES = {
    "attention, scores of 16 bits": (
        (ATTENTION, (320, 64)),
        lambda q, k, v: attention(q, k, v, rounded(q @ k.T / 8.0)),
        attention,
    ),
    "sine, inputs of 16 bits": ((SINE, (160, 1024)), lambda x: torch.sin(rounded(x)), torch.sin),
}
"""Problem and the inputs' shape, a wrong kernel, an honest one."""


@pytest.mark.parametrize("name", CASES)
def test_what_only_a_variation_of_ours_tells_from_an_honest_kernel_is_wrong(zygote: Zygote, name: str) -> None:
    (problem, shape), wrong, honest = CASES[name]
    options = bench_options(TimingBench(), limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20))
    with contextlib.closing(Bench(zygote, options, random.Random(1))) as bench:
        made = bench.references.get(parse_problem(problem, "L0/variation")).references[0].sets
        given = [[block.view(shape) for block in one.blocks] for one in made]
        assert not any(map(is_wrong, made, [honest(*blocks) for blocks in given]))
        found = {one.name: is_wrong(one, wrong(*blocks)) for one, blocks in zip(made, given, strict=True)}
    assert any(found.values())
    assert not found["nominal"]
    assert not found["mixed"]


def is_wrong(input_set: InputSet, got: torch.Tensor) -> bool:
    return compare.difference(got, input_set.expected[0], input_set.tolerances[0]).wrong > 0


def allowed(uncut: float) -> Tolerance:
    return Tolerance(1e-4, 1e-4, uncut, uncut=uncut)


@pytest.mark.parametrize(
    ("uncut", "usual", "moved", "dtype", "honest"),
    [
        (6e-5, 2e-5, 0.0, torch.float32, 6e-5),
        (6e-5, 1e-6, 1e-6, torch.float32, 16 * 6e-5),
        (6e-5, 1e-6, 5e-6, torch.float32, 6e-5),
        (6e-5, 1e-6, 0.0, torch.bfloat16, 6e-5),
        (4e-3, 1e-6, 0.0, torch.float32, 1e-2),
        (1e-6, 0.0, 0.0, torch.float32, 1e-6),
    ],
    ids=[
        "no worse than usual",
        "worse",
        "worse by what rounding does to the inputs",
        "half precision",
        "at most a hundredth of the scale",
        "a few units of an exact reference",
    ],
)
def test_more_is_allowed_where_rounding_matters_more_than_usual(
    uncut: float, usual: float, moved: float, dtype: torch.dtype, honest: float
) -> None:
    found = eased(allowed(uncut), torch.ones(8, dtype=dtype), usual, moved)
    assert found.honest == pytest.approx(honest)
    assert (found.relative, found.absolute) == (1e-4, 1e-4)
