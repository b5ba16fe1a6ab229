"""Our losses against an independent implementation: TRL's, on the same log-probs, to the last digits.

`trl_golden.json` holds what TRL said, so that this needs no trl; where trl is installed, it is asked again. Both are
written by `trl_reference.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from kbrl_async.learning.losses import Tokens, token_weights
from kbrl_async.learning.objective import Objective
from kbrl_async.learning.settings import Learner
from kbrl_async.rollouts.rewards.advantages import leave_one_out
from tests.unit.learning import trl_reference

GOLDEN: Mapping[str, Any] = json.loads(trl_reference.GOLDEN.read_text(encoding="utf-8"))
HAS_TRL = importlib.util.find_spec("trl") is not None


class Ours(NamedTuple):
    """The same in our configuration."""

    objective: Objective
    normalise: str
    behaviour: str = "old"
    """Which log-probs the samples were written with."""
    proximal: str = ""


def clipped(low: float = 0.2, high: float = 0.2, dual: float = 0.0, **kl: Any) -> Learner:
    return Learner(clip_low=low, clip_high=high, dual_clip=dual, **kl)


HIGHER = clipped(high=0.28)
OURS = {
    "grpo": Ours(Objective("grpo", clipped()), "sequence_mean"),
    "grpo_clip_higher": Ours(Objective("grpo", HIGHER), "sequence_mean"),
    "bnpo": Ours(Objective("ppo", clipped()), "token_mean"),
    "dapo": Ours(Objective("grpo", HIGHER), "token_mean"),
    "dr_grpo": Ours(Objective("grpo", clipped()), "dr_grpo"),
    "dual_clip": Ours(Objective("grpo", clipped(dual=1.3)), "token_mean"),
    "gspo": Ours(Objective("gspo", Learner()), "sequence_mean"),
    "cispo": Ours(Objective("cispo", Learner()), "token_mean"),
    "grpo_with_k3": Ours(Objective("grpo", clipped(kl="k3", kl_weight=0.04)), "sequence_mean"),
    "dapo_with_k3": Ours(Objective("grpo", clipped(high=0.28, kl="k3", kl_weight=0.1)), "token_mean"),
    "grpo_with_opsm": Ours(Objective("grpo", clipped(), ("opsm",)), "sequence_mean"),
    "decoupled": Ours(Objective("decoupled", clipped()), "token_mean", "mu", "old"),
}


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def ours(case: Ours, drawn: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Our loss and its gradient with respect to every log-prob."""
    lengths = torch.tensor([len(row) for row in drawn["pi"]])
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    pi = flat(drawn["pi"]).requires_grad_()
    tokens = Tokens(
        pi,
        flat(drawn[case.behaviour]),
        torch.tensor(drawn["advantages"], dtype=torch.float64)[sample],
        log_prox_T=flat(drawn[case.proximal]) if case.proximal else None,
        sample_T=sample,
        log_ref_T=flat(drawn["reference"]),
    )
    per_token, _ = case.objective(tokens)
    loss = (per_token * token_weights(lengths, sample, case.normalise, trl_reference.MAX_LENGTH)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert pi.grad is not None
    return float(loss.detach()), pi.grad.tolist()


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    loss, gradient = ours(OURS[name], GOLDEN["drawn"])
    assert loss == pytest.approx(GOLDEN["cases"][name]["loss"], rel=1e-5)
    assert gradient == pytest.approx(GOLDEN["cases"][name]["gradient"], rel=1e-5, abs=1e-9)


def test_rloo_has_the_gradient_of_trl_where_the_learner_is_still_the_sampler() -> None:
    """TRL weighs a sequence by its whole ratio, we weigh each token by a truncated one: on fresh samples both are 1."""
    drawn = {**GOLDEN["drawn"], "old": GOLDEN["drawn"]["pi"]}
    case = Ours(Objective("reinforce", Learner(), ("tis",)), "dr_grpo")
    _, gradient = ours(case, drawn)
    sums = [g * trl_reference.MAX_LENGTH for g in gradient]  # TRL adds up tokens and takes the mean of sequences
    assert sums == pytest.approx(GOLDEN["cases"]["rloo"]["gradient"], rel=1e-6)


def test_no_case_agrees_with_another_by_accident() -> None:
    """Each constant of each case has a part in its figures: a clip that never acts would compare nothing."""
    losses = [round(case["loss"], 9) for case in GOLDEN["cases"].values()]
    assert len(set(losses)) == len(losses)


def test_the_golden_file_is_of_the_cases_that_are_drawn_now() -> None:
    assert GOLDEN["drawn"] == trl_reference.draw()
    assert set(GOLDEN["cases"]) == {*trl_reference.SETTINGS, "rloo"} == {*OURS, "rloo"}


@pytest.mark.skipif(not HAS_TRL, reason="trl is not installed; the golden file says what it answered")
@pytest.mark.filterwarnings("ignore")
def test_trl_still_says_what_the_golden_file_holds() -> None:
    now = trl_reference.answers()
    for name, case in GOLDEN["cases"].items():
        assert now[name]["loss"] == pytest.approx(case["loss"], rel=1e-9), (name, importlib.metadata.version("trl"))
        assert now[name]["gradient"] == pytest.approx(case["gradient"], rel=1e-9), name


def test_leave_one_out_is_rloo_of_the_paper() -> None:
    """Written otherwise, as in TRL: n/(n−1) · (r − mean)."""
    rewards = [0.3, 0.7, 0.0, 1.0, 0.45]
    mean = sum(rewards) / len(rewards)
    assert leave_one_out(rewards) == pytest.approx([(r - mean) * 5 / 4 for r in rewards])
