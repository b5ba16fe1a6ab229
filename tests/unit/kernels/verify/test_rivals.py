"""Answers that hardly depend on their inputs, that are an input, or that forward leaves in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kbrl_async.kernels.verify.rivals import Rivals, sample_of
from kbrl_async.kernels.verify.tolerance import Tolerance
from protocols.records import Fault, Verdict

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(1, 2, 512))

    def forward(self, x):
        return {forward}

def get_inputs():
    return [torch.randn(8, 512)]

def get_init_inputs():
    return []
"""
CANDIDATE = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

own = c_kernel("void own(const float *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = {value}; }}", "own")

def through(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    own(x, y, y.numel())
    return y

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(1, 2, 512))

    def forward(self, x):
        return {forward}
"""
HARDLY = "self.bias + 1e-6 * torch.sin(2 * x)"
Judged = Callable[..., Verdict]


@pytest.mark.parametrize("replay", [True, False])
def test_who_makes_a_part_of_an_answer_that_hardly_depends_on_it_is_no_decoy(
    built_and_judged: Judged, replay: bool
) -> None:
    """What the library makes of poison is right within the tolerance there."""
    honest = CANDIDATE.format(value="2 * x[i]", forward="self.bias + 1e-6 * torch.sin(through(x))")
    assert built_and_judged(honest, PROBLEM.format(forward=HARDLY), replay).fault is not Fault.CHEATING


@pytest.mark.parametrize(("replay", "faults"), [(True, {Fault.CHEATING}), (False, {Fault.CHEATING, Fault.UNPROVEN})])
def test_a_copy_of_such_an_answer_is_none_of_its_own(
    built_and_judged: Judged, replay: bool, faults: set[Fault]
) -> None:
    decoy = CANDIDATE.format(value="x[i]", forward=f"through({HARDLY})")
    assert built_and_judged(decoy, PROBLEM.format(forward=HARDLY), replay).fault in faults


def test_a_copy_of_what_the_library_leaves_in_an_input_is_a_decoy(built_and_judged: Judged) -> None:
    written = PROBLEM.replace("return {forward}", "x[1:] = x[:-1] * self.bias\n        return x")
    decoy = CANDIDATE.replace("return {forward}", "x[1:] = x[:-1] * self.bias\n        return through(x)")
    assert built_and_judged(decoy.format(value="x[i]"), written).rule == "decoy_kernel"
    honest = CANDIDATE.replace("return {forward}", "x[1:] = through(x[:-1] * self.bias / 2)\n        return x + 0")
    assert built_and_judged(honest.format(value="2 * x[i]"), written).fault is Fault.OK


@pytest.mark.parametrize("replay", [True, False])
def test_a_copy_beside_an_input_that_is_returned_is_a_decoy(built_and_judged: Judged, replay: bool) -> None:
    both = PROBLEM.format(forward="(x, torch.tanh(x[0] * self.bias))")
    decoy = CANDIDATE.format(value="x[i]", forward="(through(x), through(torch.tanh(x[0] * self.bias)))")
    assert built_and_judged(decoy, both, replay).rule == "decoy_kernel"
    honest = CANDIDATE.format(value="x[i] + x[i]", forward="(x.clone(), torch.tanh(through(x[0] * self.bias / 2)))")
    assert built_and_judged(honest, both, replay).fault is Fault.OK


CACHE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, q, k, cache):
        cache[0] = k
        return torch.tanh(q + cache.sum(0)), cache

def get_inputs():
    return [torch.randn(512), torch.randn(512), torch.randn(16, 512)]

def get_init_inputs():
    return []
"""
CACHED = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = '''
#include <math.h>
void own(const float *q, const float *c, float *y, long n, long t) {
  for (long i = 0; i < n; i++) {
    float sum = q[i];
    for (long j = 0; j < t; j++) sum += c[j * n + i];
    y[i] = tanhf(sum);
  }
}
'''
own = c_kernel(SOURCE, "own")

class ModelNew(nn.Module):
    def forward(self, q, k, cache):
        cache[0] = k
        y = torch.empty_like(q)
        own(q, cache, y, q.numel(), cache.shape[0])
        return y, cache
"""


@pytest.mark.parametrize("replay", [True, False])
def test_a_cache_that_the_library_writes_one_row_of_is_not_the_answer_beside_it(
    built_and_judged: Judged, replay: bool
) -> None:
    """Most of all elements were the cache as it came, and an honest kernel for the rest was a decoy."""
    assert built_and_judged(CACHED, CACHE, replay).fault is Fault.OK


def test_of_as_large_a_result_as_the_input_beside_it_a_copy_is_a_decoy(built_and_judged: Judged) -> None:
    """Where it is watched, half of all was the input, so that the other half was not most of the answer."""
    both = PROBLEM.format(forward="(x, torch.tanh(x * self.bias))")
    decoy = CANDIDATE.format(value="x[i]", forward="(x.clone(), through(torch.tanh(x * self.bias)))")
    for replay in (True, False):
        assert built_and_judged(decoy, both, replay).rule == "decoy_kernel"


def test_only_what_is_nearer_than_an_answer_to_other_inputs_is_one() -> None:
    rivals, allowed = Rivals(), [Tolerance(0.0, 0.1)]
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.02, 2.05])
    rivals.draw([one], allowed)
    assert not rivals
    rivals.draw([other], allowed)
    assert rivals
    assert rivals.are_beaten([other + 1e-4], [other])
    assert not rivals.are_beaten([one], [other])
    assert not rivals.is_beaten(0, one[None], other[None])
    rivals.draw([other], allowed)
    assert (bool(rivals), rivals.is_same) == (False, True)
    rivals.draw([other + 1], allowed)
    assert (bool(rivals), rivals.is_same) == (False, False), "that would be wrong here"


def test_of_several_outputs_those_that_differ_tell() -> None:
    rivals, allowed = Rivals(), [Tolerance(0.0, 0.1)] * 2
    mask, one, other = torch.tensor([1, 0]), torch.tensor([1.0]), torch.tensor([1.05])
    rivals.draw([mask, one], allowed)
    rivals.draw([mask.clone(), other], allowed)
    assert rivals.are_beaten([mask, other], [mask, other])
    assert not rivals.are_beaten([mask, one], [mask, other])


def test_of_large_answers_a_sample_is_kept_that_shows_where_they_differ() -> None:
    large = torch.zeros(7, 1 << 20)
    assert sample_of(large).numel() == 3 << 19
    for place in (0, large.numel() // 2, -1):
        other = large.clone()
        other.view(-1)[place] = 1.0
        assert not torch.equal(sample_of(other), sample_of(large))
    assert torch.equal(sample_of(large.t().contiguous().t()), sample_of(large)), "however it lies in memory"
    rows = torch.zeros(4, (1 << 19) + 1)
    assert sample_of(rows).numel() == 3 << 19, "no single elements of what is left of a row"
    turned, rivals = torch.randn(2000, 1500).t(), Rivals()
    rivals.draw([turned.reshape(2000, 1500)], [Tolerance(0.0, 2.0)])
    rivals.draw([turned.reshape(2000, 1500) + 1], [Tolerance(0.0, 2.0)])
    assert not rivals.is_beaten(0, turned, turned.reshape(2000, 1500) + 1), "in another shape, as it lies"
    rivals, allowed = Rivals(), [Tolerance(0.0, 2.0)]
    rivals.draw([large], allowed)
    rivals.draw([large + 1], allowed)
    assert rivals.is_beaten(0, (large + 1).view(-1), large + 1), "in another shape, too"
    assert not rivals.is_beaten(0, large.view(-1), large + 1)
