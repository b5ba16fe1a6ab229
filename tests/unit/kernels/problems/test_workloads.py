"""A problem's workloads: rows and what is refused, input groups, secret tails, and each as a problem."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, cast

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import load_file, parse_problem
from kbrl_async.kernels.problems.cases import cases, named
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.kernels.problems.sources.folder import load_folder
from kbrl_async.kernels.problems.workloads import MOST, tails
from protocols.records import Problem

BASE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor

def get_inputs(rows=4, cols=8):
    return [torch.randn(rows, cols)]

def long_inputs():
    return [torch.randn(2, 99)]

def get_init_inputs():
    return []
"""


def problem(*lines: str, base: str = BASE) -> Problem:
    return parse_problem(base + "\n".join(lines) + "\n", "L1/01_a", origin="a.py")


def shapes(found: Problem, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Of the first input of each workload, by running it as whoever takes a problem does."""
    made = {}
    for bound in cases(found, random.Random(seed)):
        scope: dict[str, Any] = {}
        exec(bound.problem.source, scope)
        shared: dict[str, Any] = {}
        exec(bound.module.source, shared)
        exec(bound.inputs, shared)
        alone, together = scope["get_inputs"]()[0], shared["get_inputs"]()[0]
        assert (alone.shape, alone.dtype) == (together.shape, together.dtype)
        made[bound.workload.name] = tuple(alone.shape)
        assert cases(bound.problem, random.Random(0)) == ()
    return made


def test_a_problem_without_a_table_is_its_own_only_workload() -> None:
    assert cases(problem(), random.Random(0)) == ()
    assert [workload.name for workload in named(problem())] == ["nominal"]


def test_rows_give_shapes_makers_weights_and_names() -> None:
    found = problem(
        'WORKLOADS = [{"shape": {"rows": 3}, "weight": 5}, {"name": "long",'
        ' "inputs": "long_inputs", "role": "checked"}]'
    )
    assert shapes(found) == {"rows=3": (3, 8), "long": (2, 99)}
    assert [(one.weight, one.role, one.is_timed) for one in named(found)] == [
        (5.0, "both", True),
        (1.0, "checked", False),
    ]


def test_arguments_and_dtypes_make_other_modules() -> None:
    found = problem('WORKLOADS = [{"name": "a"}, {"name": "b", "init": [3.0], "dtype": "bfloat16"}, {"name": "c"}]')
    first, second, third = cases(found, random.Random(0))
    assert first.workload.arguments == third.workload.arguments != second.workload.arguments
    scope: dict[str, Any] = {}
    exec(second.problem.source, scope)
    assert scope["get_init_inputs"]() == [3.0]
    assert str(scope["get_inputs"]()[0].dtype) == "torch.bfloat16"


def test_input_groups_are_workloads_until_there_is_no_more() -> None:
    base = BASE.replace("def get_inputs(rows=4, cols=8):\n    return [torch.randn(rows, cols)]", "")
    groups = "def get_input_groups():\n    return [[torch.randn(n, 5)] for n in (2, 3)]\n"
    found = problem(base=base + groups)
    bounds = cases(found, random.Random(0))
    made = []
    for bound in bounds[:3]:
        scope: dict[str, Any] = {}
        exec(bound.problem.source, scope)
        try:
            made.append(tuple(scope["get_inputs"]()[0].shape))
        except LookupError as error:
            made.append((str(error),))
    assert made == [(2, 5), (3, 5), ("there is no input group 2",)]


def test_precision_reaches_every_workload() -> None:
    found = in_precision(problem('WORKLOADS = [{"shape": {"rows": 3}}, {"shape": {"rows": 5}}]'), "fp16")
    assert {one.dtype for one in named(found)} == {"float16"}
    assert shapes(found) == {"rows=3": (3, 8), "rows=5": (5, 8)}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('WORKLOADS = [{"shapes": {"rows": 3}}]', "unknown key 'shapes'"),
        ('WORKLOADS = [{"shape": {"row": 3}}]', "get_inputs has no such argument, but rows, cols"),
        ('WORKLOADS = [{"name": "a"}, {"name": "a"}]', "two workloads are called 'a'"),
        ('WORKLOADS = [{"inputs": "others"}]', "no such function"),
        ('WORKLOADS = [{"weight": 0}]', "a number above 0"),
        ('WORKLOADS = [{"weight": True}]', "a number above 0"),
        ('WORKLOADS = [{"weight": 1e999}]', "a number above 0"),
        ('WORKLOADS = [{"role": "timed once"}]', "choose both, checked, timed"),
        ('WORKLOADS = [{"role": "checked"}]', "no workload is timed"),
        ('WORKLOADS = [{"dtype": "float8"}]', "choose float32"),
        ('WORKLOADS = [{"shape": {"rows": 1e999}}]', "a number, truth value or text"),
        ('WORKLOADS = [{"shape": {"rows": [1]}}]', "a number, truth value or text"),
        ('WORKLOADS = [{"init": 3}]', "a list of constructor arguments"),
        ('WORKLOADS = [{"name": "a\\nb"}]', "printable"),
        ("WORKLOADS = [1]", "no mapping"),
        (f"WORKLOADS = [{', '.join(['{}'] * (MOST + 1))}]", f"at most {MOST}"),
        ('WORKLOADS = [{"shape": {"rows": __import__("os").getpid()}}]', "WORKLOADS can't be read"),
        (f"WORKLOADS = {'[' * 90}{']' * 90}", "WORKLOADS can't be read"),
        ('FREE_SHAPES = {"depth": (1, 2)}', "get_inputs has no argument 'depth'"),
        ('FREE_SHAPES = {"rows": (5, 2)}', "no range of sizes"),
        ("WORKLOAD = []", "WORKLOADS is meant"),
        ('TOLERANCE = {"float32": 1e-3}', "TOLERANCES is meant"),
    ],
)
def test_a_hostile_or_misspelt_row_is_refused_by_name(line: str, what: str) -> None:
    with pytest.raises(ProblemError, match=what):
        problem(line)


def test_a_constant_of_the_problems_own_is_no_slip() -> None:
    problem("TOLERANCE = 3", "print(TOLERANCE)")


def test_tails_are_secret_and_at_the_edges() -> None:
    free = {"rows": (0, 4096), "cols": (1, 512)}
    drawn = [tails(free, "get_inputs", random.Random(seed)) for seed in range(50)]
    assert len({tuple(workload.name for workload in one) for one in drawn}) > 40
    first, odd, prime, empty = drawn[0]
    assert first.shape == {"rows": 1, "cols": 1}
    assert all(int(value) % 2 for value in odd.shape.values())
    assert all(n > 1 and all(n % d for d in range(2, n)) for n in map(int, prime.shape.values()))
    assert 0 in empty.shape.values()
    assert all(one.role == "checked" and one.is_tail for one in drawn[0])
    for one in (workload for found in drawn for workload in found):
        assert 0 <= one.shape["rows"] <= 4096
        assert 1 <= one.shape["cols"] <= 512
    assert tails({}, "get_inputs", random.Random(0)) == ()
    assert [one.shape for one in tails({"rows": (3, 3)}, "get_inputs", random.Random(0))] == [{"rows": 3}]


def test_a_table_may_use_the_names_of_the_files_sizes() -> None:
    found = problem("few = 3  # gpu: 30", 'WORKLOADS = [{"shape": {"rows": few}}]')
    assert shapes(found) == {"rows=3": (3, 8)}
    large = parse_problem(found.source, "L1/01_a", shapes="gpu")
    assert [workload.shape for workload in named(large)] == [{"rows": 3}]
    raw = BASE + 'few = 3  # gpu: 30\nWORKLOADS = [{"shape": {"rows": few}}]\n'
    assert [workload.shape for workload in named(parse_problem(raw, "L1/01_a", shapes="gpu"))] == [{"rows": 30}]


@pytest.mark.parametrize("name", ["01_a.yaml", "01_a.json", "problem.yaml"])
def test_a_file_beside_says_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / "01_a.py").write_text(BASE)
    (tmp_path / name).write_text('{"workloads": [{"shape": {"rows": 3}}], "license": "MIT"}')
    found = load_file(tmp_path / "01_a.py")
    assert shapes(found) == {"rows=3": (3, 8)}
    assert declared(found.source).license == "MIT"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("workload: []", r"01_a\.yaml has the unknown key 'workload'; workloads is meant"),
        ("colour: red", "unknown key 'colour'; known are input_domains"),
        ("WORKLOADS: []", "unknown key 'WORKLOADS'"),
        ("workload_is_bound: true", "unknown key"),
        ("- 1", "holds no keys"),
        ("a: [", "does not parse"),
        ("workloads: [{shape: {row: 3}}]", "has no such argument"),
        ("tolerances: !!python/object/apply:os.getpid []", "does not parse"),
    ],
)
def test_a_key_beside_that_is_unknown_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "01_a.py").write_text(BASE)
    (tmp_path / "01_a.yaml").write_text(text)
    with pytest.raises(ProblemError, match=what):
        load_file(tmp_path / "01_a.py")


def test_data_beside_a_problem_is_its_own_business(tmp_path: Path) -> None:
    (tmp_path / "01_a.py").write_text(BASE)
    (tmp_path / "01_a.json").write_text('{"inputs": []}\n{"inputs": []}\n')
    assert cases(load_file(tmp_path / "01_a.py"), random.Random(0)) == ()


def test_many_problems_are_read_without_a_look_at_all_others_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = tmp_path / "level1", list[object]()
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02d}_add.py").write_text(BASE)
    scandir = os.scandir

    def counted(path: object) -> object:
        looks.append(path)
        return scandir(cast(Any, path))

    monkeypatch.setattr(os, "scandir", counted)
    assert len(load_folder(tmp_path)) == 20
    assert len(looks) < 20
