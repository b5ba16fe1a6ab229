"""`python -m benchmarks.verification honest|hostile`: what a pair may be, and that nothing it is ends the corpus."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.crew import rows_of
from benchmarks.verification import adapters, corpus, posed
from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel import Builder, Verifier
from kbrl_async.kernels.problems import beside, load_file, parse_problem
from protocols.records import Fault, Verdict
from tests.candidates import affine
from tests.unit.kernels.open.test_honest import STYLES, c
from tests.unit.kernels.open.test_rules import CAUGHT

PAIRS = {
    "right": (STYLES["imports"], affine(), ()),
    "unpaired": (STYLES["stdio"], "", ()),
    "wrong": (c().replace("2 * x[i] + 1", "3 * x[i]"), affine(), ()),
    "decoy": (CAUGHT["numpy does it, a kernel copies"][0], affine(), ("decoy_kernel",)),
    "nothing": ("", affine(), ()),
    "no kernel": ("print('hello')\n", affine(), ()),
    "broken problem": (c(), affine().replace("def get_init_inputs", "def other"), ()),
    "failing problem": (c(), affine().replace("torch.randn(16, 33)", "1 / 0"), ()),
    "random problem": (c(), affine().replace("+ 1", "+ torch.rand_like(x)"), ()),
    "huge problem": (c(), affine(shape="1 << 40"), ()),
    "no problem at all": (c(), "print('hello')\n", ()),
    "needs a package": ("import no_such_package\n" + c(), affine(), ()),
    "ends before its kernel": (c(init="raise SystemExit(0)"), affine(), ()),
    "needs a header": (c().replace("void f", "#include <hip/hip_runtime.h>\nvoid f"), affine(), ()),
}
BINARY = ("binary", "binary problem")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, (candidate, problem, rules) in PAIRS.items():
        (tmp_path / name).mkdir()
        if candidate:
            (tmp_path / name / "candidate.py").write_text(candidate)
        if problem:
            (tmp_path / name / "problem.py").write_text(problem)
        if rules:
            (tmp_path / name / "expected.json").write_text(json.dumps({"rules": rules}))
    for name, file in zip(BINARY, ("candidate.py", "problem.py"), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "candidate.py").write_text(c())
        (tmp_path / name / file).write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "candidate is a folder" / "candidate.py").mkdir(parents=True)
    return tmp_path


def test_each_pair_has_an_outcome_and_bad_ones_are_nobodys_fault(folder: Path) -> None:
    found = corpus.honest(corpus=folder, out=folder / "out.jsonl")
    states = {one["name"]: one["state"] for one in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}
    assert states == {
        "right": "accepted", "unpaired": "built", "wrong": "refused", "decoy": "refused",
        "no kernel": "no_kernel", "nothing": "no_kernel", "broken problem": "problem", "failing problem": "problem",
        "random problem": "problem", "huge problem": "problem", "no problem at all": "problem",
        "needs a package": "missing", "needs a header": "missing", "ends before its kernel": "refused",
        "binary": "no_kernel", "binary problem": "problem", "candidate is a folder": "no_kernel",
    }  # fmt: skip
    assert not found["ok"]
    assert found["accepted_share"] == pytest.approx(2 / 5)
    assert len(found["not_counted"]) == 12
    assert any("random or keeps state" in line for line in found["not_counted"])
    assert found["accused"] == ["decoy"]


EXTENSION = """
import torch
from torch.utils.cpp_extension import load_inline

