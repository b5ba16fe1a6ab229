"""Static checks: what they stop, what they let through, and that they execute nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.checks import syntax
from protocols.records import BuildReport, Candidate, Fault

Make = Callable[..., Candidate]


def _refused(given: Candidate) -> BuildReport | None:
    return backend(given.backend).check(given)


def test_a_plain_candidate_passes(candidate: Make) -> None:
    assert _refused(candidate()) is None


def test_a_syntax_error_is_a_format_error(candidate: Make) -> None:
    report = _refused(Candidate("class ModelNew(:", "c"))
    assert report is not None
    assert report.fault is Fault.FORMAT_ERROR
    assert "line 1" in report.message


@pytest.mark.parametrize(("old", "new"), [("class ModelNew", "class Other"), ("def forward", "def backward")])
def test_the_model_must_be_there(candidate: Make, old: str, new: str) -> None:
    report = _refused(candidate(replace=(old, new)))
    assert report is not None
    assert report.fault is Fault.FORMAT_ERROR


def test_a_kernel_must_be_launched(candidate: Make) -> None:
    report = _refused(candidate(replace=('c_kernel(SOURCE, "f")', "None")))
    assert report is not None
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, "no_kernel")


def test_the_source_must_be_known_without_a_run(candidate: Make) -> None:
    report = _refused(candidate(replace=("c_kernel(SOURCE", "c_kernel(str(torch.rand(1))")))
    assert report is not None
    assert report.rule == "kernel_source"


def test_the_function_must_be_defined(candidate: Make) -> None:
    report = _refused(candidate("void g(float *x) {}"))
    assert report is not None
    assert report.rule == "unknown_function"


@pytest.mark.parametrize(
    ("forward", "rule"),
    [
        ("from torch import compile as c", "import"),
        ("from torch import os", "import"),
        ("from functools import sys", "import"),
        ("import kbrl_async.launch", "import"),
        ("from kbrl_async.launch import proof", "import"),
        ("import numpy", "import"),
        ("x.numpy()", "forbidden_name"),
        ("c_kernel.__globals__", "forbidden_name"),
        ("(lambda: x).__closure__", "forbidden_name"),
        ("import os", "import"),
        ("from torch.utils import cpp_extension", "import"),
        ("eval('1')", "forbidden_name"),
        ("open('/etc/passwd')", "forbidden_name"),
        ("__import__('os')", "forbidden_name"),
        ("getattr(torch, 'soft' + 'max')(x)", "forbidden_name"),
        ("x.__class__.__bases__", "forbidden_name"),
        ("torch.ops.aten.relu(x)", "forbidden_name"),
    ],
)
def test_static_checks_fire(candidate: Make, forward: str, rule: str) -> None:
    report = _refused(candidate(forward=forward))
    assert report is not None
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, rule)
    assert report.message
    assert report.hint


@pytest.mark.parametrize(
    "call", ["torch.softmax(x, -1)", "nn.functional.relu(x)", "x @ x", "x.matmul(x)", "self.linear(x)"]
)
def test_a_library_call_is_left_to_the_bench_which_sees_what_really_runs(candidate: Make, call: str) -> None:
    held = ("self.kernel =", "self.linear = nn.Linear(2, 2); self.kernel =")
    assert _refused(candidate(forward=f"y = {call}", replace=held)) is None


def test_a_parameter_may_be_called_input(candidate: Make) -> None:
    """Half of a public problem set names its tensor so; nothing can be read from a child's standard input anyway."""
    named = ("def forward(self, x):", "def forward(self, input):\n        x = input")
    assert _refused(candidate(replace=named)) is None


