"""Over which inputs own kernels are left out: where they are small, a step on the way may happen to be the answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kbrl_async.kernels.verify.cpu.own_kernels import to_ask
from protocols.records import Fault, Verdict

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, y, w):
        return y * w * torch.cos(x)

def get_inputs():
    return [torch.randn(32, 33) * 0.2, torch.randn(32, 33), torch.randn(33)]

def get_init_inputs():
    return []
"""
HONEST = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = """
#include <math.h>
void turn(const float *x, const float *s, float *out, long n) {
  for (long i = 0; i < n; i++) out[i] = s[i] * cosf(x[i]);
}
"""
turn = c_kernel(SOURCE, "turn")

class ModelNew(nn.Module):
    def forward(self, x, y, w):
        s, out = y * w, torch.empty_like(x)
        turn(x, s, out, x.numel())
        return out
'''


def small_first(names: list[str], _rng: Any) -> list[int]:
    return sorted(range(len(names)), key=lambda place: names[place] != "small")


@pytest.mark.parametrize("replay", [True, False])
def test_a_library_step_that_is_the_answer_to_small_inputs_accuses_nobody(
    built_and_judged: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    monkeypatch.setattr("kbrl_async.kernels.verify.checks.in_secret_order", small_first)
    verdict = built_and_judged(HONEST, PROBLEM, replay)
    assert verdict.fault is Fault.OK, verdict.message


def sets(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name.strip("!"), degenerate=name.startswith("!")) for name in names]


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        (["small", "nominal", "spikes", "mixed", "large"], ["nominal", "mixed"]),
        (["small", "graded", "spikes", "nominal"], ["nominal"]),
        (["small", "!nominal", "spikes", "large"], ["small", "spikes"]),
        (["large"], ["large"]),
        (["!nominal", "!mixed"], []),
    ],
)
def test_such_as_inputs_are_drawn_are_asked_about(order: list[str], asked: list[str]) -> None:
    assert [one.name for one in to_ask(sets(*order))] == asked
