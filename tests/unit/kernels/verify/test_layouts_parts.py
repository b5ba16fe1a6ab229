"""What of an answer the library's results hold: parts of it, it within larger ones, some of several outputs."""

from __future__ import annotations

import pytest
import torch

from kbrl_async.kernels.verify.layouts import Holding, have_nearly_all, is_answer, share_within
from kbrl_async.kernels.verify.values import fill_bytes

ANSWER = torch.softmax(torch.randn(24, 65, generator=torch.Generator().manual_seed(1)), -1)


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ([ANSWER[12:], ANSWER[:12]], 1.0),
        ([ANSWER[:, 40:], ANSWER[:, :40]], 1.0),
        ([ANSWER[1:]], 23 / 24),
        ([ANSWER[:6], ANSWER[:6]], 0.25),
        ([torch.cat([ANSWER, ANSWER[:1] * 2])], 1.0),
        ([torch.stack([ANSWER * 2, ANSWER], -1)], 1.0),
        ([ANSWER[:12] * 1.01], 0.0),
        ([ANSWER.flip(0)], 0.0),
        ([ANSWER[:0], torch.zeros(())], 0.0),
    ],
)
def test_parts_in_whatever_order_and_more_than_the_answer_are_found(parts: list[torch.Tensor], share: float) -> None:
    assert share_within(parts, ANSWER) == pytest.approx(share)


def test_integers_are_found_among_several_best_ones() -> None:
    best = ANSWER.topk(2, -1).indices
    assert share_within([best], best[:, 0]) == 1.0
    assert share_within([best[:, 1:]], best[:, 0]) == 0.0


@pytest.mark.parametrize("kind", [torch.int16, torch.float32, torch.float64])
def test_whole_numbers_in_parts_are_found_whatever_they_lie_in(kind: torch.dtype) -> None:
    counts = (ANSWER * 1000).long()
    assert share_within([counts[12:].to(kind), counts[:12].to(kind)], counts) == 1.0
    assert share_within([counts[12:].to(kind) + 1, counts[:12].to(kind)], counts) == 0.5
    assert share_within([ANSWER[:12] * 1000], counts) == 0.0


def test_a_part_that_is_the_same_everywhere_is_none() -> None:
    """A guard that is false for every row, beside an answer that is false in most columns."""
    rare = ANSWER.max() == ANSWER
    assert share_within([torch.zeros(24, 1, dtype=torch.bool)], rare) == 0.0
    assert share_within([rare[:12], rare[12:]], rare) == 0.5
    assert share_within([torch.zeros(24, 1)], ANSWER.relu() * rare) == 0.0


@pytest.mark.parametrize("turned", [(0,), (1,), (0, 1)])
def test_a_reversed_answer_is_one(turned: tuple[int, ...]) -> None:
    assert is_answer(ANSWER.flip(turned).t(), ANSWER)
    assert not is_answer(ANSWER.roll(1, turned[0]), ANSWER)
    assert is_answer((ANSWER.flip(turned) > 0.01).float(), ANSWER > 0.01)


def test_a_small_output_by_the_library_is_not_most_of_several() -> None:
    holding = Holding([ANSWER, ANSWER.sum(-1)])
    assert not holding.adds(lambda wanted: wanted.dim() == 1)
    assert not holding.adds(lambda wanted: False)
    assert holding.adds(lambda wanted: wanted.dim() == 2)
    half = Holding([ANSWER, ANSWER * 2])
    assert not half.adds(lambda wanted: wanted is ANSWER), "the other half may be its own"
    assert half.adds(lambda wanted: wanted is not ANSWER)
    assert Holding([ANSWER]).adds(lambda wanted: True)
    turned = Holding([ANSWER, ANSWER.t(), ANSWER.sum(-1)])
    assert not turned.moves(lambda wanted: wanted.shape[0] == 65), (
        "bringing it into another order may be an honest step"
    )
    assert not turned.adds(lambda wanted: wanted.dim() == 1)
    assert turned.moves(lambda wanted: wanted is ANSWER), "nothing is left that own code might have made"
    assert Holding([ANSWER]).moves(lambda wanted: True)
    assert not Holding([]).adds(lambda wanted: True)


HOLED = torch.where(ANSWER < 0.01, torch.nan, ANSWER).index_fill(1, torch.tensor([3, 4]), -torch.inf)