def test_reading_a_held_module_is_allowed(candidate: Make) -> None:
    held = ("self.kernel =", "self.linear = nn.Linear(2, 2); self.kernel =")
    forward = "w = self.linear.weight.detach().contiguous().view(-1); n = w.numel() * w.stride(0) + w.size(0)"
    assert _refused(candidate(forward=forward, replace=held)) is None


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('#include "/etc/passwd"', "include"),
        ("#include <sys/socket.h>", "include"),
        ("#  include <unistd.h>", "include"),
        ("#include MACRO", "include"),
        ("/* x */ #include </etc/passwd>", "include"),
        ('asm(".incbin \\"/etc/passwd\\"");', "asm"),
        ('__asm__ volatile ("nop");', "asm"),
        ("__attribute__((constructor)) void g(void) {}", "forbidden_name"),
        ("long syscall(long, ...);", "forbidden_name"),
    ],
)
def test_c_that_no_kernel_needs_is_refused(candidate: Make, line: str, rule: str) -> None:
    report = _refused(candidate(f"{line}\nvoid f(const float *x, float *y, long n) {{}}"))
    assert report is not None
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, rule)


def test_words_in_comments_and_strings_are_no_violation(candidate: Make) -> None:
    source = '// asm system\n/* #include <x.h> */\nstatic const char *s = "asm";\n'
    source += "void f(const float *x, float *y, long n) {}"
    assert _refused(candidate(source)) is None


def test_the_check_executes_nothing(candidate: Make) -> None:
    assert _refused(candidate(replace=("import torch\n", "import torch\nprint(1 / 0)\n"))) is None


def test_an_unknown_backend_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="Choose among c"):
        backend("fortran")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("from typing import get_type_hints as hints", "import"),
        ("from functools import singledispatch", "import"),
        ("import typing\ntyping.get_type_hints(c_kernel)", "forbidden_name"),
        ("import typing\ntyping.ForwardRef('1')", "forbidden_name"),
        ("import functools\n@functools.singledispatch\ndef g(x): pass", "forbidden_name"),
        ("import functools\nfunctools.singledispatchmethod", "forbidden_name"),
        ("c_kernel.__annotations__", "forbidden_name"),
        ("import enum\nenum.bltns", "forbidden_name"),
    ],
)
def test_text_that_becomes_code_is_refused(candidate: Make, line: str, rule: str) -> None:
    """Annotations are text; what evaluates them would run what no static check has read."""
    report = _refused(candidate(replace=("class ModelNew", f"{line}\nclass ModelNew")))
    assert report is not None
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, rule)


def test_an_annotation_that_nobody_evaluates_is_text(candidate: Make) -> None:
    assert (
        _refused(candidate(replace=("def forward(self, x)", "def forward(self, x: 'torch.Tensor') -> 'object'")))
        is None
    )


@pytest.mark.parametrize("name", ["c", "cpp", "triton", "cuda-nvrtc"])
def test_text_that_is_in_no_file_is_no_program(candidate: Make, name: str) -> None:
    """A compiler's source would have to be encoded, and can't be."""
    report = _refused(Candidate(candidate().source + "\nHALF = '\\ud800'\n", name))
    assert report is not None
    assert (report.fault, report.rule) == (Fault.FORMAT_ERROR, "syntax")


_OTHER = "class Other(nn.Module):\n    def forward(self, x):\n        return x\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (_OTHER + "ModelNew = Other\n", None),
        (_OTHER + "Alias = Other\nModelNew = Alias\n", None),
        (_OTHER + "class ModelNew(Other):\n    pass\n", None),
        (_OTHER, "no_model"),
        (_OTHER + "ModelNew = Nothing\n", "no_model"),
        ("ModelNew = ModelNew\n", "no_model"),
        ("A = B\nB = A\nModelNew = A\n", "no_model"),
        ("class ModelNew(nn.Module):\n    pass\n", "no_forward"),
        ("class ModelNew(ModelNew):\n    pass\n", "no_forward"),
    ],
)
def test_the_module_may_have_another_name(text: str, rule: str | None) -> None:
    report = syntax.model_fault(ast.parse(text).body)
    assert (report and report.rule) == rule
