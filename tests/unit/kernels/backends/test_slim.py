"""The generated half of the stand-in headers: only what a source names, word for word from the installed torch."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.inline import toolchain as inline_toolchain
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.inline.flags import chosen
from kbrl_async.kernels.backends.inline.launch import Extension, Unit
from kbrl_async.kernels.backends.inline.ops import OperatorHeaders

INCLUDE = Path(torch.__file__).parent / "include"


@pytest.fixture(scope="module")
def headers() -> OperatorHeaders:
    return OperatorHeaders(INCLUDE)


def test_a_method_that_is_named_is_declared_with_its_operator(headers: OperatorHeaders) -> None:
    declared = headers.declare("auto y = x.softmax(1);")
    assert "softmax(int64_t dim" in declared.methods
    assert "struct softmax_int" in declared.operators
    assert "at::_ops::softmax_int::call" in declared.bodies


def test_a_function_that_is_named_is_declared(headers: OperatorHeaders) -> None:
    assert "inline at::Tensor bmm(" in headers.declare("torch :: bmm(x, y)").bodies
    assert "inline at::Tensor bmm(" in headers.declare("using namespace torch; bmm(x, y)").bodies


def test_an_output_variant_is_declared(headers: OperatorHeaders) -> None:
    declared = headers.declare("at::mm_out(out, x, y);")
    assert "inline at::Tensor & mm_out(" in declared.bodies
    assert "struct mm_out" in declared.operators


def test_what_is_not_named_is_not_declared(headers: OperatorHeaders) -> None:
    declared = headers.declare("float softmax = bmm(1);")
    assert "softmax" not in declared.text()
    assert "bmm" not in declared.text()


def test_every_operator_that_a_body_calls_is_declared_once(headers: OperatorHeaders) -> None:
    declared = headers.declare("x.sum(); torch::sum(x); x.add(y); x.mean(1); torch::zeros({1}); at::cat({x}); x.max()")
    import re

    called = set(re.findall(r"at::_ops::(\w+)::call", declared.bodies))
    structs = re.findall(r"struct (\w+) ", declared.operators)
    assert called == set(structs)
    assert len(structs) == len(set(structs))


def test_an_overload_with_a_type_beyond_the_stand_ins_is_left_out(headers: OperatorHeaders) -> None:
    assert "Dimname" not in headers.declare("x.sum(); x.softmax(1); torch::cat({x})").text()


def test_a_name_that_torch_does_not_have_declares_nothing(headers: OperatorHeaders) -> None:
    assert headers.declare("x.doubled(); torch::blank_like(x)") == headers.declare("")


def test_a_torch_with_other_insides_gets_no_fast_way(tmp_path: Path) -> None:
    tools = inline_toolchain.toolchain()
    assert tools.slim_defines is not None
    other = inline_toolchain.Toolchain(tmp_path, "9.9", tools.cxx, tools.cxx_version)
    assert other.slim_defines is None


@pytest.mark.parametrize(
    ("text", "linked"),
    [("cublasSgemm(h);", ["libcublas.so"]), ("cublasLtMatmul(h);", ["libcublas.so", "libcublasLt.so"]), ("f();", [])],
)
def test_what_torch_has_loaded_may_be_called_without_a_word(tmp_path: Path, text: str, linked: list[str]) -> None:
    for name in ("libcublas.so", "libcublasLt.so"):
        (tmp_path / "lib64").mkdir(exist_ok=True)
        (tmp_path / "lib64" / name).write_text("")
    extension = Extension("e", (Unit(True, text),), with_cuda=True)
    tools = inline_toolchain.Toolchain(tmp_path, "2", "g++", "12", nvcc="nvcc", cuda=tmp_path)
    libraries = Build(extension, chosen(extension, "sm_90"), tools, cast(BuildContext, None)).libraries()
    assert [f"-l:{name}" for name in linked] == [
        word for word in libraries if "blas" in word and word.startswith("-l:")
    ]


def test_a_wrapper_without_its_toolkit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wrapper", "toolkit"):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    (tmp_path / "toolkit" / "include").mkdir()
    (tmp_path / "toolkit" / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrapper"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    inline_toolchain.find_nvcc.cache_clear()
    try:
        assert inline_toolchain.find_nvcc() == str(tmp_path / "toolkit" / "bin" / "nvcc")
    finally:
        inline_toolchain.find_nvcc.cache_clear()


@pytest.mark.parametrize(
    ("symbol", "has_cuda", "open_"),
    [
        ("PyTuple_New", True, True),
        ("_Py_NoneStruct", True, True),
        ("run(at::Tensor)", False, False),
        ("at::_ops::blank::call(at::Tensor const&)", False, False),
        ("c10::cuda::getCurrentCUDAStream(signed char)", False, True),
        ("c10::cuda::getCurrentCUDAStream(signed char)", True, False),
        ("cublasSgemm_v2", False, True),
    ],
)
def test_only_what_the_bench_brings_may_stay_open(tmp_path: Path, symbol: str, has_cuda: bool, open_: bool) -> None:
    (tmp_path / "lib").mkdir()
    if has_cuda:
        (tmp_path / "lib" / "libc10_cuda.so").touch()
    assert inline_toolchain.Toolchain(tmp_path, "2", "g++", "12").may_stay_open(symbol) is open_
