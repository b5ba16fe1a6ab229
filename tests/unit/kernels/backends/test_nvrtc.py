"""Backend `cuda-nvrtc`: device code is compiled for the bench's GPU where there is none, confined."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.launch import bundle, elf
from kbrl_async.kernels.backends.nvrtc import build
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.backends.nvrtc.build import Built
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import BuildReport, Candidate, Fault

needs_nvrtc = pytest.mark.skipif(not nvrtc.library_path(), reason="NVRTC is not installed here")
GOOD = "__global__ void f(const float *x, float *y, int n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }"
_TEXT = """
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel

SOURCE = {source!r}

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = {call}

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel[1, 256](x, y, x.numel())
        return y
"""


@pytest.fixture(scope="module")
def builder(warm_builder: Builder) -> Builder:
    return warm_builder


def make(source: str = GOOD, call: str = 'cuda_kernel(SOURCE, "f")', head: str = "") -> Candidate:
    return Candidate(head + _TEXT.format(source=source, call=call), "cuda-nvrtc")


def files_of(builder: Builder, report: BuildReport) -> dict[str, bytes]:
    path = builder.store.path(next(iter(report.artifacts.values())))
    assert path is not None
    return bundle.unpack(path.read_bytes())


@needs_nvrtc
def test_machine_code_is_made_without_a_gpu_and_cached(builder: Builder) -> None:
    first, second = builder.build(make()), builder.build(make())
    assert (first.fault, first.cached, second.cached) == (Fault.OK, False, True)
    assert list(first.artifacts) == [cuda.source_key(GOOD)]
    assert files_of(builder, first)["code.cubin"].startswith(b"\x7fELF")
    assert first.kernels == ["f"]
    assert first.toolchain.startswith("nvrtc ")


@needs_nvrtc
def test_templates_half_types_and_options_are_built(builder: Builder) -> None:
    source = """
