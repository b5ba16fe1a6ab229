"""Sanitizers see what a right answer hides, and say nothing of clean kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.c.sanitize import driver
from kbrl_async.kernels.backends.sanitize import parts
from kbrl_async.kernels.backends.sanitize.parts import Argument, RecordedLaunch, Sanitized
from kbrl_async.kernels.backends.sanitize.reports import GPU_EXIT, asan, compute_sanitizer, ubsan
from kbrl_async.kernels.backends.sanitize.sanitize import Sanitizer, gpu_command
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault, Problem

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.weight

def get_inputs():
    return [torch.randn(5, 33)]

def get_init_inputs():
    return [33]
"""

CANDIDATE = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
C_SOURCE
"""

class ModelNew(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.f = c_kernel(SOURCE, "f")

    def forward(self, x):
        y = torch.empty_like(x)
        self.f(x, self.weight, y, x.shape[0], x.shape[1], 1.0)
        return y
'''
HEAD = "void f(const float *x, const float *w, float *y, long rows, int cols, float scale) {\n"
BODY = "  for (long i = 0; i < rows * cols; i++) y[i] = x[i] * w[i % cols] * scale;\n"
Sanitize = Callable[[str], Sanitized]


@pytest.fixture(scope="module")
def sanitize(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sanitize]:
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    problem = Problem("L1/01_x", 1, "x", PROBLEM)
    with Builder(store) as builder, Sanitizer(store) as sanitizer:

        def run(c_source: str) -> Sanitized:
            candidate = Candidate(CANDIDATE.replace("C_SOURCE", c_source), "c")
            report = builder.build(candidate, problem)
            assert report.fault is Fault.OK, report
            paths: dict[str, Path] = {k: p for k, a in report.artifacts.items() if (p := store.path(a)) is not None}
            return sanitizer.run(problem, candidate, paths)

        yield run


def test_a_clean_kernel_is_clean(sanitize: Sanitize) -> None:
    own_memory = "  float *t = malloc(rows * sizeof *t); memset(t, 0, rows * sizeof *t);\n"  # a leak is no finding
    threads = "#pragma omp parallel for\n"
    found = sanitize(HEAD + own_memory + threads + BODY + "}")
    assert (found.findings, found.not_run, found.ran) == ((), "", ("asan", "ubsan"))


@pytest.mark.parametrize(
    ("line", "rule", "words"),
    [
        ("y[rows * cols] = 0;", "heap-buffer-overflow", "write of 4 bytes in f, line 7"),
        ("y[0] += 0 * w[cols];", "heap-buffer-overflow", "read of 4 bytes"),
        ("volatile float t[4]; t[rows - 1] = 0;", "stack-buffer-overflow", "write of 4 bytes"),
    ],
)
def test_an_access_that_a_right_answer_hides_is_found(sanitize: Sanitize, line: str, rule: str, words: str) -> None:
    found = sanitize("// a comment\n" + HEAD + BODY + f"  {line}\n}}")
    finding = found.findings[0]
    assert finding.rule == f"sanitizer:{rule}", found
    assert finding.fault is Fault.ILLEGAL_ACCESS
    assert words in finding.message
    assert "/tmp" not in finding.evidence


def test_the_kernel_of_a_backward_is_run_too(tmp_path: Path) -> None:
    source = BODY + "  if (scale < 0) y[rows * cols] = 0;\n}\n"
    with_backward = CANDIDATE.replace("C_SOURCE", HEAD + source).replace(
        "    def forward(self, x):\n        y = torch.empty_like(x)\n"
        "        self.f(x, self.weight, y, x.shape[0], x.shape[1], 1.0)\n        return y\n",
        "    def forward(self, x):\n        return Scaled.apply(x, self.weight, self.f)\n\n"
        "class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, weight, f):\n"
        "        ctx.f, ctx.weight = f, weight\n        y = torch.empty_like(x)\n"
        "        f(x, weight, y, x.shape[0], x.shape[1], 1.0)\n        return y\n\n    @staticmethod\n"
        "    def backward(ctx, g):\n        d = torch.empty_like(g)\n"
        "        ctx.f(g.contiguous(), ctx.weight, d, g.shape[0], g.shape[1], -1.0)\n        return d, None, None\n",
    )
    problem = Problem("L5/01_x", 5, "x", PROBLEM + '\nBACKWARD = "inputs"\n')
    store = ArtifactStore(tmp_path)
    with Builder(store) as builder, Sanitizer(store) as sanitizer:
        report = builder.build(Candidate(with_backward, "c"), problem)
        paths = {key: path for key, address in report.artifacts.items() if (path := store.path(address)) is not None}
        found = sanitizer.run(problem, Candidate(with_backward, "c"), paths)
    assert [finding.rule for finding in found.findings] == ["sanitizer:heap-buffer-overflow"], found


UNDEFINED = {
    "signed-integer-overflow": "volatile int big = 2147483647; big = big + cols;",
    "misaligned-access": "*(volatile int *)((char *)y + 1) = 0; y[0] = 0;",
    "invalid-shift": "volatile int one = 1; one = one << cols;",
    "division-by-zero": "volatile int none = 0; if (scale < 0) none = cols / none;",
    "index-out-of-bounds": "static volatile int t[4]; if (scale > 0) (void)t[rows];",
}


def test_undefined_behaviour_is_found_line_by_line(sanitize: Sanitize) -> None:
    found = sanitize(HEAD + BODY + "\n".join(f"  {{ {line} }}" for line in UNDEFINED.values()) + "\n}")
    rules = {f.rule.removeprefix("sanitizer:"): f for f in found.findings if f.fault is Fault.RUNTIME_ERROR}
    assert set(UNDEFINED) - set(rules) == {"division-by-zero"}, "the division is never reached"
    assert "shift exponent 33" in rules["invalid-shift"].message


def test_a_kernel_that_crashes_is_still_explained(sanitize: Sanitize) -> None:
    found = sanitize(HEAD + BODY + "  *(volatile float *)(16 * rows) = 0;\n}")
    assert [f.rule for f in found.findings] == ["sanitizer:SEGV"]


def test_a_backend_that_no_sanitizer_knows_is_said(tmp_path: Path) -> None:
    with Sanitizer(ArtifactStore(tmp_path)) as sanitizer:
        found = sanitizer.run(Problem("x", 1, "x", PROBLEM), Candidate("", "cuda"), {})
    assert found.not_run == "there is no sanitizer for cuda on cpu"


CPP = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
torch::Tensor f(torch::Tensor x, torch::Tensor w) {
  auto y = torch::empty_like(x);
  float *b = y.data_ptr<float>();
  for (long i = 0; i < x.numel(); i++) b[i] = x.data_ptr<float>()[i] * w.data_ptr<float>()[i % w.numel()];
  b[x.numel()] = 0;
  return y;
}
"""
extension = load_inline(name="extension", cpp_sources=SOURCE, functions=["f"])

