"""From two advantages of a sample to one for each token, and to its gradient."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kbrl_async.learning.losses import Tokens, reinforce
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.updates import flat_advantages, token_advantages
from protocols.records import TrainSample

SAMPLE = msgspec.structs.replace(
    TrainSample("r", [1], [2] * 6, [-0.5] * 6, 2.0, 1.0, 0),
    code_start=2, code_end=5, plan_weight=0.1, plan_advantage=-0.25,
)  # fmt: skip


def test_the_kernels_tokens_have_the_advantage_and_those_around_it_the_plans() -> None:
    assert token_advantages(SAMPLE) == [-0.25, -0.25, 2.0, 2.0, 2.0, -0.25]


@pytest.mark.parametrize("change", [{"plan_weight": 0.0}, {"code_start": 0, "code_end": 0}])
def test_with_one_class_all_tokens_share_the_advantage(change: dict[str, float]) -> None:
    assert token_advantages(msgspec.structs.replace(SAMPLE, **change)) == [2.0] * 6


def test_a_span_never_reaches_behind_the_answer() -> None:
    assert token_advantages(msgspec.structs.replace(SAMPLE, code_start=4, code_end=99)) == [-0.25] * 4 + [2.0] * 2
    assert token_advantages(msgspec.structs.replace(SAMPLE, code_start=7, code_end=99)) == [-0.25] * 6


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_samples_follow_one_another_flat(weight: float) -> None:
    short = msgspec.structs.replace(SAMPLE, token_ids=[2], logprobs=[-0.5], advantage=7.0, plan_weight=0.0)
    first = msgspec.structs.replace(SAMPLE, plan_weight=weight)
    assert flat_advantages([first, short]).tolist() == [*token_advantages(first), 7.0]


def test_each_token_moves_by_its_own_advantage() -> None:
    log_pi = torch.full((6,), -0.5, requires_grad=True)
    loss, _ = reinforce(Tokens(log_pi, torch.full((6,), -0.5), flat_advantages([SAMPLE])), Learner())
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert log_pi.grad is not None
    assert log_pi.grad.tolist() == [0.25, 0.25, -2.0, -2.0, -2.0, 0.25]
