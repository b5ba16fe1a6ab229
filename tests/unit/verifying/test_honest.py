"""Honest candidates in many styles pass check, build and bench; a defence that fails one of them is a bug."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from kbrl_async.building import Builder
from kbrl_async.verifying import Bench
from protocols.records import Candidate, Fault, Problem, Verdict

SOFTMAX = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return torch.softmax(x * self.weight, dim=-1)

def get_inputs():
    return [torch.randn(12, 67)]

def get_init_inputs():
    return [67]
"""

LINEAR = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.linear = nn.Linear(n, m)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(9, 31)]

def get_init_inputs():
    return [[31, 17], {}]
"""

TOP_TWO = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, index):
        return x.index_select(0, index), (x * 2, 3)

def get_inputs():
    return [torch.randn(5, 7), torch.randint(0, 5, (4,))]

def get_init_inputs():
    return []
"""

HEAD = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r\"\"\"
{source}
\"\"\"

class ModelNew(nn.Module):
    def __init__(self, {arguments}):
        super().__init__()
        {init}
        self.kernel = c_kernel(SOURCE, "kernel")

    def forward(self, {inputs}):
{forward}
"""

ROWS = """
void kernel(const float *x, const float *w, float *y, long rows, long cols) {
  PARALLEL
  for (long r = 0; r < rows; r++) {
    const float *a = x + r * cols; float *b = y + r * cols;
    TYPE m = -INFINITY, s = 0;
    for (long c = 0; c < cols; c++) { TYPE v = a[c] * w[c]; m = v > m ? v : m; }
    for (long c = 0; c < cols; c++) { TYPE e = EXP(a[c] * w[c] - m); b[c] = e; s += e; }
    for (long c = 0; c < cols; c++) b[c] /= s;
  }
}
"""


def rows(before: str = "#include <math.h>", kind: str = "float", exp: str = "expf", parallel: str = "") -> str:
    return before + ROWS.replace("TYPE", kind).replace("EXP", exp).replace("PARALLEL", parallel)


def softmax(source: str, forward: str = "") -> str:
    forward = (
        forward
        or """
        y = torch.empty_like(x)
        self.kernel(x, self.weight, y, x.shape[0], x.shape[1])
        return y
    """
    )
    body = textwrap.indent(textwrap.dedent(forward), " " * 8)
    init = "self.weight = nn.Parameter(torch.empty(dim))"
    return HEAD.format(source=source, arguments="dim", init=init, inputs="x", forward=body)


SCRATCH = (
    rows()
    .replace("{\n  \n", "{\n  static float scratch[4096];\n")
    .replace("b[c] = e;", "scratch[c] = e; b[c] = scratch[c];")
)
TILED = rows().replace(
    "for (long c = 0; c < cols; c++) b[c] /= s;",
    "for (long t = 0; t < cols; t += 16) for (long c = t; c < t + 16 && c < cols; c++) b[c] /= s;",
)
HELPERS = rows("#include <math.h>\nstatic inline float my_exp(float v) { return expf(v); }\n", exp="my_exp")
IN_PLACE = """
    y = torch.zeros(x.shape[0] * x.shape[1], dtype=x.dtype).view(x.shape)
    self.kernel(x, self.weight.detach(), y, x.size(0), x.size(1))
    return y
"""
REUSED_SCRATCH = """
    if not hasattr(self, "packed"):
        self.packed = self.weight.detach().clone()
    y = torch.empty(x.shape)
    self.kernel(x.contiguous(), self.packed, y, x.shape[0], x.shape[1])
    return y.reshape(x.shape)
