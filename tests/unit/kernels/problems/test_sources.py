"""Where problems come from besides the suite: KERNELBENCH_ROOT, checkouts, the hub, task files; and their precision."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbrl_async.errors import MissingTool, ProblemError, UserError
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.contract import parse_problem
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.kernels.problems.sources.tasks import load_tasks, task_problem

CONTRACT = """import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width=4):
        super(Model, self).__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, index):
        return self.linear(x)[index]

def get_inputs():
    return [torch.randn(2, 4), torch.tensor([0])]

def get_init_inputs():
    return [4]
"""


def checkout(folder: Path) -> Path:
    place = folder / "KernelBench" / "level2"
    place.mkdir(parents=True)
    (place / "3_c.py").write_text(CONTRACT)
    return folder


def test_kernelbench_is_where_the_variable_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBENCH_ROOT", str(checkout(tmp_path)))
    assert [p.problem_id for p in load_problems("kernelbench")] == ["L2/3_c"]
    monkeypatch.delenv("KERNELBENCH_ROOT")
    with pytest.raises(ProblemError, match="KERNELBENCH_ROOT"):
        load_problems("kernelbench")


def test_a_checkout_beside_us_is_found_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checkout(tmp_path / "KernelBench")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("KERNELBENCH_ROOT", "")  # and put back afterwards
    for _ in range(2):
        assert [p.problem_id for p in load_problems("kernelbench")] == ["L2/3_c"]
    assert capsys.readouterr().err == f"KernelBench: found in {found}; KERNELBENCH_ROOT names another one\n"
    assert os.environ["KERNELBENCH_ROOT"] == str(found), "processes that we start take the same"


def test_a_checkout_is_as_good_as_its_folder_of_problems(tmp_path: Path) -> None:
    checkout(tmp_path)
    assert load_problems(str(tmp_path)) == load_problems(str(tmp_path / "KernelBench"))


def test_an_empty_level_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="It has level 2"):
        load_problems(str(checkout(tmp_path)), levels=[7])


class TestHub:
    ROWS = (
        {"code": CONTRACT, "level": 1, "name": "10_j", "problem_id": 10},
        {"code": CONTRACT, "level": 1, "name": "b"},
    )

    def fake(self, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))

    def test_rows_become_problems_as_the_repository_names_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [{"code": CONTRACT, "name": "x.py", "problem_id": 2}]
        self.fake(monkeypatch, lambda _name: {"level_1": self.ROWS, "level_2": rows})
        assert [p.problem_id for p in load_problems("owner/name")] == ["L1/b", "L1/10_j", "L2/2_x"]

    def test_without_a_network_it_says_so_and_what_else_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(_name: str) -> Any:
            raise ConnectionError("Couldn't reach the Hub\nlong story")

        self.fake(monkeypatch, offline)
        with pytest.raises(ProblemError, match=r"Couldn't reach the Hub\. .*KERNELBENCH_ROOT"):
            load_problems("owner/name")

    def test_without_the_library_it_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingTool, match="datasets is not installed"):
            load_problems("owner/name")

    def test_other_columns_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake(monkeypatch, lambda _name: {"train": [{"text": "x"}]})
        with pytest.raises(ProblemError, match="rows without code"):
            load_problems("owner/name")


def task(**fields: Any) -> dict[str, Any]:
    return {"id": "t", "instruction": "Fuse it.", "pytorch_code": CONTRACT, "difficulty": "hard", **fields}


def executed(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "problem"}
    exec(compile(source, "problem.py", "exec"), namespace)
    return namespace


def test_a_task_with_the_whole_contract_is_taken_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task()) + "\n\n" + json.dumps(task(id="u v", difficulty=3, level=2)) + "\n")
    one, two = load_problems(str(path))
    assert (one.problem_id, one.level, one.difficulty) == ("L1/t", 1, 0.8)
    assert (two.problem_id, two.level, two.difficulty) == ("L2/u_v", 2, 0.3)
    assert one.source == "# Fuse it.\n" + CONTRACT


_TWO = (
    "class Half(nn.Module):\n    def forward(self, x):\n        return x.half()\n"
    "class Net(nn.Module):\n    def forward(self, x):\n        return x[:1]\n"
)


@pytest.mark.parametrize(
    ("code", "inputs", "result"),
    [
        ("def fused(x, w):\n    return torch.relu(x @ w)", [[2, 3], [3, 4]], (2, 4)),
        ("def fused(x, w):\n    return torch.relu(x @ w)", {"x": [2, 3], "w": {"shape": [3, 5]}}, (2, 5)),
        ("import torch\ndef f(x, k):\n    return torch.topk(x, k).values", [{"shape": [2, 9]}, 3], (2, 3)),
        ("def pick(table, i):\n    return table[i]", [[9, 4], {"shape": [5], "dtype": "int64", "high": 9}], (5, 4)),
        ("def where(m, x):\n    return torch.where(m, x, 0)", [{"shape": [3], "dtype": "bool"}, [3]], (3,)),
        ("class Net(nn.Module):\n    def forward(self, x):\n        return x.half()", [6], (6,)),
        (_TWO + "Model = Half", [6], (6,)),
        ("def f(x):\n    return F.gelu(x)", "[torch.randn(7, 8)]", (7, 8)),
        ("def f(x):\n    return x", "def get_inputs():\n    return [torch.ones(3)]", (3,)),
    ],
)
def test_what_a_task_lacks_of_the_contract_is_written_around_it(
    code: str, inputs: Any, result: tuple[int, ...]
) -> None:
    made = executed(task_problem(task(pytorch_code=code, test_inputs=inputs), 1, "t").source)
    assert made["Model"](*made["get_init_inputs"]())(*made["get_inputs"]()).shape == result


@pytest.mark.parametrize(
    "sets",
    [
        [[[2, 3], [3, 4]], [[5, 3], [3, 6]]],
        [{"x": [2, 3], "w": [3, 4]}, {"x": [5, 3], "w": {"shape": [3, 6]}}],
    ],
)
def test_several_sets_of_inputs_are_workloads(sets: Any) -> None:
    problem = task_problem(task(pytorch_code="def f(x, w):\n    return x @ w", test_inputs=sets), 1, "t")
    made = executed(problem.source)
    assert [tuple(made["Model"]()(*inputs).shape) for inputs in made["get_input_groups"]()] == [(2, 4), (5, 6)]
    assert declared(problem.source).has_groups


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pytorch_code": None}, "no pytorch_code"),
        ({"pytorch_code": "def f(:"}, "does not parse"),
        ({"pytorch_code": "x = 1"}, "no Model, module or function"),
        ({"pytorch_code": "def f(x):\n    return x"}, "nothing about its inputs"),
        ({"pytorch_code": "def f(x):\n    return x", "test_inputs": ["torch"]}, "test_inputs holds 'torch'"),
        ({"pytorch_code": "def f(x):\n    return x", "test_inputs": [[[2]], [["a"]]]}, r"test_inputs holds \['a'\]"),
        ({"pytorch_code": "def f(x):\n    return x", "test_inputs": [{"shape": [2], "dtype": "a);"}]}, "no dtype"),
        ({"pytorch_code": "def f(x):\n    return x", "test_inputs": "import os"}, "does not parse"),
        ({"difficulty": "odd"}, "difficulty 'odd' is unknown"),
        ({"level": "two"}, "no number"),
    ],
)
def test_a_wrong_task_is_named_with_its_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(task(id="fine")) + "\n" + json.dumps(task(**fields)) + "\n")
    with pytest.raises(ProblemError, match=f":2.*{message}"):
        load_tasks(path)


def test_broken_lines_and_double_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for text, message in (
        ("{", "not JSON"),
        (json.dumps(task()) + "\n" + json.dumps(task()), "earlier line"),
        ("", "no task"),
    ):
        path.write_text(text)
        with pytest.raises(ProblemError, match=message):
            load_tasks(path)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_in_half_precision_module_and_real_inputs_are_cast_and_integers_stay(
    precision: str, dtype: torch.dtype
) -> None:
    made = executed(in_precision(parse_problem(CONTRACT, "L1/1_a"), precision).source)
    model = made["Model"](*made["get_init_inputs"]())
    x, index = made["get_inputs"]()
    assert (x.dtype, index.dtype, model.linear.weight.dtype, model.steps.dtype) == (
        dtype,
        torch.int64,
        dtype,
        torch.int64,
    )
    assert model(x, index).dtype == dtype


def test_fp32_leaves_a_problem_alone_and_other_formats_are_refused() -> None:
    problem = parse_problem(CONTRACT, "L1/1_a")
    assert in_precision(problem, "fp32") is problem
    with pytest.raises(ProblemError, match="fp32, fp16, bf16"):
        in_precision(problem, "fp8")


def test_loaded_problems_are_in_the_asked_precision(tmp_path: Path) -> None:
    checkout(tmp_path)
    (plain,), (half,) = load_problems(str(tmp_path)), load_problems(str(tmp_path), precision="bf16")
    assert half.source.startswith(plain.source.rstrip())
    assert "bfloat16" in half.source


OWN = """
from pathlib import Path
from kbrl_async.kernels.problems import parse_problem

