"""A problem with several workloads on the CPU: one verdict over all, one process, and candidates that count on less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from kbrl_async.kernels.verify.session import Session
from protocols.records import OBSERVED, REPLAYED, BenchReport, Candidate, Fault, Problem, Verdict
from tests.candidates import elementwise

Evaluate = Callable[..., BenchReport]
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, shift=1.0):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return x * 2 + self.shift

def get_inputs(rows=16, cols=33):
    return [torch.randn(rows, cols)]

def get_init_inputs():
    return []
"""
TWO = 'WORKLOADS = [{"shape": {"rows": 16}, "weight": 3}, {"shape": {"rows": 40}}]\n'
RIGHT = elementwise("2 * x[i] + 1")
PLAIN = PROBLEM.replace("class Model(", "class ModelNew(").partition("def get_inputs")[0]


def plain(forward: str) -> str:
    """A module without kernels of its own, for what is no matter of proof."""
    return PLAIN.replace("return x * 2 + self.shift", forward)


def names(report: BenchReport) -> dict[str, str]:
    return {one.name: one.fault.value for one in report.verdict.workloads}


@pytest.fixture
def judged(bench: Bench, builder: Builder) -> Evaluate:
    def run(source: str, problem: str = PROBLEM + TWO, **more: Any) -> BenchReport:
        candidate = Candidate(source, "c")
        paths = artifact_paths(builder.store, builder.build(candidate))
        return bench.evaluate(Problem("L1/01_a", 1, "a", problem), candidate, paths, **more)

    return run


def test_a_right_kernel_is_right_on_all_and_timed_on_each(judged: Evaluate) -> None:
    report = judged(RIGHT)
    assert report.verdict.fault is Fault.OK
    assert report.verdict.trust == REPLAYED
    assert names(report) == {"rows=16": "ok", "rows=40": "ok"}
    assert report.verdict.passed == report.verdict.total == 14
    assert report.timing is not None
    assert [(one.name, one.weight) for one in report.timing.workloads] == [("rows=16", 0.75), ("rows=40", 0.25)]
    lowest, highest = sorted(one.speedup for one in report.timing.workloads)
    assert lowest <= report.timing.speedup <= highest
    assert report.timing.ratios == ()


def test_a_kernel_that_is_wrong_on_one_is_wrong_and_the_message_names_it(judged: Evaluate) -> None:
    report = judged(elementwise("2 * x[i] + (n < 600)"))
    assert report.verdict.fault is Fault.INCORRECT
    assert report.verdict.message.startswith("on workload rows=40: ")
    assert names(report) == {"rows=16": "ok", "rows=40": "incorrect"}
    assert report.timing is None
    assert 0 < report.verdict.passed < report.verdict.total == 14


@pytest.mark.parametrize("number", [5, 1])
def test_a_memory_of_the_first_shapes_is_no_answer_to_the_others(evaluate: Evaluate, number: int) -> None:
    """It computes its first workload and gives that shape's answer again and again."""
    kept = "self.kept = getattr(self, 'kept', x * 2 + 1); return self.kept if len(x) > 16 else x * 2 + 1"
    assert evaluate(plain(kept), problem=PROBLEM + TWO).verdict.fault is Fault.INCORRECT


def test_state_that_one_workload_leaves_to_the_next_is_found(evaluate: Evaluate) -> None:
    counted = "self.n = getattr(self, 'n', 0) + 1; return x * 2 + 1 + (self.n > 6)"
    report = evaluate(plain(counted), problem=PROBLEM + TWO)
    assert report.verdict.fault is Fault.INCORRECT


def test_secret_tails_find_a_kernel_that_leaves_the_last_odd_element_out(judged: Evaluate) -> None:
    even = elementwise("2 * x[i] + 1").replace("i < n", "i < n - n % 2").replace("empty_like", "zeros_like")
    problem = PROBLEM + 'FREE_SHAPES = {"rows": (0, 60), "cols": (1, 60)}\n'
    assert (
        judged(even, PROBLEM.replace("16", "32") + 'WORKLOADS = [{"shape": {"rows": 32}}]\n').verdict.fault is Fault.OK
    )
    report = judged(even, problem.replace("16", "32"))
    assert report.verdict.fault is Fault.INCORRECT
    assert "on workload tail rows=" in report.verdict.message
    right = judged(RIGHT, problem)
    assert right.verdict.fault is Fault.OK
    assert any("rows=0 " in name or name.endswith("cols=0") for name in names(right))


