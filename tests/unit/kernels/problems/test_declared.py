"""What a problem declares beside its code: read without running it, and named where it can't be."""

from __future__ import annotations

import math

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.problems.declared import Declared, declared
from tests.candidates import affine

_SAID = """
INPUT_DOMAINS = {"x": (None, 0.0)}
FIXED_INPUTS = [1]
TOLERANCES = {"bfloat16": 2e-2, "float32": (1e-5, 1e-6)}
"""


def test_domains_fixed_inputs_and_tolerances_are_read() -> None:
    found = declared(affine() + _SAID)
    assert found.domains == {0: (-math.inf, 0.0)}
    assert found.fixed == {1}
    assert found.tolerances == {"bfloat16": (2e-2, 2e-2), "float32": (1e-5, 1e-6)}
    assert declared(affine()) == Declared()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('INPUT_DOMAINS = {"z": (0, 1)}', "no argument 'z'"),
        ('INPUT_DOMAINS = {"x": (1, 0)}', "no values between"),
        ("INPUT_DOMAINS = make()", "INPUT_DOMAINS can't be read"),
        ('TOLERANCES = {"float32": -1}', "no tolerance"),
        ("FIXED_INPUTS = 3", "FIXED_INPUTS can't be read"),
    ],
)
def test_what_can_not_be_read_is_the_problems_fault_with_its_line(line: str, what: str) -> None:
    text = affine() + line + "\n"
    with pytest.raises(ProblemError, match=what) as raised:
        parse_problem(text, "L1/01_a", origin="a.py")
    assert f"a.py:{len(text.splitlines())}" in str(raised.value)