#include <cuda_fp16.h>
#include <stdint.h>
template <typename T> __global__ void f(const T *x, T *y, int64_t n) { y[0] = x[0] * T(2); }
"""
    call = '[cuda_kernel(SOURCE, "f<float>", ["--use_fast_math"]), cuda_kernel(SOURCE, "f<__half>")]'
    report = builder.build(make(source, call))
    assert report.fault is Fault.OK, report
    assert set(report.artifacts) == {cuda.source_key(source), cuda.source_key(source, ("--use_fast_math",))}
    assert report.kernels == ["f<__half>", "f<float>"]


@needs_nvrtc
def test_torchs_own_call_is_understood(builder: Builder) -> None:
    report = builder.build(make(call='torch.cuda._compile_kernel(SOURCE, kernel_name="f")'))
    assert report.fault is Fault.OK
    assert b'"f"' in files_of(builder, report)["names.json"]


@needs_nvrtc
@pytest.mark.parametrize(
    ("broken", "message", "hint"),
    [
        ("y[0] = oops;", 'line 1: identifier "oops" is undefined', "Declare it"),
        ("y[0] = x[0]", "expected a", "semicolons"),
        ("}\n#include <vector>\n{", 'cannot open source file "vector"', "own headers"),
        ("float *z = x[0];", "cannot be used to init", "types"),
    ],
)
def test_errors_name_the_line_and_a_cure(builder: Builder, broken: str, message: str, hint: str) -> None:
    report = builder.build(make("__global__ void f(const float *x, float *y, int n) { " + broken + " }"))
    assert report.fault is Fault.COMPILE_ERROR
    assert message in report.message
    assert hint in report.hint
    assert len(report.message) <= 800
    assert "kbrl" not in report.message
    assert builder.build(make("__global__ void f(const float *x, float *y, int n) { " + broken + " }")).cached


@needs_nvrtc
def test_the_compiler_reads_no_file_of_the_host(builder: Builder, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("#define SECRET 1")
    secret.chmod(0o644)
    report = builder.build(make(f'#include "{secret}"\n' + GOOD))
    assert report.fault is Fault.COMPILE_ERROR
    assert "cannot open source file" in report.message or "could not open" in report.message


@needs_nvrtc
def test_a_macro_bomb_ends_at_the_deadline(builder: Builder) -> None:
    bomb = "#define R0 y[n] += x[n] * y[n+1];\n"
    bomb += "".join(f"#define R{i} R{i - 1} R{i - 1} R{i - 1} R{i - 1}\n" for i in range(1, 14))
    bomb += "__global__ void f(const float *x, float *y, int n) { R13 }"
    with Builder(builder.store, CompileFarm(deadline_s=1.0)) as hasty:
        report, again = hasty.build(make(bomb)), hasty.build(make(bomb))
    assert report.fault is Fault.COMPILE_ERROR
    assert "longer than 1 s" in report.message or "crashed" in report.message
    assert not again.cached, "a quicker host may build it"


@pytest.mark.parametrize(
    ("candidate", "rule"),
    [
        (make(call='cuda_kernel(SOURCE + "", "f")'), "kernel_source"),
        (make(call='cuda_kernel(SOURCE, "g")'), "unknown_function"),
        (make(call='cuda_kernel(SOURCE, "f", ["-I/etc"])'), "option"),
        (make(call='cuda_kernel(SOURCE, "f", OPTIONS)'), "kernel_source"),
        (make(call="None"), "no_kernel"),
        (make(head="import ctypes\n"), "import"),
        (make(head="from torch.utils import cpp_extension\n"), "import"),
        (make(call='eval("1") or cuda_kernel(SOURCE, "f")'), "forbidden_name"),
        (Candidate("x = ", "cuda-nvrtc"), "syntax"),
        (Candidate("x = 1", "cuda-nvrtc"), "no_model"),
        (Candidate("import torch.nn as nn\nclass ModelNew(nn.Module): pass", "cuda-nvrtc"), "no_forward"),
    ],
)
def test_what_must_not_be_built_is_refused_by_rule(builder: Builder, candidate: Candidate, rule: str) -> None:
    report = builder.build(candidate)
    assert (report.rule, report.artifacts) == (rule, {})
    assert report.fault in (Fault.STATIC_VIOLATION, Fault.FORMAT_ERROR)


@pytest.mark.parametrize(
    "head",
    [
        "import math\nfrom typing import Any\nimport functools\n",
        "import torch.nn.functional as F\nfrom torch import nn\n",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
        "import numpy as np\nfrom dataclasses import dataclass\n",
    ],
)
def test_legitimate_imports_pass(head: str) -> None:
    assert backend("cuda-nvrtc").check(make(head=head)) is None


@needs_nvrtc
@pytest.mark.parametrize("built", [Built(unusable="no memory, it says"), Built()])
def test_a_child_that_blames_its_host_is_held_against_a_source_of_ours(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, built: Built
) -> None:
    told = answers.Collected("full", msgspec.msgpack.encode(built), False, {})
    report = build.report_of(told, "key", builder.context, "sm_90")
    assert report.fault is Fault.COMPILE_ERROR
    monkeypatch.setattr(build, "works_here", lambda arch, context: False)
    with pytest.raises(InfraError):
        build.report_of(told, "key", builder.context, "sm_90")


@needs_nvrtc
def test_variables_of_a_cubin_are_those_that_last() -> None:
    source = "__device__ int calls = 3; __constant__ float two[2] = {1, 2}; extern __shared__ int most[];"
    source += 'extern "C" __global__ void f(float *x) { most[0] = calls++; x[0] = most[0] + two[threadIdx.x % 2]; }'
    assert elf.variables(nvrtc.compile_source(source, ["f"], "sm_90").cubin) == ["calls"]
    assert elf.variables(nvrtc.compile_source(GOOD, ["f"], "sm_90").cubin) == []
    with pytest.raises(ValueError, match="ELF"):
        elf.variables(b"nonsense")