class ModelNew(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return extension.f(x, self.weight)
'''


def test_an_extension_is_run_by_a_python_under_asan(tmp_path: Path) -> None:
    with Sanitizer(ArtifactStore(tmp_path)) as sanitizer:
        found = sanitizer.run(Problem("L1/01_x", 1, "x", PROBLEM), Candidate(CPP, "cpp"), {})
    assert [(f.rule, "write of 4 bytes in f, line 7" in f.message) for f in found.findings] == [
        ("sanitizer:heap-buffer-overflow", True)
    ], found


def test_the_driver_passes_numbers_to_the_last_bit() -> None:
    arguments = [Argument("float *y", 0, 8), Argument("float a", value=0.1), Argument("double b", value=float("inf"))]
    text = driver([RecordedLaunch(3, "key", "g", [*arguments, Argument("long n", value=-7)], [64])])
    assert "void g(void *, float, double, long long);" in text
    assert f"g((char *)b3_0 + 8, (float){(0.1).hex()}, (double)__builtin_inf(), (long long)-7LL);" in text
    assert 'load("call-3-0.bin", 64u)' in text


GPU_WORDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at add(float *)+0x70 in /tmp/x.cu:7
=========     by thread (33,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
========= Error: Race reported between Write access at softmax+0x80 and Read access at softmax+0x90
========= Program hit cudaErrorIllegalAddress (error 700) due to "an illegal memory access" on CUDA API call
========= ERROR SUMMARY: 4 errors
"""


def test_what_compute_sanitizer_says_becomes_findings() -> None:
    rules = [finding.rule.removeprefix("sanitizer:") for finding in compute_sanitizer("memcheck", GPU_WORDS)]
    assert rules == ["invalid-global-write", "uninitialized-global-read", "data-race", "api-error"]
    first = compute_sanitizer("memcheck", GPU_WORDS)[0]
    assert "by thread (33,0,0)" in first.evidence
    assert "/tmp" not in first.evidence


def test_words_without_complaint_are_no_findings() -> None:
    assert compute_sanitizer("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed\n") == []
    assert asan("all fine") == []
    assert ubsan("kernel0.c: In function f") == []


def test_the_gpu_command_runs_one_tool_over_the_model() -> None:
    command = gpu_command("/opt/compute-sanitizer", "racecheck", "task.json")
    assert command[:3] == ["/opt/compute-sanitizer", "--tool", "racecheck"]
    assert command[command.index("--error-exitcode") + 1] == str(GPU_EXIT)
    assert command[-3:] == ["-m", "kbrl_async.kernels.backends.sanitize.recording", "task.json"]


TRAP = '''
import json
import os
import sys

import torch
from kbrl_async.kernels.backends.c.launch import source_key

KERNEL = r"""C_SOURCE"""
OTHER = "void g(void) {}"
CALLS = [
    {"index": i, "source_key": source_key(s), "name": n, "arguments": [], "buffers": []}
    for i, (s, n) in enumerate([(KERNEL, "f"), (OTHER, "g")])
]

class ModelNew(torch.nn.Module):
    def __init__(self, n):
        super().__init__()

    def forward(self, x):
        frame = sys._getframe()
        while "task" not in frame.f_locals:
            frame = frame.f_back
        os.chdir(frame.f_locals["task"].folder)
        LEAVE
        os._exit(0)
'''


def of_trap(folder: Path, leave: str, c_source: str = "") -> Sanitized:
    source = TRAP.replace("LEAVE", leave).replace("C_SOURCE", c_source)
    with Sanitizer(ArtifactStore(folder)) as sanitizer:
        return sanitizer.run(Problem("L1/01_x", 1, "x", PROBLEM), Candidate(source, "c"), {})


@pytest.mark.timeout(60)
def test_a_recording_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    found = of_trap(tmp_path, 'os.mkfifo("calls.json")')
    assert found.not_run == "the model ended before its first kernel call"


PLANT = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
void f(void) {
  char name[4096];
  const char *names[] = {"kernel.c", "main.c", "kernel1.c", "main1.c"};
  for (int i = 0; i < 4; i++) {
    snprintf(name, sizeof name, "%s", program_invocation_name);
    strcpy(strrchr(name, '/') + 1, names[i]);
    unlink(name);
    if (symlink("VICTIM", name)) *(volatile int *)0 = 0;
  }
}
"""


@pytest.mark.parametrize("planter", ["the recorded model", "the kernel of the first program"])
def test_no_source_is_written_through_a_link_that_a_candidate_left(tmp_path: Path, planter: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("ours")
    names = ["kernel.c", "main.c", "kernel0.c", "main0.c"] if planter == "the recorded model" else []
    links = f'[os.symlink("{victim}", name) for name in {names}]; '
    write = 'open("calls.json", "w").write(json.dumps({"calls": CALLS}))'
    c_source = "void f(void) {}" if names else PLANT.replace("VICTIM", str(victim))
    found = of_trap(tmp_path, links + write, c_source)
    assert victim.read_text() == "ours"
    assert (found.findings, found.not_run, found.ran) == ((), "", ("asan", "ubsan"))


PLAIN = {
    "index": 0,
    "source_key": "k",
    "name": "f",
    "arguments": [{"declared": "float *x", "buffer": 0, "offset": 4}, {"declared": "long n", "value": 7}],
    "buffers": [64],
}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "f(); system"},
        {"name": "ﬀ"},
        {"index": 3},
        {"index": -1},
        {"buffers": [-1]},
        {"buffers": [1 << 63]},
        {"arguments": [{"declared": "", "buffer": 1}]},
        {"arguments": [{"declared": "", "buffer": -2}]},
        {"arguments": [{"declared": "", "buffer": 0, "offset": -8}]},
        {"arguments": [{"declared": "float a", "value": 10**400}]},
        {"arguments": [{"declared": "float a", "value": "1"}]},
    ],
)
def test_a_recording_that_no_recorder_wrote_is_none(change: dict[str, object]) -> None:
    """The candidate ran beside it; its names and numbers become a program of ours."""
    assert parts.read(json.dumps({"calls": [PLAIN]}).encode()) is not None
    assert parts.read(json.dumps({"calls": [PLAIN | change]}).encode()) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'{"calls": ' + b"[" * 100_000, b'{"calls": ' + b"1" * 4400 + b"}"])
def test_noise_is_no_recording(data: bytes) -> None:
    assert parts.read(data) is None
