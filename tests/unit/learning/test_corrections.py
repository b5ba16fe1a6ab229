"""Each correction against its closed form, on two sequences of two tokens."""

from __future__ import annotations

import math

import pytest
import torch

from kbrl_async.errors import UserError
from kbrl_async.learning.corrections import (
    Ratios,
    multiplier,
    sequence_mean,
    sequence_sum,
)
from kbrl_async.learning.settings import CORRECTIONS


def ratios(rho: list[float], advantage: list[float] | None = None, sample: list[int] | None = None) -> Ratios:
    return Ratios(
        torch.tensor(rho).log(),
        torch.tensor(advantage or [1.0] * len(rho)),
        torch.tensor(sample or [0, 0, 1, 1]),
        torch.full((len(rho),), -1.0),
    )


def applied(name: str, r: Ratios, **constants: float) -> list[float]:
    values: list[float] = CORRECTIONS.load(name)(r, **constants).tolist()
    return values


def test_sums_and_means_go_over_each_tokens_own_sequence() -> None:
    value, sample = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1, 1, 0])
    assert sequence_sum(value, sample).tolist() == [3.0, 3.0, 5.0]
    assert sequence_mean(value, sample).tolist() == [1.5, 1.5, 5.0]


@pytest.mark.parametrize(
    ("name", "rho", "expected"),
    [
        ("tis", [0.5, 1.0, 3.0, 9.0], [0.5, 1.0, 2.0, 2.0]),
        ("tis_sequence", [0.5, 3.0, 3.0, 3.0], [1.5, 1.5, 5.0, 5.0]),
        ("icepop", [0.4, 0.6, 1.9, 2.1], [0, 1, 1, 0]),
        ("sequence_mask", [0.4, 2.0, 2.0, 2.0], [1, 1, 0, 0]),
        ("geometric_mask", [1.005, 1.0, 1.1, 1.0], [1, 1, 0, 0]),
        ("k3_reject", [1.0, 1.1, 3.0, 1.0], [1, 1, 0, 0]),
        ("veto", [1e-5, 1.0, 0.01, 1.0], [0, 0, 1, 1]),
    ],
)
def test_a_correction_is_its_formula(name: str, rho: list[float], expected: list[float]) -> None:
    assert applied(name, ratios(rho)) == pytest.approx(expected)


def test_opsm_drops_only_bad_sequences_that_the_policy_has_left() -> None:
    advantage = [-1.0, -1.0, 1.0, 1.0]
    assert applied("opsm", ratios([0.9, 0.9, 0.9, 0.9], advantage)) == [0, 0, 1, 1]
    assert applied("opsm", ratios([1.1, 1.0, 0.9, 0.9], advantage)) == [1, 1, 1, 1]


def test_m2po_masks_the_largest_ratios_until_the_mean_square_is_small() -> None:
    log_rho = torch.tensor([0.1, -0.2, 0.3, 1.0])
    r = Ratios(log_rho, torch.ones(4), torch.zeros(4, dtype=torch.long), torch.zeros(4))
    assert applied("m2po", r, tau=0.05) == [1, 1, 1, 0]
    kept = log_rho[:3].square().mean()
    assert float(kept) <= 0.05 < float(log_rho.square().mean())
    assert applied("m2po", r, tau=0.03) == [1, 1, 0, 0]


def test_clip_cov_drops_the_likely_tokens_of_good_answers_and_the_unlikely_ones_of_bad_answers() -> None:
    log_pi = torch.tensor([-0.1, -3.0, -0.1, -3.0])
    r = Ratios(torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1]), log_pi)
    assert applied("clip_cov", r, share=0.5) == [0, 1, 1, 0]
    assert applied("clip_cov", r, share=0.9) == [0, 1, 1, 0], "no token by which entropy rises is dropped"
    assert sum(applied("clip_cov", r)) == 3, "one at least, in a batch as small as this"


@pytest.mark.parametrize("name", CORRECTIONS.ours)
def test_an_unchanged_policy_is_not_corrected(name: str) -> None:
    assert applied(name, ratios([1.0] * 4, [-1.0, -1.0, 1.0, 1.0])) == [1.0] * 4


@pytest.mark.parametrize("name", CORRECTIONS.ours)
def test_a_broken_ratio_gives_a_finite_multiplier(name: str) -> None:
    r = Ratios(torch.tensor([80.0, -80.0]), torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), torch.zeros(2))
    assert all(map(math.isfinite, applied(name, r)))


def test_corrections_multiply() -> None:
    chosen = [CORRECTIONS.load(name) for name in ("tis", "icepop")]
    assert multiplier(ratios([0.4, 0.5, 1.5, 3.0]), chosen).tolist() == pytest.approx([0.0, 0.5, 1.5, 0.0])


def test_an_unknown_correction_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean tis"):
        CORRECTIONS.load("tiss")
