"""Problems: the suite, folders, files, and what is said of broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import load_file, load_folder, load_problems, load_suite, parse_problem
from kbrl_async.kernels.problems.cases import described
from kbrl_async.kernels.problems.declared import declared

GOOD = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return x


rows = 4  # gpu: 4096


def get_inputs():
    return [torch.rand(rows)]


def get_init_inputs():
    return []
"""


def test_the_suite_has_a_hundred_problems_of_five_levels_and_a_held_out_part() -> None:
    suite = load_suite()
    assert len(suite) >= 100
    assert {p.level for p in suite} == {1, 2, 3, 4, 5}
    assert all(described(p) for p in suite if p.level == 4)
    assert sum(bool(declared(p.source).backward) for p in suite if p.level == 5) == 12
    assert {p.split for p in suite} == {"train", "heldout"}
    assert len({p.problem_id for p in suite}) == len(suite)


def test_levels_and_split_select() -> None:
    chosen = load_suite(levels=[2], split="heldout")
    assert chosen
    assert all(p.level == 2 and p.split == "heldout" for p in chosen)


def test_a_size_line_gives_the_shape_of_the_device() -> None:
    assert "rows = 4\n" in parse_problem(GOOD, "x").source
    assert "rows = 4096\n" in parse_problem(GOOD, "x", shapes="gpu").source


def test_a_folder_in_the_kernelbench_layout_is_read_in_natural_order(tmp_path: Path) -> None:
    folder = tmp_path / "level2"
    folder.mkdir()
    for name in ("10_b.py", "2_a.py"):
        (folder / name).write_text(GOOD)
    assert [p.problem_id for p in load_folder(tmp_path)] == ["L2/2_a", "L2/10_b"]


def test_a_single_file_is_a_problem_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    assert [p.problem_id for p in load_problems(str(tmp_path / "mine.py"))] == ["L0/mine"]


def test_a_syntax_error_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\nclass Model(:\n")
    with pytest.raises(ProblemError, match=r"broken\.py:2 does not parse"):
        load_file(path)


def test_a_file_without_the_contract_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text("class Model: pass\n")
    with pytest.raises(ProblemError, match="lacks get_inputs, get_init_inputs"):
        load_file(path)


@pytest.mark.parametrize("content", ["", "nothing here"])
def test_a_folder_without_problems_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "readme.txt").write_text(content)
    with pytest.raises(ProblemError, match="holds no level"):
        load_folder(tmp_path)


def test_selecting_nothing_is_an_error_and_not_an_empty_run() -> None:
    with pytest.raises(ProblemError, match="level \\[9\\]"):
        load_suite(levels=[9])


def test_the_module_of_a_problem_may_have_another_name() -> None:
    text = GOOD.replace("class Model", "class Other") + "\n\nModel = Other\n"
    assert parse_problem(text, "L0/x").source.endswith("Model = Other\n")
    with pytest.raises(ProblemError, match="lacks Model"):
        parse_problem(text.replace("Model = ", "Net = "), "L0/x")
