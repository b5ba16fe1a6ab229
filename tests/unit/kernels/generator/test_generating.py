"""Generated problems: the same for the same seed, distinct, sound, and never near what is held out elsewhere."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import msgspec
import pytest
import torch

from kbrl_async.errors import ProblemError, UserError
from kbrl_async.kernels.generator import checking, drawing, generate, generating, source, write_folder
from kbrl_async.kernels.generator.draft import ProblemDraft
from kbrl_async.kernels.generator.generating import HELDOUT_SHARE, GeneratedProblem, chain_of
from kbrl_async.kernels.generator.operators import OPERATORS
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.problems.writing import render_problem

COUNT = 12


@pytest.fixture(scope="module")
def drawn() -> list[GeneratedProblem]:
    return list(generate(COUNT, seed=7, jobs=1))


def test_the_same_seed_gives_the_same_problems_whatever_the_number_of_workers(drawn: list[GeneratedProblem]) -> None:
    assert list(generate(4, seed=7, jobs=2)) == drawn[:4]
    assert [one.source for one in generate(4, seed=8, jobs=1)] != [one.source for one in drawn[:4]]


def test_no_two_compute_the_same(drawn: list[GeneratedProblem]) -> None:
    assert len({one.chain for one in drawn}) == COUNT


def test_nothing_with_the_operations_of_what_is_avoided_is_drawn(tmp_path: Path, drawn: list[GeneratedProblem]) -> None:
    write_folder(tmp_path / "first", drawn)
    avoid = load_problems(str(tmp_path / "first"))
    again = list(generate(COUNT, seed=7, jobs=1, avoid=avoid))
    assert not {one.chain for one in again} & {one.chain for one in drawn}


def test_what_is_held_out_depends_on_the_operations_alone(drawn: list[GeneratedProblem]) -> None:
    shares = [GeneratedProblem(0, n, "", "", 1, 0.0, (str(n),)).split for n in range(2000)]
    assert abs(shares.count("heldout") / 2000 - 1 / HELDOUT_SHARE) < 0.03
    assert all(one.split == GeneratedProblem(9, 9, "", "", 3, 1.0, one.chain).split for one in drawn)


def test_a_folder_of_them_is_a_source_with_both_shapes(tmp_path: Path, drawn: list[GeneratedProblem]) -> None:
    write_folder(tmp_path / "out", drawn)
    small, large = (load_problems(str(tmp_path / "out"), shapes=shapes) for shapes in ("cpu", "gpu"))
    assert len(small) == len(large) == COUNT
    assert all(a.source != b.source for a, b in zip(small, large, strict=True))
    assert {problem.difficulty for problem in small} == {one.difficulty for one in drawn}


def test_difficulty_is_what_was_asked_for() -> None:
    easy = list(generate(4, seed=1, difficulty=(0.0, 0.15), jobs=1))
    hard = list(generate(4, seed=1, difficulty=(0.7, 0.9), jobs=1))
    assert max(one.difficulty for one in easy) < min(one.difficulty for one in hard)


def test_when_there_are_no_more_it_says_how_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "PATIENCE", 0)
    with pytest.raises(UserError, match="problems of 100000 were found"):
        list(generate(100_000, seed=0, difficulty=(0.0, 1e-6), jobs=1))


@functools.cache
def drafts_by_operator() -> dict[str, ProblemDraft]:
    """A small draft with each operator in it."""
    found: dict[str, ProblemDraft] = {}
    for number in range(20_000):
        draft = drawing.draw(random.Random(number), (0.1, 0.6))
        for step in draft.steps:
            found.setdefault(step.operator, draft)
        if len(found) == len(OPERATORS):
            break
    return found


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_is_drawn_and_its_shape_is_what_it_says(name: str) -> None:
    """The dimensions that later operators rely on are the tensor's own."""
    draft = drafts_by_operator()[name]
    program = checking.CheckedModule(render_problem(draft.module("")))
    (out,) = program.run(program.draw(1))
    assert list(out.shape) == [size.cpu for size in draft.dims], render_problem(draft.module(""))


