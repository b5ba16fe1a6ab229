"""Comparison and input making, as pure functions of tensors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kbrl_async.kernels.verify import compare
from kbrl_async.kernels.verify.compare import (
    Tolerance,
    difference,
    kernelbench,
    largest_error,
    output_scale,
    same_values,
    tolerance,
)
from kbrl_async.kernels.verify.inputs import KINDS, Kind, attempts, is_continuous, kinds_for, moved, vary
from kbrl_async.kernels.verify.layouts import are_answer, is_answer

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
    assert tolerance(torch.ones(2, dtype=torch.bfloat16), None, 1.0).relative == 2 * torch.finfo(torch.bfloat16).eps


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


def test_what_looks_like_a_class_label_is_not_continuous() -> None:
    assert not is_continuous(torch.tensor([0.0, 1.0, -1.0]))
    assert is_continuous(torch.tensor([0.0, 0.5]))


def by_name(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def test_the_set_of_kinds_is_the_documented_one() -> None:
    names = [kind.name for kind in KINDS]
    assert names.count("nominal") == 2
    assert set(names) >= {"small", "large", "negated", "spikes", "graded", "binary", "mixed", "repeated"}


def test_every_kind_has_the_scale_that_it_says() -> None:
    x = torch.randn(40, 50)
    peak = float(x.abs().max())
    varied = {kind.name: vary([x], kind, random.Random(1))[0] for kind in KINDS}
    assert torch.allclose(varied["small"], x * 1e-2)
    assert 8 * peak <= float(varied["large"].abs().max()) <= 10 * peak
    assert torch.equal(varied["negated"], -x)
    assert 0.05 < float((varied["spikes"] != 0).float().mean()) < 0.15
    assert float(varied["spikes"].abs().max()) == pytest.approx(4 * peak)
    assert float(varied["graded"][:, -5:].std()) > 4 * float(varied["graded"][:, :5].std())
    assert set(varied["binary"].unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("name", ["spikes", "negated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [1, -1])
def test_rows_that_never_come_near_zero_keep_a_variance(name: str, dtype: torch.dtype, side: int) -> None:
    """Of a constant row a LayerNorm makes rounding errors: honest kernels differ in them by more than is allowed."""
    x = side * (torch.rand(4000, 12) * 3 + 5).to(dtype)
    varied = vary([x], by_name(name), random.Random(4))[0] / by_name(name).scale
    assert (varied != x).float().mean() > 0.5
    assert (varied * side >= 5).all()
    assert varied.float().std(-1).min() > 0.05


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_a_problem_promises_of_its_inputs_holds_in_every_set(kind: Kind) -> None:
    square = torch.randn(12, 12)
    symmetric, lower = square + square.T, torch.tril(square)
    shares = torch.softmax(torch.randn(9, 5), -1)
    both, low, share = vary([symmetric, lower, shares], kind, random.Random(2))
    assert torch.equal(both, both.T)
    assert torch.equal(low, torch.tril(low))
    if kind.name not in ("small", "large", "negated"):
        assert torch.allclose(share.sum(-1), torch.ones(9), atol=1e-5)


def test_strides_survive_every_kind() -> None:
    x = torch.randn(6, 4).t()
    for kind in KINDS:
        assert vary([x], kind, random.Random(3))[0].stride() == x.stride()


def test_a_kind_gives_way_to_a_milder_one() -> None:
    assert [kind.name for kind in attempts(by_name("large"))] == ["large", "large", "nominal"]
    assert [kind.name for kind in attempts(by_name("spikes"))] == ["spikes", "nominal"]


def test_huge_inputs_get_fewer_sets() -> None:
    huge = torch.empty(1).expand(1 << 28)
    assert len(kinds_for([huge])) < len(KINDS)
    assert {"nominal", "large", "spikes", "binary", "repeated"} <= {kind.name for kind in kinds_for([huge])}


def test_inputs_are_moved_by_a_rounding_error_only() -> None:
    x, half, label = torch.randn(1000), torch.randn(10).half(), torch.arange(5)
    a, b, c = moved([x, half, label], random.Random(0))
    assert 0 < float(((a - x) / x).abs().max()) < 3e-7
    assert torch.equal(b, half)
    assert torch.equal(c, label)


def test_integers_of_binary_inputs_must_be_exact() -> None:
    a, b = (torch.rand(8, 4096) > 0.5).float(), (torch.rand(4096, 8) > 0.5).float()
    expected = a @ b
    allowed = tolerance(expected, (a.double() @ b.double()), 60.0, binary=True)
    assert allowed.exact
    assert difference(expected.clone(), expected, allowed).wrong == 0
    assert difference(expected + (expected == expected.max()), expected, allowed).wrong > 0
    assert "last bit" in allowed.note()


@pytest.mark.parametrize("expected", [torch.full((4,), 0.1), torch.full((4,), 2.0**25), torch.full((4,), 1.0)])
def test_what_fp64_does_not_confirm_as_a_small_integer_is_not_exact(expected: torch.Tensor) -> None:
    assert not tolerance(expected, torch.full((4,), 1.0 + 1e-6, dtype=torch.float64), 1.0, binary=True).exact


def test_an_ill_conditioned_output_widens_the_tolerance_only_so_far() -> None:
    expected = torch.ones(100)
    near = tolerance(expected, None, 1.0, error=compare.largest_error(expected, expected + 1e-3))
    assert near.honest == pytest.approx(4e-3, rel=1e-2)
    assert not near.ill
    far = tolerance(expected, None, 1.0, error=compare.largest_error(expected, expected + 0.5))
    assert far.ill
    assert far.honest <= 1e-2


def test_a_jump_of_one_element_does_not_let_zeros_pass() -> None:
    expected = torch.ones(100)
    jumped = expected.clone()
    jumped[3] = 0.0
    assert difference(torch.zeros(100), expected, tolerance(expected, jumped.double(), 1.0)).wrong == 100


def test_kernelbench_has_its_own_opinion() -> None:
    tiny = torch.full((8,), 5e-5)
    assert kernelbench(torch.zeros(8), tiny), "it lets zeros pass"
    assert difference(torch.zeros(8), tiny, tolerance(tiny, tiny.double(), 5e-5)).wrong == 8
    assert not kernelbench(torch.full((8,), float("nan")), tiny)
    assert kernelbench(torch.ones(3).bfloat16(), torch.ones(3).bfloat16() * 1.008)


def test_half_precision_is_compared_in_single() -> None:
    small = torch.full((4,), 1e-6).half()
    assert difference(small * 0, small, Tolerance(1e-2, 1e-9)).wrong == 4


def test_complex_outputs_are_compared_by_both_parts() -> None:
    expected = torch.tensor([1 + 2j, 3 + 4j])
    assert difference(expected.clone(), expected, STRICT).wrong == 0
    assert difference(expected + 0.5j, expected, STRICT).wrong == 2


def test_complex_outputs_are_allowed_what_their_parts_would_be() -> None:
    """An honest transformation was wrong: without a scale no element that is next to 0 may be off by a rounding."""
    parts = torch.tensor([[4.0, 1e-4], [0.0, -8.0]])
    expected, wide = torch.view_as_complex(parts), torch.view_as_complex(parts.double() + 1e-3)
    assert output_scale(expected) == output_scale(expected.conj()) == 8.0
    assert largest_error(expected, wide) == pytest.approx(1e-3)
    assert tolerance(expected, wide, 8.0) == tolerance(parts, parts.double() + 1e-3, 8.0)
    assert largest_error(expected, parts) == 0.0, "nothing to compare"


def test_same_values_means_same_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_values(nan, nan.clone())
    assert not same_values(nan, torch.tensor([2.0, 1.0]))
    assert not same_values(torch.ones(2), torch.ones(2).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spoilt", ["", "a value", "a NaN", "infinities"])
@pytest.mark.parametrize("honest", [0.0, 0.5])
def test_parts_that_fit_into_a_cache_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, spoilt: str, honest: float
) -> None:
    """New memory of a large tensor cost several times what was done with it."""
    expected = torch.randn(7, 143, generator=torch.Generator().manual_seed(0)).to(dtype)
    got, allowed = expected * (1 + 1e-7), Tolerance(1e-3, 1e-3, honest)
    got[3, 5] += 0.0005
    if spoilt == "infinities":
        got[2, 7] = expected[2, 7] = float("inf")
    elif spoilt:
        got[2, 7] = float("nan") if spoilt == "a NaN" else 9.0
    whole = compare.difference(got, expected, allowed), compare.agrees(got, expected, allowed)
    monkeypatch.setattr(compare, "CACHED", 100)
    parts = compare.difference(got, expected, allowed), compare.agrees(got, expected, allowed)
    assert repr(parts) == repr(whole), "a NaN is no equal of itself"
    across = compare.difference(got.t(), expected.t(), allowed)
    assert (across.wrong, across.nans) == (whole[0].wrong, whole[0].nans)


@pytest.mark.parametrize("wrong", [(), (3,), (70, 71, 149), (149,)])
@pytest.mark.parametrize("bad", [9.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_large_output_is_compared_by_parts_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, ...], bad: float, dtype: torch.dtype
) -> None:
    expected = torch.arange(150).reshape(5, 30).to(dtype)
    got = expected.clone()
    for number, place in enumerate(wrong):
        got.view(-1)[place] += 7 + number if dtype is torch.int64 or bad == bad else bad
    whole = difference(got, expected, STRICT)
    monkeypatch.setattr(compare, "CHUNK", 40)
    parts = difference(got, expected, STRICT)
    same = ("wrong", "total", "nans", "where") if wrong else ("wrong", "total", "nans")
    assert [getattr(parts, name) for name in same] == [getattr(whole, name) for name in same]
    assert parts.worst == whole.worst or whole.worst != whole.worst


@pytest.mark.parametrize(
    ("item", "wanted", "is_one"),
    [
        (torch.tensor(2.5), torch.tensor([2.5]), True),
        (torch.tensor(2.5), torch.tensor(2.6), False),
        (torch.tensor(3), torch.tensor(3), False),
        (torch.zeros(8, dtype=torch.int64), torch.zeros(8), False),
        (torch.tensor([1.003, 2.0]), torch.tensor([1.003, 2.0]).to(torch.bfloat16), True),
        (torch.tensor([1.03, 2.0]), torch.tensor([1.003, 2.0]).to(torch.bfloat16), False),
        (torch.tensor([[3, 1], [4, 1]]), torch.tensor([[3, 4], [1, 1]], dtype=torch.int32), True),
        (torch.tensor([3, 1, 4, 2]), torch.tensor([3, 1, 4, 1]), False),
        (torch.tensor([7, 7]), torch.tensor([7, 7]), False),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([5, 0]), torch.tensor([True, False]), False),
        (torch.tensor([3.0, 1.0, 4.0]), torch.tensor([3, 1, 4]), True),
        (torch.tensor([3.0, 1.0, 4.1]), torch.tensor([3, 1, 4]), False),
        (torch.tensor([1.0, 0.0]), torch.tensor([True, False]), True),
        (torch.tensor([0.5, 0.0]), torch.tensor([True, False]), False),
        (torch.tensor([True, False]), torch.tensor([1, 0]), True),
        (torch.tensor([True, False]), torch.tensor([2, 0]), False),
        (torch.tensor(3.0), torch.tensor(3), False),
    ],
    ids=[
        *("a loss", "another one", "a count", "equal values", "rounded", "other values"),
        *("places, turned and narrower", "other places", "equal places", "a mask", "counts beside a mask"),
        *("counts in floats", "what was to be rounded", "a mask in floats", "weights beside a mask"),
        *("a mask beside its places", "a mask beside counts", "a count in floats"),
    ],
)
def test_what_holds_the_answer(item: torch.Tensor, wanted: torch.Tensor, is_one: bool) -> None:
    assert is_answer(item, wanted) is is_one


@pytest.mark.parametrize(
    ("parts", "is_one"),
    [
        (lambda w: [w[:2], w[2:]], True),
        (lambda w: [w[:, :1], w[:, 1:4], w[:, 4:]], True),
        (lambda w: [w.t()[:3], w.t()[3:]], True),
        (lambda w: [w[:2], w[2:] + 1], False),
        (lambda w: [w[:2], w[2:3]], False),
    ],
    ids=["rows", "columns", "turned", "one is wrong", "one is missing"],
)
def test_what_is_the_answer_in_parts(parts: Callable[[torch.Tensor], list[torch.Tensor]], is_one: bool) -> None:
    wanted = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    assert are_answer(parts(wanted), wanted) is is_one
