"""The example in each backend's contract is a candidate that this backend takes."""

from __future__ import annotations

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import backend, backends, guess_backend
from kbrl_async.rollouts.prompts import extract, render_prompt
from protocols.records import Candidate
from tests.suite import suite

CONTRACTS = [f"{name} {kind}".strip() for name in backends() for kind in backend(name).contracts]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_example_of_a_contract_is_extracted_recognised_and_passes_the_static_checks(contract: str) -> None:
    problem = suite()[0]
    prompt = render_prompt("zero_shot", problem, contract)
    assert problem.source in prompt
    example = extract(prompt.partition("The module to replace:")[0]).source
    name = contract.split()[0]
    assert guess_backend(example) == name
    assert backend(name).check(Candidate(example, name)) is None


def test_every_backend_has_a_contract() -> None:
    assert {contract.split()[0] for contract in CONTRACTS} == set(backends())


def test_an_unknown_contract_is_named() -> None:
    with pytest.raises(ConfigError, match="none of the backends is called 'cute'"):
        render_prompt("zero_shot", suite()[0], "cute")
