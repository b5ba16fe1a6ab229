"""Each refusal of the bench says which line of the candidate it is about."""

from __future__ import annotations

import re

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.syntax.where import place
from kbrl_async.kernels.verify.report import MAX_TEXT, placed
from protocols.records import Candidate, Fault, Verdict
from tests.candidates import elementwise
from tests.unit.kernels.verify.test_rules import rules

CANDIDATE = """
import torch

class Helper(torch.nn.Module):
    def forward(self, x):
        return x

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        if x.numel() == 7:
            return y
        self.kept = torch.empty_like(x)
        z = torch.softmax(x, 1)
        with torch.cuda.stream(self.side):
            kernel[(1,)](x, self.kept)
        x.add_(1)
        return z @ y
"""
FLAGGED = """
import torch
from torch.utils.cpp_extension import load_inline
e = load_inline("e", cpp_sources="int f() { return 1; }", functions=["f"], extra_cflags=["-fplugin=x.so"])
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return e.f()
"""
LINES = {
    "": 11,
    "shape": 11,
    "output_overwritten": 11,
    "phase": 10,
    "state_carried": 12,
    "no_own_kernel": 13,
    "decoy_kernel": 13,
    "side_stream": 14,
    "stray_write": 15,
    "timeout": 15,
    "input_mutation": 16,
}


@pytest.mark.parametrize("rule", LINES)
def test_the_line_is_that_of_the_rule(rule: str) -> None:
    assert place(CANDIDATE, rule, "").startswith(f"line {LINES[rule]}: `")


def test_a_forbidden_operator_is_looked_for_by_its_name() -> None:
    assert place(CANDIDATE, "forbidden_operator", "the problem forbids empty_like").startswith("line 12: ")


@pytest.mark.parametrize("rule", sorted(rules()))
def test_every_rule_has_a_line(rule: str) -> None:
    verdict = placed(Verdict(Fault.INCORRECT, message="it was seen", rule=rule), CANDIDATE)
    assert verdict.message.startswith("it was seen (line ")


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (FLAGGED, "flag"),
        (elementwise("other(x[i])", before="float other(float);"), "foreign_call"),
        (CANDIDATE, "no_kernel"),
    ],
)
def test_every_rule_of_the_build_has_a_line_and_a_cure(source: str, rule: str, builder: Builder) -> None:
    report = builder.build(Candidate(source, "cpp" if rule == "flag" else "c"))
    assert report.rule == rule
    assert re.search(r"line \d+", report.message)
    assert report.hint


def test_a_line_that_is_named_stays_the_only_one() -> None:
    verdict = Verdict(Fault.RUNTIME_ERROR, message="line 3, in forward: no")
    assert placed(verdict, CANDIDATE) == verdict


def test_what_is_right_or_has_no_forward_gets_none() -> None:
    assert placed(Verdict(Fault.OK), CANDIDATE).message == ""
    for source in ("x = 1", "def f(:", "class ModelNew:\n    pass"):
        assert placed(Verdict(Fault.TIMEOUT, message="slow"), source).message == "slow"


@pytest.mark.parametrize("end", ["\r", "\r\n", "\x0c\n", "\u2028\n", "\x1c\n"])
def test_lines_are_counted_as_the_parser_counts_them(end: str) -> None:
    source = end.join(
        ["import torch", "# a line", "class ModelNew:", "    def forward(self, x):", "        return x", ""]
    )
    assert place(source, "shape", "") in ("line 5: `return x`", "")


def test_a_source_of_great_depth_ends_nothing() -> None:
    deep = "x" + ".a" * 20_000
    assert placed(Verdict(Fault.TIMEOUT, message="slow"), CANDIDATE.replace("return y", f"return {deep}()")).message


def test_a_long_message_keeps_its_line_and_its_bound() -> None:
    source = CANDIDATE.replace("return y", f"return '\x1b{'long' * 99}'")
    told = placed(Verdict(Fault.INCORRECT, message="x" * MAX_TEXT), source)
    assert len(told.message) <= MAX_TEXT
    assert "(line " in told.message
    assert "\x1b" not in told.message
