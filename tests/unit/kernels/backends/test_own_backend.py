"""A backend of a user's own, in a file outside of the package: named in a setting, built, verified, told in prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.runs.config import load
from protocols.records import Fault
from tests.candidates import affine, elementwise

NAME = "own_backend_of_a_user:BACKEND"
FILE = '''
"""C, whose files have to say who wrote them."""
import pathlib
from kbrl_async.kernels.backends import Backend
from kbrl_async.kernels.backends.c.build import BACKEND as C
from protocols.records import BuildReport, Fault

class Signed(Backend):
    name = "own_backend_of_a_user:BACKEND"
    contracts = {"": "Sign your kernels: {source}"}

    def check(self, candidate):
        if "# by me" not in candidate.source:
            return BuildReport(Fault.STATIC_VIOLATION, message="who wrote this?", rule="unsigned")
        return C.check(candidate)

    def build(self, candidate, problem, context):
        return C.build(candidate, problem, context)

    def prepare(self, artifacts, device):
        C.prepare(artifacts, device)

BACKEND = Signed()
'''


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_backend_of_a_user.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_backend_of_a_user", raising=False)


def test_its_candidates_are_checked_built_and_verified() -> None:
    problem = parse_problem(affine(), "L1/01_double")
    with Verifier("cpu", VerifyOptions(timing=False)) as verifier:
        right = verifier.verify(problem, "# by me\n" + elementwise("2 * x[i] + 1"), NAME)
        wrong = verifier.verify(problem, "# by me\n" + elementwise("3 * x[i] + 1"), NAME)
        unsigned = verifier.verify(problem, elementwise("2 * x[i] + 1"), NAME)
    assert (right.fault, wrong.fault) == (Fault.OK, Fault.INCORRECT)
    assert (unsigned.fault, unsigned.verdict.rule) == (Fault.STATIC_VIOLATION, "unsigned")


def test_a_run_takes_its_name_and_a_prompt_its_contract() -> None:
    assert load(overrides=[f"backend={NAME}"]).backend == NAME
    problem = parse_problem(affine(), "L1/01_double")
    assert render_prompt("zero_shot", problem, NAME) == f"Sign your kernels: {problem.source}"


def test_a_name_that_is_nothing_or_no_backend_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean triton"):
        load(overrides=["backend=tritn"])
    with pytest.raises(ConfigError, match="is no backend"):
        backend("os:sep")
