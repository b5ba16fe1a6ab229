"""Inputs that a problem draws itself, and on which the library's ordinary rounding is large: another honest
implementation is right there, and one that leaves something out is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import torch

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.verify import leave
from kbrl_async.kernels.verify.bench import Bench
from kbrl_async.kernels.verify.compare import Tolerance, difference, tolerance
from protocols.records import Candidate, Fault

COUNT = 1 << 14
LAYERS = """
import torch
import torch.nn as nn

PARTS = 1

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))
        self.norm = nn.BatchNorm1d(64, affine=False)

    def forward(self, x):
        for layer in self.layers:
            weights = layer.weight.tensor_split(PARTS, 1)
            y = sum((one @ other.T for one, other in zip(x.tensor_split(PARTS, 1), weights)), layer.bias)
            x = torch.relu(self.norm(ROUNDED)) + x * 0.1
        return x

def get_inputs():
    return [torch.randn(8, 64)]

def get_init_inputs():
    return []
"""
"""A chain of norms over eight rows, whose products are rounded on the way as a GPU's convolutions are, to ten bits."""
PROBLEM = LAYERS.replace("ROUNDED", "(y if y.dtype == torch.float64 else (y * 8193 - (y * 8193 - y)))")


def candidate(change: tuple[str, str] = ("", "")) -> Candidate:
    """The same in another order, without that rounding."""
    named = LAYERS.replace("ROUNDED", "y").replace("class Model(", "class ModelNew(").replace("PARTS = 1", "PARTS = 4")
    return Candidate(named.replace(*change) if change[0] else named, "torch")


def judged(bench: Bench, one: Candidate, more: str = "") -> Fault:
    """`more`: of the problem's text, so that its reference is made anew."""
    problem = parse_problem(PROBLEM + more, "L3/10_layers")
    return bench.evaluate(problem, one, {}, timing=False).verdict.fault


def test_an_honest_second_implementation_of_a_deep_chain_is_right(watching: Bench) -> None:
    assert judged(watching, candidate()) is Fault.OK


def test_without_that_room_it_is_called_wrong(watching: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "as_drawn", lambda found, *_: found)
    assert judged(watching, candidate(), "# anew\n") is Fault.INCORRECT


@pytest.mark.parametrize(
    "change",
    [
        ("+ x * 0.1", ""),
        ("return x\n\ndef get_inputs", "return x * 1.3\n\ndef get_inputs"),
        ("return x\n\ndef get_inputs", "return x.clamp(max=1)\n\ndef get_inputs"),
        ("for layer in self.layers:", "for layer in self.layers[:-1]:"),
    ],
)
def test_what_leaves_something_out_is_wrong(watching: Bench, change: tuple[str, str]) -> None:
    assert judged(watching, candidate(change)) is Fault.INCORRECT


def noisy(share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A reference's output and the same in fp64: each element off by a normal error of this share of its deviation."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    return (wide + share * torch.randn(COUNT, generator=generator, dtype=torch.float64)).float(), wide


def room(share: float) -> tuple[torch.Tensor, torch.Tensor, Tolerance]:
    expected, wide = noisy(share, 1)
    return expected, wide, leave.as_drawn(tolerance(expected, wide, float(expected.abs().max())), expected, wide)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.09])
def test_another_of_the_same_error_is_right_and_twice_as_much_is_not(share: float) -> None:
    expected, wide, allowed = room(share)
    for error, is_right in ((0.0, True), (1.0, True), (4.0, False)):
        generator = torch.Generator().manual_seed(7)
        got = (wide + error * share * torch.randn(COUNT, generator=generator, dtype=torch.float64)).float()
        assert (difference(got, expected, allowed).wrong == 0) is is_right, (error, allowed)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.zeros_like(x),
        lambda x: x * 1.3,
        lambda x: torch.where(torch.arange(len(x)) % 32 == 0, 0, x),
        lambda x: x.roll(1),
    ],
)
def test_what_is_wrong_is_found_by_the_mean_of_all(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected, wide, allowed = room(0.05)
    assert difference(wrong(wide.float()), expected, allowed).wrong > 0


def test_where_a_constant_is_about_as_near_nothing_is_given() -> None:
    for share in (0.3, 1.0):
        expected, wide = noisy(share, 2)
        found = tolerance(expected, wide, 1.0)
        assert found.ill
        assert leave.as_drawn(found, expected, wide).spread == math.inf


def test_who_has_other_room_gets_none_of_this() -> None:
    expected, wide = noisy(0.05, 3)
    found = tolerance(expected, wide, 1.0)
    assert leave.as_drawn(found, expected, wide, True) == found
    assert leave.as_drawn(found, expected, wide[:-1]) == found
    fine = tolerance(expected, expected.double(), 1.0)
    assert leave.as_drawn(fine, expected, expected.double()) == fine


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_who_was_right_by_each_element_is_right_still(share: float) -> None:
    """Where moved inputs alone say that honest errors are large, fp64 tells nothing of how large they are."""
    expected, wide = noisy(share, 4)
    found = tolerance(expected, wide, 1.0, error=1.0)
    assert found.ill
    got = expected + 0.99 * found.honest * torch.sign(torch.randn(COUNT))
    assert difference(got, expected, found).wrong == 0
    assert difference(got, expected, leave.as_drawn(found, expected, wide)).wrong == 0


def test_what_is_allowed_is_said_in_words() -> None:
    assert "on the root mean square, as the reference itself is off from fp64" in room(0.05)[2].note()


def test_what_one_draw_shows_holds_for_all_that_are_as_drawn() -> None:
    """An output that jumps somewhere does so in the reference's own fp64 run in one draw, and not in the next."""
    wide, fine = room(0.05)[2], Tolerance(1e-4, 1e-4, 2e-4)
    first, second, exact = leave.together([[fine], [wide], [msgspec.structs.replace(fine, exact=True)]])
    assert first == [msgspec.structs.replace(fine, honest=wide.honest, spread=wide.spread)]
    assert second == [wide]
    assert exact[0].spread == math.inf
    assert leave.together([[fine, fine], [fine, fine]]) == [[fine, fine], [fine, fine]]


def test_all_sets_of_a_deep_chain_have_the_same_room(watching: Bench) -> None:
    sets = watching.references.get(parse_problem(PROBLEM, "L3/10_layers")).references[0].sets
    assert {one.name for one in sets} == {"nominal", "repeated"}
    assert len({(one.tolerances[0].honest, one.tolerances[0].spread) for one in sets}) == 1
