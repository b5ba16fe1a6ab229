"""What is held out where a source does not say: a seeded share of each level."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.cli import preflight
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.split import HELDOUT, Split, family_of, held_out_kinds, with_split
from kbrl_async.runs.config import load
from kbrl_async.runs.planning import plan_of
from protocols.records import Problem
from tests.unit.kernels.problems.test_sources import CONTRACT

FAMILY = """import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.{what}(x)
"""


def problems(count: int = 30, level: int = 1) -> list[Problem]:
    return [Problem(f"L{level}/{n}_p", level, f"{n}_p", "") for n in range(count)]


def held(found: list[Problem]) -> set[str]:
    return {problem.problem_id for problem in found if problem.split == HELDOUT}


def test_a_share_of_each_level_is_held_out_and_the_seed_chooses_which() -> None:
    both = [*problems(30, 1), *problems(20, 2)]
    first = held(with_split(both, Split(0.1)))
    assert sorted(id_[:2] for id_ in first) == ["L1"] * 3 + ["L2"] * 2
    assert first == held(with_split(both[::-1], Split(0.1))) != held(with_split(both, Split(0.1, seed=1)))
    assert held(with_split(both[:30], Split(0.1))) == {id_ for id_ in first if id_.startswith("L1")}


def test_problems_of_one_family_stay_together_unless_asked_otherwise() -> None:
    def computing(what: str, number: int) -> Problem:
        return Problem(f"L1/{number}_p", 1, f"{number}_p", FAMILY.format(what=what))

    names = ["relu", "tanh", "sin", "cos", "exp", "erf", "abs", "sqrt", "neg", "floor"]
    found = [computing(name, 10 * place + copy) for place, name in enumerate(names) for copy in range(2)]
    assert len({family_of(one) for one in found}) == len(names)
    for seed in range(10):
        ids = sorted(held(with_split(found, Split(0.1, seed))))
        assert len(ids) == 2
        assert int(ids[0][3:-2]) // 10 == int(ids[1][3:-2]) // 10
    singles = [held(with_split(found, Split(0.1, seed, "kevin"))) for seed in range(10)]
    assert all(len(ids) == 2 for ids in singles)
    assert any(len({id_[3] for id_ in ids}) == 2 for ids in singles)
    assert not held(with_split(with_split(found, Split(0.1)), Split(kind="none")))


def test_a_source_that_marks_problems_is_left_as_it_is() -> None:
    marked = [Problem("L1/own", 1, "own", "", split=HELDOUT), *problems()]
    assert with_split(marked, Split(0.5)) == marked


def test_of_few_problems_none_is_held_out() -> None:
    assert not held(with_split(problems(9), Split(0.1)))


def kernelbench(folder: Path, count: int) -> Path:
    level = folder / "KernelBench/level1"
    level.mkdir(parents=True)
    for number in range(1, count + 1):
        (level / f"{number}_p.py").write_text(CONTRACT)
    return folder


def test_a_run_on_kernelbench_evaluates_what_it_never_trains_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERNELBENCH_ROOT", str(kernelbench(tmp_path, 20)))
    config = load(overrides=["problems=kernelbench", "level=1"])
    plan = plan_of(config)
    assert (len(plan.heldout), len(plan.training)) == (2, 18)
    assert {p.problem_id for p in plan.heldout} == held(load_problems("kernelbench"))
    preflight.check_problems(config)
    assert "2 of 20 problems are held out" in capsys.readouterr().err
    preflight.check_problems(load(overrides=["problems=kernelbench", "level=1", "heldout_share=0"]))
    assert "nothing of kernelbench is held out" in capsys.readouterr().err


def test_our_own_suite_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check_problems(load())
    assert capsys.readouterr().err == ""


def test_a_held_out_problem_is_an_instance_where_its_family_is_trained_on() -> None:
    module = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return {}\n"
    does = {
        "L1/a": ("train", "torch.relu(torch.exp(x))"),
        "L1/b": ("heldout", "torch.exp(torch.relu(x) * 2)"),
        "L2/c": ("heldout", "torch.tanh(x)"),
        "L2/d": ("heldout", "torch.tanh(x) * 3"),
    }
    problems = [
        Problem(name, int(name[1]), name, module.format(text), split=split) for name, (split, text) in does.items()
    ]
    assert held_out_kinds(problems) == {"L1/b": "instance", "L2/c": "family", "L2/d": "family"}