def problem(forward: str, inputs: str = "torch.randn(64, 64)", arguments: str = "x") -> str:
    return (
        "import torch\nimport torch.nn as nn\n\n\nclass Model(nn.Module):\n"
        f"    def forward(self, {arguments}):\n        return {forward}\n\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\n\ndef get_init_inputs():\n    return []\n"
    )


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        ("x * 0.0", "too small"),
        ("torch.log(x)", "not finite"),
        ("torch.sigmoid(x * 1e-6)", "a constant would pass"),
        ("torch.softmax(x, dim=-1).sum(dim=-1)", "would pass"),
        ("torch.cat([x[:32], x[:32] * 0.0])", "half of the rows would pass"),
        ("torch.sin(x * 1e7)", "rounding errors decide"),
        ("x @ torch.zeros(3, 3)", "it fails"),
    ],
)
def test_a_problem_that_cannot_tell_right_from_wrong_is_left_out(forward: str, why: str) -> None:
    assert why in checking.check(problem(forward), [])


def test_a_step_and_an_input_that_do_not_matter_are_found() -> None:
    two = "torch.randn(64, 64), torch.randn(64, 64)"
    assert checking.check(problem("x + y", two, "x, y"), []) == ""
    assert checking.check(problem("x + 0.0 * y", two, "x, y"), []) == "an input does not matter"
    shortened = [("abs", problem("x * x"))]
    assert checking.check(problem("(x * x).abs()"), shortened) == "abs changes nothing"


def test_every_workload_has_to_tell_right_from_wrong() -> None:
    rows = 'WORKLOADS = [{{"shape": {{"scale": 1.0}}}}, {{"shape": {{"scale": {second}}}}}]\n'
    one = problem("x * 2.0 + 0.5 * x", "scale * torch.randn(64, 64)")
    several = one.replace("get_inputs()", "get_inputs(scale=1.0)")
    assert checking.check(several + rows.format(second=0.25), []) == ""
    assert "too small" in checking.check(several + rows.format(second=1e-9), [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_to_tell_at_its_own_tolerance(dtype: str) -> None:
    declared = f'DTYPE = "{dtype}"\n'
    assert checking.check(problem("x * 2.0 + 1.0") + declared, []) == ""
    narrow = problem("torch.sigmoid(x * 0.01)")
    assert checking.check(narrow, []) == ""
    assert "would pass" in checking.check(narrow + declared, [])


def test_some_have_several_workloads_or_half_precision_and_the_files_say_so(tmp_path: Path) -> None:
    some = [one for one in (generating.one(7, n, (0.0, 0.6)) for n in range(40)) if not one.reason]
    write_folder(tmp_path / "out", some)
    found = load_problems(str(tmp_path / "out"))
    read = [declared(problem.source, problem.problem_id) for problem in found]
    several = [(problem, said) for problem, said in zip(found, read, strict=True) if said.workloads]
    assert 0.1 < len(several) / len(some) < 0.6
    assert {said.dtype for said in read} == {"", "bfloat16", "float16"}
    for one, said in several:
        shapes = [checking.CheckedModule(text).draw(1)[0].shape for text in checking.texts_of(one.source)]
        assert len(set(shapes)) == len(said.workloads) > 1
        assert max(shapes) == shapes[0], "the first one, with all input sets, is the largest"


def test_what_is_sound_with_one_workload_alone_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n in range(100) if "WORKLOADS" in generating.one(7, n, (0.0, 0.3)).source)
    check = checking.check
    monkeypatch.setattr(
        checking, "check", lambda source, short: "no" if "WORKLOADS" in source else check(source, short)
    )
    one = generating.one(7, number, (0.0, 0.3))
    assert (one.reason, "WORKLOADS" in one.source) == ("", False)


def test_more_bytes_are_harder() -> None:
    def softmax(cpu: int) -> float:
        draft = ProblemDraft(random.Random(1), "rows")
        draft.gpu_elements = 0
        draft.dims = [draft.dims[0], msgspec.structs.replace(draft.dims[1], gpu=cpu)]
        draft.take("softmax")
        OPERATORS["softmax"].write(draft)
        return drawing.difficulty_of(draft)

    assert softmax(256) < softmax(1 << 15)


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    checking.check(problem("x + 1.0"), [])
    assert torch.get_num_threads() == before


def test_the_source_makes_them_once_and_reads_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load_problems("generated:5:3:0.0-0.4")
    monkeypatch.setattr(source, "generate", None)
    assert load_problems("generated:5:3:0.0-0.4") == first
    assert len(first) == 5
    assert {chain_of(one.source) for one in first}.isdisjoint({chain_of(one.source) for one in source.known()})


@pytest.mark.parametrize("wanted", ["generated:", "generated:0", "generated:x", "generated:5:1:2-3"])
def test_a_source_that_reads_otherwise_names_the_form(wanted: str) -> None:
    with pytest.raises((ProblemError, UserError)):
        load_problems(wanted)