"""

STYLES = {
    "plain": softmax(rows()),
    "openmp": softmax(rows(parallel="#pragma omp parallel for")),
    "openmp with threads asked for": softmax(rows(parallel="#pragma omp parallel for num_threads(4)")),
    "simd pragma": softmax(
        rows().replace("for (long c = 0; c < cols; c++) b", '_Pragma("omp simd") for (long c = 0; c < cols; c++) b')
    ),
    "restrict": softmax(rows().replace("float *x", "float *restrict x").replace("float *y", "float *restrict y")),
    "double accumulation": softmax(rows(kind="double", exp="exp")),
    "fast math pragma": softmax(rows('#pragma GCC optimize("Ofast")\n#include <math.h>')),
    "static scratch": softmax(SCRATCH),
    "tiled": softmax(TILED),
    "helper function": softmax(HELPERS),
    "zeros and a view": softmax(rows(), IN_PLACE),
    "packed weights kept": softmax(rows(), REUSED_SCRATCH),
    "intrinsics header": softmax(rows("#include <immintrin.h>\n#include <math.h>")),
}

LINEAR_SOURCE = """
void kernel(const float *x, const float *w, const float *b, float *y, long rows, long n, long m) {
  for (long r = 0; r < rows; r++) for (long j = 0; j < m; j++) {
    float s = b[j];
    for (long k = 0; k < n; k++) s += x[r * n + k] * w[j * n + k];
    y[r * m + j] = s > 0 ? s : 0;
  }
}
"""
LINEAR_FORWARD = """
        y = torch.empty(x.shape[0], self.linear.weight.shape[0])
        self.kernel(x, self.linear.weight, self.linear.bias, y, x.shape[0], x.shape[1], y.shape[1])
        return y
"""
GATHER_SOURCE = """
#include <stdint.h>
void kernel(const float *x, const int64_t *index, float *y, float *z, int rows, int chosen, int cols, float two) {
  for (int r = 0; r < chosen; r++) for (int c = 0; c < cols; c++) y[r * cols + c] = x[index[r] * cols + c];
  for (int i = 0; i < rows * cols; i++) z[i] = x[i] * two;
}
"""
GATHER_FORWARD = """
        y = torch.empty(index.shape[0], x.shape[1])
        z = torch.empty_like(x)
        self.kernel(x, index, y, z, x.shape[0], index.shape[0], x.shape[1], 2.0)
        return y, (z, 3)
"""


@pytest.fixture(scope="module")
def judge(bench: Bench, builder: Builder) -> Callable[[str, str], Verdict]:
    def run(problem: str, source: str) -> Verdict:
        candidate = Candidate(source, "c")
        report = builder.build(candidate)
        assert report.fault is Fault.OK, report.message
        paths = {key: builder.store.path(address) for key, address in report.artifacts.items()}
        assert None not in paths.values()
        return bench.evaluate(Problem("L1/02_honest", 1, "honest", problem), candidate, paths, timing=False).verdict

    return run


@pytest.mark.parametrize("style", STYLES)
def test_honest_styles_pass(judge: Callable[[str, str], Verdict], style: str) -> None:
    verdict = judge(SOFTMAX, STYLES[style])
    assert verdict.fault is Fault.OK, verdict.message


def test_a_library_module_may_hold_the_parameters(judge: Callable[[str, str], Verdict]) -> None:
    init = "self.linear = nn.Linear(n, m)"
    source = HEAD.format(source=LINEAR_SOURCE, arguments="n, m", init=init, inputs="x", forward=LINEAR_FORWARD)
    verdict = judge(LINEAR, source)
    assert verdict.fault is Fault.OK, verdict.message


def test_several_outputs_and_integer_inputs_pass(judge: Callable[[str, str], Verdict]) -> None:
    arguments = HEAD.format(
        source=GATHER_SOURCE, arguments="*none", init="pass", inputs="x, index", forward=GATHER_FORWARD
    )
    verdict = judge(TOP_TWO, arguments)
    assert verdict.fault is Fault.OK, verdict.message


def test_a_wrong_kernel_is_told_where_and_how_much(judge: Callable[[str, str], Verdict]) -> None:
    verdict = judge(SOFTMAX, softmax(rows().replace("long r = 0", "long r = 1")))
    assert verdict.fault is Fault.INCORRECT
    assert "of 804 values are wrong" in verdict.message
    assert verdict.max_abs_error is not None
    assert verdict.hint