@pytest.mark.parametrize(
    ("item", "is_it"),
    [
        (HOLED.clone(), True),
        (HOLED.t().contiguous(), True),
        (HOLED.double(), True),
        (torch.where(HOLED.isnan(), 0.5, HOLED), False),
        (torch.where(HOLED.isinf(), -3e38, HOLED), False),
        (torch.where(HOLED.isinf(), torch.inf, HOLED), False),
        (HOLED * 1.01, False),
        (ANSWER, False),
        (torch.full_like(ANSWER, torch.nan), False),
    ],
)
def test_what_is_no_number_in_an_answer_hides_no_copy_of_it(item: torch.Tensor, is_it: bool) -> None:
    assert is_answer(item, HOLED) is is_it
    assert (share_within([item[12:], item[:12]], HOLED) == 1.0) is (is_it and item.shape == HOLED.shape)


def test_an_answer_without_numbers_is_nobodys() -> None:
    assert not is_answer(torch.full((4, 5), torch.nan), torch.full((4, 5), torch.nan))


def test_what_overflows_where_the_answer_is_narrower_is_infinite_in_it() -> None:
    wide = torch.cat([ANSWER.flatten(), torch.tensor([7e4, -1e5])])
    assert is_answer(wide, wide.half())


def test_bytes_are_filled_whatever_the_stride_of_a_dimension_of_one_is() -> None:
    """A solved system's answer: its columns follow each other, and it is contiguous where it has but one."""
    column = torch.zeros(1, 3).t()
    assert column.stride() == (1, 3)
    assert column.is_contiguous()
    fill_bytes(column, 0x7F)
    turned = torch.zeros(4, 3).t()
    fill_bytes(turned, 0x7F)
    number = torch.zeros(())
    fill_bytes(number, 0x7F)
    assert [bool((one.view(-1).view(torch.int32) == 0x7F7F7F7F).all()) for one in (column, number)] == [True, True]
    assert not turned.any()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(24, 65),
        torch.ones(24, 65, dtype=torch.bool),
        torch.full((24, 65), 3),
        torch.full((24, 65), -torch.inf),
        torch.full((24, 65), torch.nan),
        torch.zeros(24, 65, dtype=torch.complex64),
        torch.tensor([2]),
        torch.zeros(0),
    ],
)
def test_an_output_that_is_the_same_everywhere_is_no_half_of_an_answer(other: torch.Tensor) -> None:
    """A cosine and its signs, all of which are the same in most draws: a copy of both was accepted for that half."""
    assert Holding([ANSWER, other]).adds(lambda wanted: wanted is ANSWER)
    assert not Holding([other]).adds(lambda wanted: True)


MASK = torch.where(ANSWER < 0.01, -torch.inf, 0.0)


@pytest.mark.parametrize("other", [MASK, ANSWER.cumsum(0), torch.complex(ANSWER, ANSWER * 2), torch.zeros(24, 65)])
def test_a_large_output_of_its_own_is_the_larger_part_whatever_it_holds(other: torch.Tensor) -> None:
    """A mask of zeros and -inf by an own kernel, beside a small product by the library, was a decoy."""
    assert not Holding([ANSWER[:4], other]).adds(lambda wanted: wanted.shape[0] == 4)


@pytest.mark.parametrize("answer", [MASK, torch.complex(ANSWER, ANSWER * 2), ANSWER * torch.inf * (ANSWER - 0.01)])
def test_masks_and_complex_answers_are_compared(answer: torch.Tensor) -> None:
    assert is_answer(answer.clone(), answer)
    assert not is_answer(answer.roll(1, 0), answer)
    assert Holding([answer]).adds(lambda wanted: True)


def test_an_output_that_is_an_input_as_it_came_is_nobodys_work() -> None:
    """A module that also returns its input: own code copied both outputs, and the library made the smaller one."""
    given, made = torch.randn(64), torch.randn(8)
    assert Holding([given, made], [given.clone()]).adds(lambda wanted: wanted is made)
    assert not Holding([given, made], [torch.randn(64)]).adds(lambda wanted: wanted is made)
    assert Holding([given], [given.clone()]).adds(lambda wanted: True)


def test_what_is_near_is_judged_by_the_answer_and_not_by_what_lies_beside_it() -> None:
    """Of poison a library makes numbers beside which each answer is as good as zero."""
    answer, result = torch.linspace(1, 2, 32), torch.full((32, 16), 1e30)
    result[:, 3] = answer.flip(0)
    assert not have_nearly_all([result], answer)
    result[:, 5] = answer
    assert have_nearly_all([result], answer)