def test_a_tail_that_the_reference_does_not_take_is_none(evaluate: Evaluate) -> None:
    picky = PROBLEM.replace("return x * 2", "assert x.numel() > 40\n        return x * 2")
    report = evaluate(plain("return x * 2 + 1"), problem=picky + 'FREE_SHAPES = {"rows": (0, 60), "cols": (1, 60)}\n')
    assert report.verdict.fault is Fault.OK
    assert "tail rows=1 cols=1" not in names(report)


def test_arguments_and_dtypes_of_a_workload_reach_the_candidate(evaluate: Evaluate) -> None:
    rows = 'WORKLOADS = [{"name": "a"}, {"name": "b", "init": [5.0]}, {"name": "half", "dtype": "bfloat16"}]\n'
    report = evaluate(plain("return x * 2 + self.shift"), problem=PROBLEM + rows)
    assert (report.verdict.fault, list(names(report))) == (Fault.OK, ["a", "b", "half"])
    report = evaluate(plain("return x * 2 + 1.0"), problem=PROBLEM + rows)
    assert report.verdict.message.startswith("on workload b: ")
    report = evaluate(plain("return x.float() * 2 + self.shift"), problem=PROBLEM + rows)
    assert report.verdict.message.startswith("on workload half: ")


def test_input_groups_are_workloads(evaluate: Evaluate) -> None:
    groups = "def get_input_groups():\n    return [[torch.randn(n, 5)] for n in (4, 7, 9)]\n"
    report = evaluate(plain("return x * 2 + 1"), problem=PROBLEM + groups)
    assert names(report) == {"group 0": "ok", "group 1": "ok", "group 2": "ok"}
    report = evaluate(plain("return x * 2 + (len(x) != 9)"), problem=PROBLEM + groups)
    assert names(report)["group 2"] == "incorrect"


def test_a_secret_subset_is_timed_and_all_are_checked(zygote: Zygote) -> None:
    rows = f"WORKLOADS = {[{'shape': {'rows': n}} for n in (4, 5, 6, 7)]}"
    options = bench_options(TimingBench(deadline_s=10.0, timed_workloads=1, cap_s=0.02), call_floor_s=1.0)
    seen, asked = set[str](), 0
    with contextlib.closing(Bench(zygote, options)) as bench:
        while len(seen) < 2 and asked < 40:  # of four, one of 64 times all of the first four are the same
            asked += 1
            candidate = Candidate(plain("return x * 2 + 1"), "torch")
            report = bench.evaluate(Problem("L1/01_a", 1, "a", PROBLEM + rows + "\n"), candidate, {})
            assert len(report.verdict.workloads) == 4
            assert report.timing is not None
            assert len(report.timing.workloads) == 1
            seen.add(report.timing.workloads[0].name)
    assert len(seen) > 1


def test_workloads_of_one_module_share_a_reference_and_a_candidates_process(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, judged: Evaluate
) -> None:
    opened: list[str] = []
    begin = Session.__init__

    def watched(self: Session, zygote: Zygote, setup: Any, *rest: Any) -> None:
        opened.append(setup.entry)
        begin(self, zygote, setup, *rest)

    monkeypatch.setattr(Session, "__init__", watched)
    rows = f"WORKLOADS = {[{'shape': {'rows': n}} for n in (3, 4, 5, 6)]}\n"
    assert judged(RIGHT, PROBLEM + "# shared\n" + rows, timing=False).verdict.fault is Fault.OK
    assert opened.count("Model") == 1
    assert opened.count("ModelNew") == 1


