"""What comes back: subclasses, changed inputs, NaN, views and outputs that do not stay."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify import Bench, compare, outputs
from kbrl_async.kernels.verify.checks import Checker
from protocols.records import Fault
from tests.unit.kernels.verify.catalogue.exploits import PROBLEM, Patch, Run, candidate, caught, nothing, refused, row
from tests.unit.kernels.verify.test_bench import patient

LAZY = candidate("return self.own(x).as_subclass(Lazy)", top="class Lazy(torch.Tensor): pass")


@row("lazy tensor subclass or proxy")
def test_a_subclass_is_no_tensor(run: Run) -> None:
    assert caught(run(LAZY).verdict, "tensor_subclass")


def test_without_looking_at_the_type_a_subclass_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(outputs, "check_meta", nothing)
    assert run(LAZY).verdict.fault is Fault.OK


MUTATES = candidate("y = self.own(x)\nx.zero_()\nreturn y")


@row("mutates inputs")
def test_inputs_are_compared_with_the_originals(run: Run) -> None:
    assert caught(run(MUTATES).verdict, "input_mutation")


def test_without_that_comparison_a_mutation_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Checker, "refuse_mutation", nothing)
    assert run(MUTATES).verdict.fault is Fault.OK


NOT_A_NUMBER = candidate("y = self.own(x)\ny[0, 0] = float('nan')\nreturn y")


@row("NaN")
def test_nan_is_no_wildcard(run: Run) -> None:
    verdict = run(NOT_A_NUMBER).verdict
    assert verdict.fault is Fault.INCORRECT
    assert "NaN" in verdict.message


def test_where_nan_counts_as_right_it_passes(run: Run, monkeypatch: Patch) -> None:
    difference = compare.difference
    forgiving = lambda got, expected, allowed: difference(  # noqa: E731
        torch.where(torch.isnan(got), expected, got), expected, allowed
    )
    monkeypatch.setattr(compare, "difference", forgiving)
    assert run(NOT_A_NUMBER).verdict.fault is Fault.OK


REUSED = candidate(
    "y = self.own(x)\nif self.calls == 1:\n    self.y = torch.empty_like(y)\nself.y.copy_(y)\nreturn self.y"
)


@pytest.mark.parametrize("copies", [False, True])
def test_an_earlier_output_stays_what_it_was(run: Run, zygote: Zygote, monkeypatch: Patch, copies: bool) -> None:
    with contextlib.closing(Bench(zygote, patient(copy_outputs=copies))) as bench:
        assert refused(run(REUSED, on=bench).verdict, Fault.INCORRECT, "output_overwritten")
        monkeypatch.setattr(Checker, "refuse_overwriting", nothing)
        assert run(REUSED, on=bench).verdict.fault is Fault.OK


FLAT = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.abs() + self.gain * 0").replace(
    "torch.randn", "torch.rand"
)


@pytest.mark.parametrize("copies", [False, True])
def test_an_output_is_no_view_of_an_input(run: Run, zygote: Zygote, monkeypatch: Patch, copies: bool) -> None:
    alias = candidate("self.touch(x, 1)\nreturn x.view(x.shape)")
    with contextlib.closing(Bench(zygote, patient(copy_outputs=copies))) as bench:
        assert refused(run(alias, FLAT, on=bench).verdict, Fault.INCORRECT, "output_alias")
        monkeypatch.setattr(Checker, "refuse_aliasing", nothing)
        assert run(alias, FLAT, on=bench).verdict.fault is Fault.OK


def test_a_view_of_an_input_is_right_where_the_reference_gives_one(run: Run) -> None:
    view = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.view(-1)")
    assert run(candidate("self.touch(x, 1)\nreturn x.view(-1)"), view).verdict.fault is Fault.OK


EXPANDED = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x.mean() * torch.ones(24, 65)")


def test_an_expanded_view_is_no_output(run: Run, monkeypatch: Patch) -> None:
    expand = candidate("self.touch(x, 1)\nreturn x.mean().expand(24, 65)")
    assert refused(run(expand, EXPANDED).verdict, Fault.INCORRECT, "layout")
    monkeypatch.setattr(outputs, "check_layout", nothing)
    assert run(expand, EXPANDED).verdict.rule != "layout"
