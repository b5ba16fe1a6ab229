"""Answers of several tensors: what of them the library may make beside own kernels, and what leaves those nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocols.records import Fault, Verdict
from tests.candidates import COPY_AND_TANH

_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, y):
        return {answer}

def get_inputs():
    return [torch.randn(40, 51), torch.randn(51, 40)]

def get_init_inputs():
    return []
"""
_CANDIDATE = """
class ModelNew(nn.Module):
    def forward(self, x, y):
        return {answer}
"""
TWO = "torch.tanh(x), torch.tanh(y).t()"
SIGNS = "torch.tanh(x.exp()), x.exp() < 0"
NARROW = "torch.tanh(x).half(), torch.tanh(y).to(torch.float8_e5m2)"
WAVES = "x[:20].sin().cos().sin().cos().sin().cos().sin()"
CHAINED = f"torch.tanh(x[:20, :50]), torch.tanh(x[:20, :49]), {WAVES}"
"""Of what a recurrent layer computes its states were not kept: nine results of its output's size came in between."""
TURNED = "x.t().contiguous(), torch.tanh(y), y.sum(-1)"


@pytest.mark.parametrize(
    ("problem", "candidate", "is_own"),
    [
        (TWO, "tanh(x), torch.tanh(y).t()", True),
        (TWO, "torch.tanh(x), tanh(y).t()", True),
        (TWO, "copy(torch.tanh(x)), copy(torch.tanh(y)).t()", False),
        (SIGNS, "tanh(x.exp()), x.exp() < 0", True),
        (SIGNS, "copy(torch.tanh(x.exp())), copy(x.exp() < 0)", False),
        (NARROW, "tanh(x).half(), tanh(y).to(torch.float8_e5m2)", True),
        (NARROW, "copy(torch.tanh(x).half()), copy(torch.tanh(y).to(torch.float8_e5m2))", False),
        (CHAINED, f"tanh(x[:20, :50]), tanh(x[:20, :49]), {WAVES}", True),
        (
            CHAINED,
            "[x[:20].sin() for _ in range(4)] and copy(torch.tanh(x[:20, :50])), copy(torch.tanh(x[:20, :49])), "
            f"copy({WAVES})",
            False,
        ),
        (TURNED, "x.t().contiguous(), tanh(y), y.sum(-1)", True),
        (TURNED, "copy(x.t()), copy(torch.tanh(y)), copy(y.sum(-1))", False),
    ],
)
@pytest.mark.parametrize("replay", [True, False])
def test_the_library_may_make_some_of_several_outputs_and_not_all(
    built_and_judged: Callable[..., Verdict], problem: str, candidate: str, is_own: bool, replay: bool
) -> None:
    verdict = built_and_judged(
        COPY_AND_TANH + _CANDIDATE.format(answer=candidate), _PROBLEM.format(answer=problem), replay
    )
    assert (verdict.fault, verdict.rule) == ((Fault.OK, "") if is_own else (Fault.CHEATING, "decoy_kernel")), (
        verdict.message
    )