def test_a_workload_on_which_the_reference_fails_is_named(evaluate: Evaluate) -> None:
    broken = PROBLEM.replace("return x * 2", "assert len(x) < 20\n        return x * 2")
    with pytest.raises(ProblemError, match="on workload rows=40: the reference of L1/01_test fails"):
        evaluate(plain("return x"), problem=broken + TWO)


@pytest.mark.parametrize(
    ("line", "forward", "rule"),
    [
        ("DETERMINISTIC = True", "return x * 2 + 1 + torch.rand(1) * 1e-6", "not_deterministic"),
        ("DETERMINISTIC = True", "return x * 2 + 1", ""),
        ("INPUTS_MAY_CHANGE = True", "return x.mul_(2).add_(1)", ""),
        ("INPUTS_MAY_CHANGE = False", "return x.mul_(2).add_(1)", "input_mutation"),
    ],
)
def test_what_a_problem_declares_of_answers_is_held(evaluate: Evaluate, line: str, forward: str, rule: str) -> None:
    verdict = evaluate(plain(forward), problem=f"{PROBLEM}{line}\n").verdict
    assert (verdict.rule, verdict.fault is Fault.OK) == (rule, not rule)


def test_a_forbidden_operator_is_found_and_named(judged: Evaluate) -> None:
    doubled = elementwise("x[i] + 1").replace("self.kernel(x, y,", "self.kernel(torch.mul(x, 2), y,")
    assert judged(doubled, PROBLEM).verdict.fault is Fault.OK
    verdict = judged(doubled, PROBLEM + 'FORBIDDEN = ["mul"]\n').verdict
    assert (verdict.rule, "aten::mul" in verdict.message) == ("forbidden_operator", True)


def test_inputs_outside_of_what_is_declared_are_the_problems_fault(evaluate: Evaluate) -> None:
    with pytest.raises(ProblemError, match="INPUT_DOMAINS promises 0"):
        evaluate(plain("return x * 2 + 1"), problem=PROBLEM + 'INPUT_DOMAINS = {"x": (0.0, None)}\n')


SOFTMAX = PROBLEM.replace("return x * 2 + self.shift", "return torch.softmax(x * 2, -1)")
BY_OWN = elementwise("2 * x[i]").replace("return y", "return torch.softmax(y, -1)")
COPIED = elementwise("x[i]").replace(
    "def forward(self, x):", "def forward(self, x):\n        x = torch.softmax(x * 2, -1)"
)


def test_a_workload_with_one_answer_is_checked_and_the_others_prove_and_are_timed(judged: Evaluate) -> None:
    rows = 'WORKLOADS = [{"shape": {"rows": 1, "cols": 1}}, {"shape": {"cols": 33}}]\n'
    report = judged(BY_OWN, SOFTMAX + rows)
    assert report.verdict.fault is Fault.OK, report.verdict
    assert names(report) == {"rows=1 cols=1": "ok", "cols=33": "ok"}
    assert report.timing is not None
    assert [one.name for one in report.timing.workloads] == ["cols=33"]
    copied = judged(COPIED, SOFTMAX + rows).verdict
    assert (copied.rule, copied.message.partition(": ")[0]) == ("decoy_kernel", "on workload cols=33")


@pytest.mark.parametrize("rows", ["", 'WORKLOADS = [{"name": "a"}, {"name": "b"}]\n'])
def test_where_all_inputs_have_one_answer_nothing_is_proven_and_nobody_accused(judged: Evaluate, rows: str) -> None:
    one = SOFTMAX.replace("rows=16, cols=33", "rows=1, cols=1")
    verdict = judged(BY_OWN, one + rows).verdict
    assert verdict.fault is Fault.UNPROVEN
    assert "all inputs have the same" in verdict.message


def test_who_is_watched_has_its_kernels_on_every_workload(built_and_judged: Callable[..., Verdict]) -> None:
    """Its proof switches them off in the process that it was judged in."""
    rows = f"WORKLOADS = {[{'shape': {'rows': n}} for n in (4, 5, 6)]}\n"
    verdict = built_and_judged(RIGHT, PROBLEM + rows, replay=False)
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED), verdict
