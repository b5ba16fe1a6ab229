"""What accuses by chance: over some inputs a step of own kernels changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kbrl_async.kernels.verify import proof
from kbrl_async.kernels.verify.cpu import own_kernels
from kbrl_async.kernels.verify.cpu.own_kernels import found_over_all, to_ask_again
from kbrl_async.kernels.verify.input_set import InputSet
from protocols.records import Fault, Verdict

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.clamp(x.mean(-1), -0.05, 0.05)

def get_inputs():
    return [torch.randn(16, 51)]

def get_init_inputs():
    return []
"""
CANDIDATE = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = """
#include <math.h>
void cut(const float *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = {value}; }}
"""
cut = c_kernel(SOURCE, "cut")

class ModelNew(nn.Module):
    def forward(self, x):
        found = {found}
        y = torch.empty_like(found)
        cut(found, y, y.numel())
        return y
'''
HONEST = CANDIDATE.format(value="fminf(fmaxf(x[i], -0.05f), 0.05f)", found="x.mean(-1)")
DECOY = CANDIDATE.format(value="x[i]", found="torch.clamp(x.mean(-1), -0.05, 0.05)")


def only_small(order: Sequence[InputSet]) -> list[InputSet]:
    """As if such were drawn: nothing is cut there."""
    return [structs.replace(one, name="nominal") for one in order if one.name == "small"]


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("source", [HONEST, DECOY])
def test_what_accuses_is_looked_for_over_new_draws(
    built_and_judged: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch, source: str, replay: bool
) -> None:
    monkeypatch.setattr(own_kernels, "to_ask", only_small)
    verdict = built_and_judged(source, PROBLEM, replay)
    wanted = (Fault.OK, "") if source is HONEST else (Fault.CHEATING, "decoy_kernel")
    assert (verdict.fault, verdict.rule) == wanted, verdict.message


FIXED = PROBLEM.replace("torch.randn(16, 51)", "torch.linspace(-2, 3, 16 * 51).reshape(16, 51)")


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("source", [HONEST, DECOY])
def test_where_a_problem_draws_the_same_every_time_other_inputs_are_asked(
    built_and_judged: Callable[..., Verdict], source: str, replay: bool
) -> None:
    verdict = built_and_judged(source, FIXED, replay)
    wanted = (Fault.OK, "") if source is HONEST else (Fault.CHEATING, "decoy_kernel")
    assert (verdict.fault, verdict.rule) == wanted, verdict.message


def one(name: str, degenerate: bool = False) -> Any:
    return SimpleNamespace(name=name, degenerate=degenerate)


ACCUSED, SHORT = proof.passed_on("aten::tanh"), proof.unseen("no memory")


@pytest.mark.parametrize(
    ("answers", "seen", "found"),
    [
        ({}, "abc", ACCUSED),
        ({"a": None}, "a", None),
        ({"b": None}, "ab", None),
        ({"a": SHORT}, "a", SHORT),
        ({"b": SHORT}, "ab", SHORT),
    ],
)
def test_what_accuses_has_to_over_all_others(
    answers: dict[str, proof.Finding | None], seen: str, found: proof.Finding | None
) -> None:
    asked = []

    def find(input_set: InputSet) -> proof.Finding | None:
        asked.append(input_set.name)
        return answers.get(input_set.name, ACCUSED)

    assert found_over_all(find, one("a"), map(one, "bc")) is found
    assert "".join(asked) == seen


def test_new_draws_are_asked_about_and_other_sets_only_where_those_tell_nothing() -> None:
    order = [one("small"), one("nominal"), one("large"), one("binary", degenerate=True)]
    draws = itertools.cycle([one("drawn"), one("constant", degenerate=True)])
    again = [other.name for other in to_ask_again(order[1], order, lambda: next(draws))]
    assert set(again) == {"drawn"}
    assert len(again) > 7, "of four elements, of which two in five orders are their own inverse"
    assert [other.name for other in to_ask_again(order[0], order, lambda: order[3])] == ["nominal", "large"]
