"""Losses against their closed forms, and their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from kbrl_async.errors import UserError
from kbrl_async.learning.corrections import tis_weight
from kbrl_async.learning.losses import (
    Tokens,
    decoupled,
    dppo_tv,
    ppo_clip,
    reinforce,
    tis,
    token_weights,
)
from kbrl_async.learning.settings import LOSSES, Learner

OPTIONS = Learner()


def tokens(pi: list[float], mu: list[float], advantage: list[float], prox: list[float] | None = None) -> Tokens:
    """Probabilities in, log-probs out."""
    return Tokens(
        torch.tensor(pi).log().requires_grad_(),
        torch.tensor(mu).log(),
        torch.tensor(advantage),
        None if prox is None else torch.tensor(prox).log(),
        torch.arange(len(pi)),
    )


def test_dppo_keeps_a_token_inside_the_ball_and_penalises_its_log_ratio() -> None:
    loss, diagnostics = dppo_tv(tokens([0.5], [0.4], [2.0]), OPTIONS)
    assert loss.item() == pytest.approx(-1.25 * 2.0 + 1e-3 * math.log(1.25) ** 2)
    assert diagnostics["dropped"].item() == 0


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "dropped"),
    [(0.7, 0.4, 1.0, 1), (0.7, 0.4, -1.0, 0), (0.1, 0.4, -1.0, 1), (0.1, 0.4, 1.0, 0), (0.55, 0.4, 1.0, 0)],
)
def test_dppo_drops_only_steps_that_leave_the_ball_outwards(
    pi: float, mu: float, advantage: float, dropped: int
) -> None:
    loss, diagnostics = dppo_tv(tokens([pi], [mu], [advantage]), OPTIONS)
    assert diagnostics["dropped"].item() == dropped
    if dropped:
        assert loss.item() == pytest.approx(1e-3 * math.log(pi / mu) ** 2)


@pytest.mark.parametrize(
    ("pi", "advantage", "expected"),
    [(0.5, 1.0, -1.25), (0.6, 1.0, -1.28), (0.2, 1.0, -0.5), (0.2, -1.0, 0.8), (0.6, -1.0, 1.5)],
)
def test_ppo_clips_at_one_minus_02_and_one_plus_028(pi: float, advantage: float, expected: float) -> None:
    loss, _ = ppo_clip(tokens([pi], [0.4], [advantage]), OPTIONS)
    assert loss.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient() -> None:
    t = tokens([0.8], [0.4], [1.0])
    ppo_clip(t, OPTIONS)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert t.log_pi_T.grad is not None
    assert t.log_pi_T.grad.item() == 0


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    loss, diagnostics = ppo_clip(tokens([0.9], [0.1], [-1.0]), Learner(dual_clip=3.0))
    assert loss.item() == pytest.approx(3.0)
    assert diagnostics["dropped"].item() == 1


def test_decoupled_clips_around_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    loss, _ = decoupled(tokens([0.6], [0.2], [1.0], prox=[0.4]), OPTIONS)
    assert loss.item() == pytest.approx(-(0.4 / 0.2) * 1.28)


def test_tis_caps_the_weight_at_two_and_keeps_the_gradient() -> None:
    t = tokens([0.8, 0.3], [0.1, 0.2], [1.0, 1.0])
    loss, _ = tis(t, OPTIONS)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert t.log_pi_T.grad is not None
    assert t.log_pi_T.grad.tolist() == pytest.approx([-2.0, -1.5])


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    loss, _ = reinforce(tokens([0.5], [0.1], [3.0]), OPTIONS)
    assert loss.item() == pytest.approx(-3.0 * math.log(0.5))


@pytest.mark.parametrize("name", LOSSES.ours)
def test_all_losses_have_the_policy_gradient_at_an_unchanged_policy(name: str) -> None:
    """At ratio 1 every loss of the family has d loss / d log π = −A."""
    t = tokens([0.3, 0.6], [0.3, 0.6], [1.5, -0.5], prox=[0.3, 0.6])
    LOSSES.load(name)(t, OPTIONS)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert t.log_pi_T.grad is not None
    assert t.log_pi_T.grad.tolist() == pytest.approx([-1.5, 0.5], rel=1e-5)


def test_dppo_gradient_agrees_with_finite_differences() -> None:
    log_mu, advantage = torch.tensor([-1.0, -2.0, -0.5]).double(), torch.tensor([1.0, -1.0, 0.3]).double()

    def loss(log_pi: torch.Tensor) -> torch.Tensor:
        return dppo_tv(Tokens(log_pi, log_mu, advantage), OPTIONS)[0].sum()

    at = torch.tensor([-1.1, -1.8, -0.6], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (at,))


def test_a_truncated_weight_is_the_ratio_up_to_its_cap() -> None:
    log_pi, log_mu = torch.tensor([0.9, 0.5, 0.1]).log(), torch.tensor([0.1, 0.5, 0.9]).log()
    assert tis_weight(log_pi, log_mu).tolist() == pytest.approx([2.0, 1.0, 1 / 9])


@pytest.mark.parametrize(
    ("how", "expected"),
    [("token_mean", [0.25, 0.25, 0.25, 0.25]), ("sequence_mean", [0.5, 1 / 6, 1 / 6, 1 / 6]), ("dr_grpo", [0.05] * 4)],
)
def test_normalisations(how: str, expected: list[float]) -> None:
    weights = token_weights(torch.tensor([1, 3]), torch.tensor([0, 1, 1, 1]), how, constant=10)
    assert weights.tolist() == pytest.approx(expected)


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(UserError, match="ppo2"):
        LOSSES.load("ppo2")


def test_no_token_outweighs_the_others_under_dppo() -> None:
    """A < 0 and a token that rose from next to nothing is outside of neither bound: 260 times the weight of others."""
    t = tokens([0.26, 0.5], [0.001, 0.5], [-1.0, -1.0])
    dppo_tv(t, OPTIONS, penalty=0.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert t.log_pi_T.grad is not None
    assert t.log_pi_T.grad.tolist() == pytest.approx([10.0, 1.0])


def test_below_the_cap_dppo_is_as_without_one() -> None:
    for cap in (10.0, 1e9):
        t = tokens([0.3], [0.04], [-1.0])
        loss = dppo_tv(t, OPTIONS, penalty=0.0, cap=cap)[0]
        loss.sum().backward()  # type: ignore[no-untyped-call]
        assert (loss.item(), t.log_pi_T.grad.item()) == pytest.approx((7.5, 7.5))  # type: ignore[union-attr]


def test_decoupled_truncates_the_weight_of_the_behaviour_policy() -> None:
    loss, _ = decoupled(tokens([0.6], [0.001], [1.0], prox=[0.6]), OPTIONS)
    assert loss.item() == pytest.approx(-5.0)
    assert decoupled(tokens([0.6], [0.001], [1.0], prox=[0.6]), OPTIONS, cap=7.0)[0].item() == pytest.approx(-7.0)
