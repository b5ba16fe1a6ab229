"""Comparison and input making, as pure functions of tensors."""

from __future__ import annotations

import random

import pytest
import torch

from kbrl_async.verifying.compare import Tolerance, difference, output_scale, tolerance
from kbrl_async.verifying.inputs import KINDS, Pool, is_continuous, vary

STRICT = Tolerance(1e-4, 1e-4)


def test_equal_outputs_pass_whatever_they_hold() -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert difference(values.clone(), values, STRICT).wrong == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.01])
def test_one_wrong_value_is_found_with_its_place(bad: float) -> None:
    expected = torch.ones(3, 4)
    got = expected.clone()
    got[1, 2] = bad
    found = difference(got, expected, STRICT)
    assert (found.wrong, found.where) == (1, (1, 2))


def test_a_number_where_the_reference_has_nan_is_wrong() -> None:
    assert difference(torch.ones(2), torch.tensor([1.0, float("nan")]), STRICT).wrong == 1


def test_integers_must_be_equal() -> None:
    expected = torch.arange(5)
    assert difference(expected + (expected == 3), expected, STRICT).wrong == 1


def test_honest_rounding_is_allowed_for_large_values() -> None:
    wide = torch.randn(1000, dtype=torch.float64) * 1e4
    expected = wide.float() + torch.randn(1000) * 0.05
    allowed = tolerance(expected, wide, output_scale(expected))
    assert allowed.honest > 0.1
    assert difference(expected + 0.1, expected, allowed).wrong == 0


def test_zeros_do_not_pass_for_tiny_outputs() -> None:
    expected = torch.full((64,), 5e-5)
    allowed = tolerance(expected, expected.double(), output_scale(expected))
    assert difference(torch.zeros(64), expected, allowed).wrong == 64


def test_half_precision_has_a_looser_default() -> None:
    assert tolerance(torch.ones(2, dtype=torch.bfloat16), None, 1.0).relative == 1e-2


def test_masks_and_integers_are_never_varied() -> None:
    inputs = [torch.randint(0, 5, (10,)), (torch.rand(10) > 0.5).float(), torch.randn(10)]
    for kind in KINDS:
        varied = vary(inputs, kind, random.Random(0))
        assert torch.equal(varied[0], inputs[0])
        assert torch.equal(varied[1], inputs[1])


def test_inputs_that_are_never_negative_stay_so() -> None:
    inputs = [torch.rand(100)]
    for kind in KINDS:
        assert (vary(inputs, kind, random.Random(0))[0] >= 0).all()


def test_mixtures_are_fresh_equal_on_both_sides_and_keep_structure() -> None:
    draws = [[torch.rand(50), torch.randint(0, 9, (4,))] for _ in range(4)]
    pool, rng, seen = Pool(draws), random.Random(0), set()
    for _ in range(20):
        outs = [[torch.empty(50), torch.empty(4, dtype=torch.int64)] for _ in range(2)]
        pool.mix(outs, rng)
        assert torch.equal(outs[0][0], outs[1][0])
        assert 0 <= float(outs[0][0].min()) <= float(outs[0][0].max()) <= 1
        assert any(torch.equal(outs[0][1], draw[1]) for draw in draws)
        seen.add(float(outs[0][0].sum()))
    assert len(seen) == 20


def test_what_looks_like_a_class_label_is_not_continuous() -> None:
    assert not is_continuous(torch.tensor([0.0, 1.0, -1.0]))
    assert is_continuous(torch.tensor([0.0, 0.5]))