SOURCE = "#include <{header}>\\ntorch::Tensor f(torch::Tensor x) {{ return x * 2 + 1; }}"
ours = load_inline(name="ours", cpp_sources=SOURCE, functions=["f"], {flag})

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ours.f(x)
"""


@pytest.mark.parametrize(
    ("header", "flag", "state"),
    [
        ("kittens.cuh", "", "missing"),
        ("vector", "extra_include_paths=['/root/nowhere/include']", "missing"),
        ("vector", "extra_cflags=['-O3', '-I/root/nowhere/include']", "missing"),
        ("vector", "extra_ldflags=['-L/root/nowhere', '-lnowhere']", "refused"),
        ("vector", "extra_include_paths=['{here}']", "refused"),
        ("vector", "extra_cflags=['-fplugin=/root/nowhere']", "refused"),
    ],
    ids=["header", "path", "flag", "library", "a folder that is there", "another flag"],
)
def test_whose_build_needs_somebody_elses_library_is_not_refused(
    tmp_path: Path, header: str, flag: str, state: str
) -> None:
    """It is missing here, as a package is: nothing is shown of the candidate."""
    (tmp_path / "pair").mkdir()
    text = EXTENSION.format(header=header, flag=flag.format(here=tmp_path))
    (tmp_path / "pair" / "candidate.py").write_text(text)
    (tmp_path / "pair" / "problem.py").write_text(affine())
    found = corpus.honest(corpus=tmp_path)
    assert found["states"] == {state: 1}, found


def test_what_other_compilers_say_of_a_header_that_is_missing_is_known() -> None:
    for said in (
        'run.cu(3): catastrophic error: cannot open source file "kittens.cuh"',
        "run.cpp:3:10: fatal error: 'cute/tensor.hpp' file not found",
        "run.cpp:3:10: fatal error: hip/hip_runtime.h: No such file or directory",
    ):
        verdict = Verdict(Fault.COMPILE_ERROR, message=said)
        assert corpus.refused(verdict)[1] == "missing", said
    assert corpus.refused(Verdict(Fault.COMPILE_ERROR, message='error: "x" is undefined'))[1] == "refused"


def test_benches_judge_what_the_jobs_have_built_and_a_share_is_judged_alone(folder: Path) -> None:
    chosen = "^(right|wrong|unpaired|binary problem|random problem)$"
    out = folder / "out.jsonl"
    found = corpus.honest(corpus=folder, only=chosen, benches=2, alone_share=1.0, references=0, repeat=2, out=out)
    rows = rows_of(out)
    marks = ("# 0", "# 1", "# 0# alone", "# 1# alone")
    assert {name: row["state"] for name, row in rows.items()} == {
        **{f"right{mark}": "accepted" for mark in marks}, **{f"wrong{mark}": "refused" for mark in marks},
        **{f"unpaired{mark}": "built" for mark in marks},
        **{f"{name}{mark}": "problem" for name in ("binary problem", "random problem") for mark in marks[:2]},
    }  # fmt: skip
    assert found["alone"]["pairs"] == 6
    assert found["alone"]["other_state"] == []
    assert {"compile", "reference", "small_inputs"} <= found["alone"]["stages_s"].keys()
    assert all(len(each) == 2 for each in found["alone"]["stages_s"].values())


def test_in_flight_a_pairs_seconds_hold_what_it_waited(folder: Path) -> None:
    chosen, out = "^(right|wrong|unpaired|binary problem|nothing)$", folder / "out.jsonl"
    found = corpus.honest(corpus=folder, only=chosen, jobs=2, benches=2, in_flight=3, warm="right", out=out)
    rows = rows_of(out)
    assert {name: row["state"] for name, row in rows.items()} == {
        "right": "accepted", "wrong": "refused", "unpaired": "built",
        "binary problem": "problem", "nothing": "no_kernel",
    }  # fmt: skip
    for row in rows.values():
        assert sum(row["stages"].values()) == pytest.approx(row["seconds"], abs=0.05)
        assert "waited" in row["stages"]
    assert found["stages_s"].keys() == {"built", "waited", "reference", "judged"}
    assert found["stages_s"]["built"][1] > 0
    again = corpus.honest(corpus=folder, only=chosen, jobs=2, benches=2, in_flight=3, again=("refused",), out=out)
    assert again["states"] == found["states"]
    assert out.read_text().count("begun") == len(rows) + 1, "only the refused one was judged again"


def test_one_bench_with_nobody_beside_it_times_what_is_right(folder: Path) -> None:
    out = folder / "out.jsonl"
    corpus.honest(corpus=folder, only="^(right|wrong)$", timing=True, out=out)
    assert {name: "timing" in row["stages"] for name, row in rows_of(out).items()} == {"right": True, "wrong": False}
    with pytest.raises(UserError, match="2 benches would time beside each other"):
        corpus.honest(corpus=folder, jobs=4, benches=2, timing=True)


def test_a_bench_judges_what_a_job_has_built_and_builds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = corpus.HowJudged(store=str(folder / "store"))
    given = corpus.CorpusPair(folder / "right")
    with corpus.building(how, 0, 1) as work:
        build = work(given)["build"]
    monkeypatch.setattr(Verifier, "build", None)
    monkeypatch.setattr(Builder, "build", None)
    with corpus.judging(how, 0, 1) as work:
        row = work(given._replace(built=build))
        late = work(given._replace(built=build, since=time.time() - 100.0))
    assert row["state"] == late["state"] == "accepted"
    assert "waited" not in row["stages"]
    assert 100.0 <= late["seconds"] == pytest.approx(sum(late["stages"].values()), abs=0.05)
    assert row["stages"].keys() >= {"compile", "reference"}


def test_each_problems_reference_is_kept_where_none_is_too_many() -> None:
    few, all_of_them = (corpus.HowJudged(references=number).options(4).bench for number in (2, 0))
    assert few is not None
    assert all_of_them is not None
    assert (few.references, all_of_them.references) == (2, sys.maxsize)
    assert few.reference_bytes < all_of_them.reference_bytes == all_of_them.limits.memory_bytes // 4
    assert few.memory_share == 0.75


@pytest.mark.parametrize(
    ("jobs", "store", "asked", "share"),
    [(2, "", 0.0, 1.0), (2, "built", 0.0, 0.5), (1, "built", 0.0, 1.0), (2, "built", 0.75, 0.75)],
)
def test_benches_have_no_more_than_all_of_a_gpu_between_them(jobs: int, store: str, asked: float, share: float) -> None:
    bench = corpus.HowJudged(store=store, memory_share=asked).options(jobs).bench
    assert bench is not None
    assert bench.memory_share == share


def test_a_hostile_pair_has_to_be_refused_for_its_reason(folder: Path) -> None:
    for name in (PAIRS.keys() | {*BINARY, "candidate is a folder"}) - {"decoy", "wrong"}:
        if name == "candidate is a folder":
            (folder / name / "candidate.py").rmdir()
        for file in (folder / name).iterdir():
            file.unlink()
        (folder / name).rmdir()
    found = corpus.hostile(corpus=folder)
    assert found["refused_rightly"] == 0.5
    assert found["wrong"] == ["wrong: refused incorrect"]


def test_a_kernel_of_a_package_brings_what_it_needs_of_it(tmp_path: Path) -> None:
    ops = tmp_path / "src" / "liger_kernel" / "ops"
    ops.mkdir(parents=True)
    (ops.parent / "__init__.py").write_text("")
    (ops / "__init__.py").write_text("")
    (ops / "utils.py").write_text("import triton\n")
    (ops / "unused.py").write_text("")
    (ops / "gelu.py").write_text(
        "import triton\nfrom liger_kernel.ops.utils import triton as t\ndef gelu(x):\n    return x\n"
    )
    assert adapters.liger(tmp_path, tmp_path / "out") == 1
    text = (tmp_path / "out" / "gelu" / "candidate.py").read_text()
    names = {"liger_kernel/__init__.py", "liger_kernel/ops/__init__.py", "liger_kernel/ops/gelu.py"}
    assert set(beside.files_of(text)) == names | {"liger_kernel/ops/utils.py"}


def test_an_operator_launches_its_compiled_kernel_as_a_newer_triton_wants_it(tmp_path: Path) -> None:
    package = tmp_path / "src" / "flag_gems"
    for folder in ("ops", "utils"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text("")
    (package / "utils" / "libentry.py").write_text("has_all = major_version == 3 and 3 <= minor_version <= 5\n")
    (package / "ops" / "abs.py").write_text("from flag_gems.utils.libentry import has_all\n")
    assert adapters.flaggems(tmp_path, tmp_path / "out") == 2, "in single and in half precision"
    for candidate in (tmp_path / "out").glob("*/candidate.py"):
        text = beside.files_of(candidate.read_text())["flag_gems/utils/libentry.py"]
        assert text == "has_all = (major_version, minor_version) >= (3, 3)\n"


def test_a_leaderboards_answers_stand_beside_their_problems(tmp_path: Path) -> None:
    place = tmp_path / "docs" / "assets"
    for name in ("problems", "solutions"):
        (place / name).mkdir(parents=True)
    (place / "problems" / "l2_p7.py").write_text("class Model: pass\n")
    (place / "solutions" / "abcdef12.py").write_text("class ModelNew: pass\n")
    (place / "data.json").write_text('{"Level 2: 7_Add": [{"file": "abcdef12"}, {"file": "gone"}]}')
    assert adapters.leaderboard(tmp_path, tmp_path / "out") == 1
    (pair,) = (tmp_path / "out").iterdir()
    assert (pair.name, (pair / "problem.py").read_text()) == ("l2_p7_abcdef", "class Model: pass\n")


def test_a_kernel_that_has_a_problem_is_called_as_that_wants_it(tmp_path: Path) -> None:
    kernels = tmp_path / "data" / "TritonBench_G_v1"
    kernels.mkdir(parents=True)
    (kernels / "swiglu_triton.py").write_text("import triton\ndef swiglu_forward(a, b):\n    pass\n")
    (kernels / "other.py").write_text(f"import triton\ndef other(a):\n    pass\n{'#' * 60}\ntest = 1\n")
    assert adapters.tritonbench(tmp_path, tmp_path / "out") == 3
    name = "swiglu_triton-swiglu_forward-half"
    assert "return swiglu_forward(x, y)[2]" in (tmp_path / "out" / name / "candidate.py").read_text()
    assert "torch.randn(1024, 1024).half()" in load_file(tmp_path / "out" / name / "problem.py").source
    assert "test" not in (tmp_path / "out" / "other" / "candidate.py").read_text()
    assert not (tmp_path / "out" / "other" / "problem.py").exists()


def test_what_each_table_poses_is_a_problem(tmp_path: Path) -> None:
    for one in (*posed.posed(posed.TRITONBENCH), *posed.posed(posed.FLA), *posed.posed(posed.LIGER)):
        ast.parse(f"def f({one.arguments}):\n    return {one.call}")
        parse_problem(one.problem, "L0/posed")


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (posed.FLA, "ops-utils-softmax-softmax_fwd"),
        (posed.TRITONBENCH, "matmul_triton1-matmul-2"),
        (posed.TRITONBENCH, "logsumexp_fwd-logsumexp_fwd"),
        (posed.TRITONBENCH, "relu_triton_kernel-relu"),
    ],
)
def test_what_answers_in_fp32_whatever_it_is_given_is_posed_in_fp32_alone(table: str, name: str) -> None:
    """Five of twelve refusals on a GPU were of our own making."""
    names = {one.name for one in posed.posed(table)}
    assert name in names
    assert f"{name}-half" not in names


def test_a_convolution_of_halves_that_answers_in_fp32_has_such_a_reference() -> None:
    (one,) = (one for one in posed.posed(posed.TRITONBENCH) if one.module == "triton_conv2d_fwd")
    model: dict[str, Any] = {}
    exec(one.problem, model)
    halves = torch.ones(1, 2, 4, 4).half(), torch.ones(3, 2, 3, 3).half()
    assert model["Model"]()(*halves).dtype is torch.float32


def test_a_task_is_posed_with_its_first_configuration(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "scale"
    task.mkdir(parents=True)
    (task / "forward.cu").write_text("// a kernel")
    (task / "func_forward.py").write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n"
        "    def __init__(self, size, eps=1e-5, way='plain'):\n        super().__init__()\n"
        "    def forward(self, x):\n        return x\n\n"
        "def get_inputs(batch=2, size=3):\n    return [torch.ones(batch, size)]\n"
    )
    told = {"single_shared_configs": [{"size": 7}], "single_input_configs": [{"batch": 5}]}
    (task / "config_forward.json").write_text(json.dumps(told | {"single_init_configs": [{"way": "random"}]}))
    assert adapters.robust_kbench(tmp_path, tmp_path / "out") == 1
    posed_as: dict[str, Any] = {}
    exec((tmp_path / "out" / "tasks_scale_forward" / "problem.py").read_text(), posed_as)
    assert posed_as["get_init_inputs"]() == [7, 1e-5, "random"]
    assert posed_as["get_inputs"]()[0].shape == (5, 7)


@pytest.mark.parametrize("name", ["../x.py", "/x.py", "a/../../x.py", "a b.py"])
def test_no_file_leads_out_of_the_candidates_folder(name: str) -> None:
    with pytest.raises(ValueError, match="beside"):
        beside.pack("", {name: ""})
    assert beside.files_of(f"x = 1\n\n# kbrl: beside {name}\n#|evil\n") == {}


def test_files_come_out_as_they_went_in() -> None:
    files = {"a/b.py": "x = 1\n\n#|y\n", "k.cu": "__global__ void f() {}", "e.txt": ""}
    assert beside.files_of(beside.pack("import a\n", files)) == files