SOURCE = "SIZE = 2  # gpu: 4\\nclass Model: ...\\ndef get_inputs(): return [SIZE]\\ndef get_init_inputs(): return []\\n"

def problems(shapes):
    return [parse_problem(SOURCE, "L3/own", level=3, shapes=shapes)]

def folder(shapes):
    return Path(__file__).parent / "files"

def nothing(shapes):
    return []
"""


def test_a_users_own_source_gives_problems_or_says_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_problems_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = "own_problems_of_a_user"
    (problem,) = load_problems(f"{own}:problems", shapes="gpu", levels=[3])
    assert (problem.problem_id, "SIZE = 4" in problem.source) == ("L3/own", True)
    (tmp_path / "files" / "level2").mkdir(parents=True)
    (tmp_path / "files" / "level2" / "1_a.py").write_text(problem.source)
    assert [p.problem_id for p in load_problems(f"{own}:folder")] == ["L2/1_a"]
    with pytest.raises(ProblemError, match="gave no problems"):
        load_problems(f"{own}:nothing")
    with pytest.raises(UserError, match="can't be imported"):
        load_problems(f"{own}:missing")


@pytest.mark.parametrize(
    ("difficulty", "level", "share"), [(1, 1, 0.0), (3, 3, 2 / 3), (4, 4, 1.0), (5, 1, 0.5), (2.0, 1, 0.2)]
)
def test_whole_difficulties_from_1_to_4_are_levels(tmp_path: Path, difficulty: float, level: int, share: float) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task(difficulty=difficulty)))
    (one,) = load_problems(str(path))
    assert (one.level, one.difficulty) == (level, pytest.approx(share))
