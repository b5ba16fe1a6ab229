"""A proposer stays one line away from what a policy solves at times."""

from __future__ import annotations

import pytest

from kbrl_async.errors import UserError
from kbrl_async.kernels.generator import chain_of
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.lab.edge import Chain, Parent, propose
from tests.suite import suite

SUITE = {problem.problem_id: problem for problem in suite(1, 2)}
TANH, SOFTPLUS, LINEAR = (
    SUITE[f"L2/{n}"].source for n in ("01_scale_tanh_shift", "07_abs_scale_softplus", "18_linear_relu")
)
PARENTS = [Parent(TANH, 0.5), Parent(SOFTPLUS, 0.4), Parent(LINEAR, 0.3)]


def test_every_proposal_is_a_problem_of_known_lines_that_nobody_has_met() -> None:
    known = {line for parent in PARENTS for line in parent.source.splitlines()}
    chains = [chain_of(parent.source) for parent in PARENTS]
    found = propose(PARENTS, 20, seed=3)
    assert len({drawn.chain for drawn in found}) == 20
    for drawn in found:
        parse_problem(drawn.source, "L0/near")
        assert set(drawn.source.splitlines()) <= known
        assert drawn.chain not in chains
        assert drawn.chain == chain_of(drawn.source)


def test_the_same_seed_proposes_the_same_and_nothing_that_is_held_out() -> None:
    first = propose(PARENTS, 5, seed=1)
    assert propose(PARENTS, 5, seed=1) == first
    heldout = parse_problem(first[0].source, "L2/held")
    assert first[0].chain not in [drawn.chain for drawn in propose(PARENTS, 5, seed=1, avoid=[heldout])]


def test_lines_come_from_problems_that_were_solved_only() -> None:
    never = [*PARENTS[:2], Parent(LINEAR, 0.0)]
    assert not any("linear" in drawn.source for drawn in propose(never, 20, seed=2))
    with pytest.raises(UserError, match="solved no problem"):
        propose([Parent(TANH, 0.0)], 1, seed=0)
    with pytest.raises(UserError, match="so near"):
        propose(PARENTS[:1], 1_000, seed=0)


@pytest.mark.parametrize(
    "body",
    ["y = x * 2\n        return y + 1", "if x.sum() > 0:\n            x = -x\n        return x", "return x * 2",
     "x = torch.tanh(\n            x)\n        return x"],
)  # fmt: skip
def test_what_is_no_row_of_lines_is_no_parent(body: str) -> None:
    assert Chain.of(f"class Model:\n    def forward(self, x):\n        {body}\n") is None
