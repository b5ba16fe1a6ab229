"""A value model orders kernels that nobody has judged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kbrl_async.errors import UserError
from kbrl_async.lab.optimize.search import Chooser, Search, SearchOptions
from kbrl_async.lab.optimize.tree import Judgement
from kbrl_async.runs.value import LEAST_PAIRS, ChanceModel, JudgedKernel, ValueModel, chances_of, judged_in, pairs_of
from protocols.records import Fault

MODULE = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.{}(x)\n"


def kernel(operation: str, number: int) -> str:
    return f"void run(float* x, int n{number}) {{ x[{number}] = {operation}(x[{number}]); }}"


def judged(module: str, operation: str, number: int) -> JudgedKernel:
    """Right where the kernel does what the module does."""
    return JudgedKernel(MODULE.format(module), kernel(operation, number), (float(module == operation), 0.0, 0.0))


KERNELS = [judged(m, o, n) for m in ("sin", "cos") for o in ("sin", "cos") for n in range(12)]


def test_what_is_better_depends_on_the_module() -> None:
    model = ValueModel().fit(KERNELS)
    for module, other in (("sin", "cos"), ("cos", "sin")):
        right, wrong = (model.value(MODULE.format(module), kernel(o, 99)) for o in (module, other))
        assert right > wrong


def test_pairs_are_of_one_problem_and_never_of_equals() -> None:
    found = pairs_of([*KERNELS, *KERNELS])
    assert len(found) >= LEAST_PAIRS
    assert all(a.module == b.module and a.worth > b.worth for a, b in found)


def test_too_few_pairs_and_a_folder_without_an_archive_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs 20 pairs"):
        ValueModel().fit(KERNELS[:1])
    with pytest.raises(UserError, match="has no archive"):
        judged_in([tmp_path])


def test_the_chance_of_a_right_kernel_is_the_larger_one_whatever_its_module() -> None:
    model = ChanceModel().fit(KERNELS)
    chances = {(m, o): model.chance(MODULE.format(m), kernel(o, 99)) for m in ("sin", "cos") for o in ("sin", "cos")}
    right, wrong = ([chance for (m, o), chance in chances.items() if (m == o) is same] for same in (True, False))
    assert 0 <= max(wrong) < 0.5 < min(right) <= 1


def test_what_is_likely_needs_right_and_wrong_kernels() -> None:
    assert chances_of([]) is None
    with pytest.raises(UserError, match="can't be learned from 0 right and 24 wrong"):
        ChanceModel().fit([one for one in KERNELS if not one.worth[0]])


def test_the_model_chooses_what_is_refined_among_equals_and_no_more() -> None:
    wrong = Judgement(Fault.INCORRECT, "mismatch", passed=1, total=10)
    options = SearchOptions(max_turns=1, value=lambda source: float(source == "b"))
    search = Search(options, random.Random(0), 0.0)
    for source in ("a", "b", "c"):
        asked = search.ask(0.0)
        assert asked is not None
        search.wrote(asked.number, source, 1)
        search.judged(asked.number, Judgement(Fault.OK, "slow", lo=0.1) if source == "c" else wrong)
    chooser = Chooser(random.Random(0), value=search.options.value)
    worth = {a.source: chooser.worth(a, search.tree) for a in search.tree}
    assert worth["b"] > worth["a"]
    assert worth["b"] - worth["a"] < 1e-5, "a verdict weighs more than any opinion"
