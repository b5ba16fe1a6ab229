"""Loss × corrections + KL: what composes, what must not, and gradients against finite differences."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.corrections import Ratios
from kbrl_async.learning.losses import Tokens, a3po, cispo, decoupled, gspo, tis
from kbrl_async.learning.objective import Objective, constants_of, kl_penalty
from kbrl_async.learning.settings import CORRECTIONS, LOSSES, WEIGHTS, Learner, check_combination

SMOOTH = Learner(clip_low=0.9, clip_high=9.0, dppo_delta=1.0, kl="k3", kl_weight=0.1)
"""Settings under which nothing is clipped, so that every loss is differentiable where it is tested."""
wide_gspo = functools.partial(gspo, low=0.9, high=9.0)
OWN = f"{__name__}:wide_gspo"
"""A loss of the user's own, by where it is."""


def tokens(log_pi: torch.Tensor | None = None) -> Tokens:
    at = torch.tensor([-1.1, -1.8, -0.6, -2.0], dtype=torch.double, requires_grad=True) if log_pi is None else log_pi
    return Tokens(
        at,
        torch.tensor([-1.0, -2.0, -0.5, -2.1]).double(),
        torch.tensor([1.0, 1.0, -0.5, -0.5]).double(),
        torch.tensor([-1.05, -1.9, -0.55, -2.05]).double(),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0.0, 0.0, 2.0, 2.0]).double(),
        torch.tensor([-1.2, -1.7, -0.7, -1.9]).double(),
    )


@pytest.mark.parametrize("loss", [*(name for name in LOSSES.ours if name not in ("tis", "cispo", "a3po", "gspo")), OWN])
@pytest.mark.parametrize("correction", ["icepop", "sequence_mask"])
def test_gradients_agree_with_finite_differences(loss: str, correction: str) -> None:
    objective = Objective(loss, SMOOTH, (correction,))
    base = tokens()

    def value(log_pi: torch.Tensor) -> torch.Tensor:
        return objective(dataclasses.replace(base, log_pi_T=log_pi))[0].sum()

    assert torch.autograd.gradcheck(value, (base.log_pi_T,))


@pytest.mark.parametrize("loss", [tis, cispo])
def test_losses_with_a_stopped_weight_have_the_weighted_policy_gradient(loss: Any) -> None:
    t = tokens()
    loss(t, SMOOTH, cap=1e9)[0].sum().backward()  # type: ignore[no-untyped-call]
    expected = -(t.log_pi_T.detach() - t.log_mu_T).exp() * t.advantage_T
    assert t.log_pi_T.grad is not None
    assert torch.allclose(t.log_pi_T.grad, expected)


def test_gspo_gives_every_token_of_a_sequence_the_same_ratio() -> None:
    t = tokens()
    loss, _ = wide_gspo(t, SMOOTH)
    ratio = math.exp(((-1.1 + 1.0) + (-1.8 + 2.0)) / 2)
    assert loss[:2].tolist() == pytest.approx([-ratio, -ratio])


def test_gspo_clips_by_sequence() -> None:
    _, diagnostics = gspo(tokens(), Learner())
    assert diagnostics["dropped"].tolist() == [1, 1, 0, 0]


def test_a3po_puts_the_proximal_policy_between_behaviour_and_learner_by_age() -> None:
    t = tokens()
    prox = torch.tensor([-1.0, -2.0, -0.5 + 2 / 3 * -0.1, -2.1 + 2 / 3 * 0.1]).double()
    expected, _ = decoupled(dataclasses.replace(t, log_prox_T=prox), Learner())
    assert torch.allclose(a3po(t, Learner())[0], expected)


def test_the_three_estimators_of_the_divergence_are_their_formulas() -> None:
    log_pi, log_ref = torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.3)])
    assert kl_penalty(log_pi, log_ref, "k1").item() == pytest.approx(math.log(2))
    assert kl_penalty(log_pi, log_ref, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_penalty(log_pi, log_ref, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def test_a_masked_token_gives_neither_loss_nor_gradient_even_where_its_loss_is_infinite() -> None:
    log_pi = torch.tensor([-1.0, -math.inf], requires_grad=True)
    t = Tokens(log_pi, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]))
    loss, diagnostics = Objective("reinforce", Learner(), ("icepop",))(t)
    assert loss.tolist() == [1.0, 0.0]
    assert diagnostics["masked"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("loss", [name for name in LOSSES.ours if name != "reinforce"])
@pytest.mark.parametrize("correction", sorted(WEIGHTS))
def test_a_ratio_is_never_weighed_twice(loss: str, correction: str) -> None:
    with pytest.raises(ConfigError, match="again"):
        check_combination(loss, (correction,))


def test_masks_stand_beside_every_loss() -> None:
    for loss in LOSSES.ours:
        for correction in CORRECTIONS.ours.keys() - WEIGHTS:
            check_combination(loss, (correction,))


def test_two_weights_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="two corrections"):
        check_combination("reinforce", ("tis", "tis_sequence"))


def halves(r: Ratios) -> torch.Tensor:
    return torch.full_like(r.log_rho_T, 0.5)


def test_a_correction_of_the_user_s_own_comes_in_by_its_place() -> None:
    t = tokens()
    whole = Objective("reinforce", Learner())(t)[0]
    assert torch.equal(Objective("reinforce", Learner(), (f"{__name__}:halves",))(t)[0], whole * 0.5)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_a_straight_through_estimator_has_its_own_value_and_the_gradient_of_k2(estimator: str) -> None:
    reference = torch.tensor([-1.2, -1.7, -0.7])
    gradients = []
    for name in (estimator, "k2"):
        policy = torch.tensor([-1.1, -1.8, -0.6], requires_grad=True)
        penalty = kl_penalty(policy, reference, name)
        penalty.sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(policy.grad)
        if name == estimator:
            assert torch.allclose(penalty, kl_penalty(policy.detach(), reference, name[:-1]))
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.allclose(gradients[0], gradients[1])


def expected_gradient(estimator: str) -> torch.Tensor:
    """E over π of the gradient of the penalty, exactly, by all three tokens of a tiny vocabulary."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.double, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.7], dtype=torch.double).log()
    policy = logits.log_softmax(0)
    (policy.detach().exp() * kl_penalty(policy, reference, estimator)).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return logits.grad


def test_on_policy_only_the_straight_through_estimators_have_the_gradient_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.double, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.7], dtype=torch.double).log()
    policy = logits.log_softmax(0)
    (policy.exp() * (policy - reference)).sum().backward()  # type: ignore[no-untyped-call]
    right = logits.grad
    assert right is not None
    assert torch.allclose(expected_gradient("k1"), torch.zeros_like(right))
    assert not torch.allclose(expected_gradient("k3"), right)
    for estimator in ("k2", "k1+", "k3+"):
        assert torch.allclose(expected_gradient(estimator), right)


def test_constants_are_set_by_name() -> None:
    given = Learner(constants=["icepop.low=0.99", "dppo_tv.penalty=0.5"])
    t = tokens()
    assert not torch.equal(
        Objective("dppo_tv", given, ("icepop",))(t)[0], Objective("dppo_tv", Learner(), ("icepop",))(t)[0]
    )
    assert constants_of(["tis.cap=3"], {"tis": tis}) == {"tis": {"cap": 3.0}}


@pytest.mark.parametrize("text", ["tis.cup=3", "icepop.low=3", "tis.cap", "tis.cap=much", "cap=3"])
def test_a_constant_that_nothing_has_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        constants_of([text], {"tis": tis})
    assert "tis.cap" in f"{caught.value.cause} {caught.value.cure}"
