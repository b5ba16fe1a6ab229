"""Launch plans go through the backends whose kernels they hold."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.backends.c import launch as c
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault

C = "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = 3 * x[i]; }"
CUDA = "__global__ void f(const float *x, float *y, long n) { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }"
_PLAN = """
PLAN = {{
    "inputs": ["x"],
    "kernels": {{"f": {{"source": {source!r}}}}},
    "buffers": {{"y": {{"shape": ["x.numel"]}}}},
    "steps": {steps},
    "outputs": ["y"],
}}
"""
_STEPS = '[{"kernel": "f", "args": ["x", "y", "x.numel"]}]'


@pytest.fixture(scope="module")
def builder(warm_builder: Builder) -> Builder:
    return warm_builder


def make(source: str = C, backend: str = "c", steps: str = _STEPS) -> Candidate:
    return Candidate(_PLAN.format(source=source, steps=steps), backend)


def test_a_plan_of_c_kernels_is_built_as_any_c_candidate(builder: Builder) -> None:
    report = builder.build(make())
    assert report.fault is Fault.OK
    assert list(report.artifacts) == [c.source_key(C)]


@pytest.mark.skipif(not nvrtc.library_path(), reason="NVRTC is not installed here")
def test_a_plan_of_cuda_kernels_is_built_by_nvrtc(builder: Builder) -> None:
    report = builder.build(make(CUDA, "cuda-nvrtc"))
    assert report.fault is Fault.OK
    assert list(report.artifacts) == [cuda.source_key(CUDA)]
    assert report.kernels == ["f"]


@pytest.mark.parametrize(
    ("candidate", "fault", "rule"),
    [
        (make(C.replace("3", "oops")), Fault.COMPILE_ERROR, ""),
        (make('#include "/etc/passwd"\n' + C), Fault.STATIC_VIOLATION, "include"),
        (make(C.replace("void f", "void g")), Fault.STATIC_VIOLATION, "unknown_function"),
        (make(CUDA, "c"), Fault.STATIC_VIOLATION, "plan"),
        (make(C, "cuda-nvrtc"), Fault.STATIC_VIOLATION, "plan"),
        (make(steps="[]"), Fault.STATIC_VIOLATION, "no_kernel"),
        (make(steps="[7]"), Fault.FORMAT_ERROR, "plan"),
        (make(steps="open('x')"), Fault.FORMAT_ERROR, "plan"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(builder: Builder, candidate: Candidate, fault: Fault, rule: str) -> None:
    report = builder.build(candidate)
    assert (report.fault, report.rule) == (fault, rule)
    assert report.message
