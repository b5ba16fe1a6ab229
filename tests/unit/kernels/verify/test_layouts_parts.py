"""What of an answer the library's results hold: parts of it, it within larger ones, some of several outputs."""

from __future__ import annotations

import pytest
import torch

from kbrl_async.kernels.verify.layouts import Holding, share_within

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


def test_a_small_output_by_the_library_is_not_most_of_several() -> None:
    holding = Holding([ANSWER, ANSWER.sum(-1)])
    assert not holding.adds(lambda wanted: wanted.dim() == 1)
    assert not holding.adds(lambda wanted: False)
    assert holding.adds(lambda wanted: wanted.dim() == 2)
    assert Holding([ANSWER]).adds(lambda wanted: True)
    assert not Holding([]).adds(lambda wanted: True)
