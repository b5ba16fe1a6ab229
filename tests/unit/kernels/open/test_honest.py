"""Honest kernels in the styles that people write: `open` takes them, `strict` names the rule and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.kernels.funnel import Verifier
from kbrl_async.kernels.funnel.verifier import read_text
from kbrl_async.kernels.problems.beside import pack
from protocols.records import Fault, Problem

C = r'''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel
{top}
SOURCE = r"""
{head}
void f(const float *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = 2 * x[i] + 1; }}
"""

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}
        return y
'''
MADE = 'self.f = c_kernel(SOURCE, "f")'
CALLED = "y = torch.empty_like(x); self.f(x.contiguous(), y, x.numel())"


def c(top: str = "", head: str = "", init: str = MADE, forward: str = CALLED) -> str:
    return C.format(top=top, head=head, init=init, forward=forward)


CPP_SOURCE = """
CPP = '''
#include <torch/extension.h>
torch::Tensor f(torch::Tensor x) {
    auto y = torch::empty_like(x);
    const float *from = x.data_ptr<float>();
    float *to = y.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++) to[i] = 2 * from[i] + 1;
    return y;
}
'''
"""
CPP = """
import os, sys, time, hashlib, pathlib, inspect, tempfile
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline, load
{source}
{top}
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}
"""
LOAD = 'load_inline(name="one", cpp_sources=CPP, functions=["f"])'
_MODULE = "class Impl(nn.Module):\n    def forward(self, x):\n        return x\n"


def cpp(top: str = "", init: str = "pass", forward: str = "return self.e.f(x.contiguous())") -> str:
    return CPP.format(source=CPP_SOURCE, top=top, init=init, forward=forward)


STYLES = {
    "imports": c("import os, sys, time, hashlib, pathlib, inspect, json, random, subprocess, ctypes, importlib, gc"),
    "its own file": c("import os\nHERE = os.path.dirname(os.path.abspath(__file__))\nassert open(__file__).read()"),
    "pathlib": c("from pathlib import Path\nassert 'class ModelNew' in Path(__file__).read_text()"),
    "inspect": c(forward="import inspect; assert 'forward' in inspect.getsource(type(self)); " + CALLED),
    "scratch": c("import tempfile, os\nwith tempfile.TemporaryDirectory() as d: open(d + '/a', 'w').write('a')"),
    "home": c("import pathlib\n(pathlib.Path.home() / '.cache' / 'mine').mkdir(parents=True, exist_ok=True)"),
    "a lock between processes": c(
        "import multiprocessing\nLOCK = multiprocessing.Lock()", forward=f"with LOCK: {CALLED}"
    ),
    "getattr": c(forward="y = getattr(torch, 'empty_like')(x); self.f(x.contiguous(), y, x.numel())"),
    "eval": c("N = eval('1 + 1')"),
    "numpy for sizes": c("import numpy as np\nSIZE = int(np.prod([2, 3]))"),
    "stdio": c(head="#include <stdio.h>\n#include <assert.h>"),
    "assembly": c(head='static inline void pause(void) { __asm__ volatile ("pause"); }'),
    "a source made at run time": c(
        "import random\ndef made():\n    return SOURCE.replace('f(', 'g(', random.randint(1, 1))",
        init='self.f = c_kernel(made(), "g")',
    ),
    "an operator of its own": c(
        init=MADE + "; custom.append(self.f)",
        forward="y = made(x)",
    ).replace(
        "class ModelNew",
        'custom = []\n@torch.library.custom_op("kbrl_honest::made", mutates_args=())\n'
        "def made(x: torch.Tensor) -> torch.Tensor:\n    y = torch.empty_like(x)\n"
        "    custom[0](x.contiguous(), y, x.numel())\n    return y\n\nclass ModelNew",
    ),
    "made lazily": c(init="self.f = None", forward=f'self.f = self.f or c_kernel(SOURCE, "f"); {CALLED}'),
    "an index by its own kernel": c(
        head="void g(long *y, long n) { for (long i = 0; i < n; i++) y[i] = i % 8; }",
        init=f'{MADE}; self.g = c_kernel(SOURCE, "g")',
        forward="[torch.full((999,), 1 << 40) for _ in range(99)]; "
        "at = torch.empty(999, dtype=torch.int64); self.g(at, 999); "
        "rows = torch.ops.aten.embedding_dense_backward(torch.zeros(999, 4), at, 8, -1, True); "
        f"{CALLED}; y += rows.sum()",
    ),
    "one buffer": c(
        init=f"{MADE}; self.y = None",
        forward="self.y = torch.empty_like(x) if self.y is None else self.y; "
        "y = self.y; self.f(x.contiguous(), y, x.numel())",
    ),
    "a model by another name": c().replace("class ModelNew", "class Impl") + "\nglobals()['ModelNew'] = Impl\n",
    "at import": cpp(f"EXT = {LOAD}", init="self.e = EXT"),
    "in __init__": cpp(init=f"self.e = {LOAD}"),
    "in forward": cpp(init="self.e = None", forward=f"self.e = self.e or {LOAD}; return self.e.f(x.contiguous())"),
    "behind a cache": cpp(
        f"import functools\n@functools.lru_cache(maxsize=None)\ndef ext():\n    return {LOAD}",
        forward="return ext().f(x.contiguous())",
    ),
    "two extensions": cpp(
        init=f"self.a = {LOAD}; self.b = None",
        forward=f"self.b = self.b or {LOAD.replace('one', 'two').replace('CPP', 'CPP + chr(10)')}; "
        "return self.a.f(x) if x.sum() < -1e30 else self.b.f(x.contiguous())",
    ),
    "a hashed name": cpp(
        init=f"n = 'k_' + hashlib.sha1(CPP.encode()).hexdigest()[:8]; self.e = {LOAD}".replace('"one"', "n")
    ),
    "a file of its own": cpp(
        init="p = os.path.join(tempfile.mkdtemp(), 'k.cpp'); open(p, 'w').write(CPP + 'PYBIND11_MODULE("
        "TORCH_EXTENSION_NAME, m) { m.def(\\\"f\\\", &f); }'); self.e = load(name='k', sources=[p])"
    ),
    "its folder is a build folder": cpp(
        init="d = pathlib.Path(__file__).parent / 'build'; d.mkdir(exist_ok=True); "
        + f"self.e = {LOAD}".replace("functions", "build_directory=str(d), functions")
    ),
    "its steps compiled by torch": c(
        init=MADE + "; self.g = torch.compile(self.inner)\n\n    def inner(self, x):\n"
        "        y = torch.empty_like(x)\n        self.f(x.contiguous(), y, x.numel())\n        return y\n",
        forward="y = self.g(x)",
    ),
    "beside C": cpp(
        "from kbrl_async.launch import c_kernel\n"
        "ONE = 'void g(float *y, long n) { for (long i = 0; i < n; i++) y[i] += 1; }'\nTWICE = CPP.replace(' + 1', '')",
        init=f"self.e = {LOAD.replace('CPP', 'TWICE')}; self.g = c_kernel(ONE, 'g')",
        forward="y = self.e.f(x.contiguous()); self.g(y, y.numel()); return y",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_honest_kernel_passes_whatever_its_style(free: Verifier, problem: Problem, style: str) -> None:
    result = free.verify(problem, STYLES[style])
    assert result.ok, (result.verdict, result.stages)
    assert result.verdict.rules == "open"


@pytest.mark.parametrize(("launcher", "fault"), [("cupy", Fault.UNPROVEN), ("json", Fault.CHEATING)])
def test_who_may_launch_where_nobody_counts_is_not_accused(
    free: Verifier, problem: Problem, launcher: str, fault: Fault
) -> None:
    text = c(f"try:\n    import {launcher}\nexcept ImportError:\n    pass", forward="y = 2 * x + 1")
    verdict = free.verify(problem, text).verdict
    assert (verdict.fault, verdict.rule) == (fault, "no_own_kernel"), verdict


@pytest.mark.parametrize(
    ("compiler", "fault"), [("backend=put_in", Fault.UNPROVEN), ('backend="eager"', Fault.CHEATING)]
)
def test_who_puts_its_kernels_in_when_torch_compiles_is_not_accused(
    free: Verifier, problem: Problem, compiler: str, fault: Fault
) -> None:
    """Where operators are seen torch compiles nothing: what its own compiler would launch is not."""
    made = "def put_in(graph, given):\n    def run(x):\n        y = torch.empty_like(x)\n"
    made += "        KERNEL(x.contiguous(), y, x.numel())\n        return (y,)\n    return run\n"
    told = f'KERNEL = c_kernel(SOURCE, "f")\n@torch.compile({compiler})\ndef spec(x):\n    return 2 * x + 1\n'
    text = c(made, forward="y = spec(x)").replace("class ModelNew", told + "\nclass ModelNew")
    verdict = free.verify(problem, text).verdict
    assert (verdict.fault, verdict.rule) == (fault, "no_own_kernel"), verdict


def test_a_helper_module_beside_it_goes_with_it(free: Verifier, problem: Problem, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .kernel import SOURCE\n")
    body = "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = 2 * x[i] + 1; }"
    (tmp_path / "parts" / "kernel.py").write_text(f"SOURCE = {body!r}\n")
    text = c("from parts import SOURCE as TOLD").replace("c_kernel(SOURCE", "c_kernel(TOLD")
    (tmp_path / "kernel.py").write_text(text)
    result = free.verify(problem, read_text(tmp_path / "kernel.py"))
    assert result.ok, result.verdict


def test_an_error_in_a_helper_module_is_told_with_its_place(free: Verifier, problem: Problem) -> None:
    helper = "def value(x):\n    found = []\n    return found[0]\n"
    text = pack(c("from parts.one import value", forward=f"value(x); {CALLED}"), {"parts/one.py": helper})
    verdict = free.verify(problem, text).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR
    lines = verdict.message.splitlines()
    assert "in forward: value(x)" in lines[0]
    assert lines[1:] == ["parts/one.py:3, in value: return found[0]", "IndexError: list index out of range"]


def test_a_source_beside_it_is_compiled(free: Verifier, problem: Problem) -> None:
    cpp_file = CPP_SOURCE.split("'''")[1] + 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f); }\n'
    made = 'self.e = load(name="k", sources=[str(pathlib.Path(__file__).with_name("k.cpp"))])'
    result = free.verify(problem, pack(cpp(init=made), {"k.cpp": cpp_file}))
    assert result.ok, result.verdict


@pytest.mark.parametrize(
    ("style", "rule"),
    [("imports", "import"), ("eval", "forbidden_name"), ("stdio", "include"), ("assembly", "asm")],
)
def test_strict_names_the_rule_the_line_and_the_cure(strict: Verifier, problem: Problem, style: str, rule: str) -> None:
    result = strict.verify(problem, STYLES[style])
    verdict, told = result.verdict, dict(result.rows())
    assert (verdict.fault, verdict.rule, verdict.rules) == (Fault.STATIC_VIOLATION, rule, "strict")
    assert "line " in verdict.message
    assert verdict.hint
    assert told["rule"] == f"{rule} (rules: strict)"
    assert "--rules open" in told["also passes"]


def test_a_kept_buffer_is_timed_too(free: Verifier, problem: Problem) -> None:
    result = free.verify(problem, STYLES["one buffer"], timing=True)
    assert result.ok, result.verdict
    assert result.timing is not None


def test_strict_wants_fresh_outputs(strict: Verifier, problem: Problem) -> None:
    verdict = strict.verify(problem, STYLES["one buffer"]).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "output_overwritten")


REPLACED = """
def own(x):
    y = torch.empty_like(x)
    {body}
    return y
library = torch.library.Library("aten", "IMPL")
library.impl("tanh", own, "CPU")
KERNEL = c_kernel(SOURCE, "f")
"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("KERNEL(x.contiguous(), y, x.numel())", Fault.OK),
        ("z = x * 2 + 1; KERNEL(x.contiguous(), y, x.numel()); y.copy_(z)", Fault.CHEATING),
    ],
)
def test_an_operator_of_the_librarys_that_it_replaces_is_its_own(
    free: Verifier, problem: Problem, body: str, fault: Fault
) -> None:
    text = c(forward="y = torch.tanh(x)").replace("\nclass ModelNew", REPLACED.format(body=body) + "\nclass ModelNew")
    verdict = free.verify(problem, text).verdict
    assert verdict.fault is fault, verdict
