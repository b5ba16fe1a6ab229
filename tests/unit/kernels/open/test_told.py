"""A refusal teaches: what was seen, where, what rule in which policy, and what would pass. Every rule, every fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels import backends as package
from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, Verifier
from protocols.records import INFRASTRUCTURE_FAULTS, Candidate, Fault, Problem
from tests.unit.kernels.open.test_honest import CALLED, MADE, c

STATIC = {
    "c import": ("import torch\n", "import torch\nimport socket  # here\n", "socket"),
    "c forbidden_name": ("torch.empty_like(x)", "getattr(torch, 'empty_like')(x)  # here", "getattr"),
    "c no_kernel": ('c_kernel(SOURCE, "run")', "None", "c_kernel(source, name)"),
    "c kernel_source": ("c_kernel(SOURCE, ", "c_kernel(str(id(self)), ", "no constant"),
    "c include": ("void run", "#include <unistd.h> // here\nvoid run", "<unistd.h>"),
    "c asm": ("void run", 'void g(void) { __asm__("nop"); } // here\nvoid run', "inline assembly"),
    "c unknown_function": ('"run")', '"walk")', "'walk'"),
    "triton import": ("import torch\n", "import torch\nimport socket  # here\n", "socket"),
    "triton forbidden_name": ("x = x.contiguous()", "x = eval('x')  # here", "eval"),
    "triton no_kernel": ("@triton.jit", "", "@triton.jit"),
    "cuda-nvrtc no_kernel": ('cuda_kernel(SOURCE, "run")', "None", "cuda_kernel(source, name)"),
    "cuda-nvrtc kernel_source": ("cuda_kernel(SOURCE, ", "cuda_kernel(str(self), ", "literal source"),
    "cuda-nvrtc option": ('"run")', '"run", options=["-I/"])', "'-I/'"),
    "cuda-nvrtc unknown_function": ('"run")', '"walk")', "'walk'"),
    "cpp import": ("import torch\n", "import torch\nimport socket  # here\n", "socket"),
    "cpp forbidden_name": ("run(x.contiguous())", "run(eval('x'))  # here", "eval"),
    "cpp no_kernel": ("load_inline", "some", "compiles no extension"),
    "cpp flag": (", functions=", ", extra_cflags=['-fplugin=x.so'], functions=", "-fplugin=x.so"),
    "cpp extension": ('name="run"', f'name="{201 * "n"}" if (SOURCE := SOURCE + "// TORCH_LIBRARY") else ""', "name"),
    "cpp cuda_source": ("cpp_sources=SOURCE", "cpp_sources='', cuda_sources=SOURCE", "CUDA sources"),
}
"""By backend and rule: what breaks it in the contract's example, and what of it the message has to name. A line that
can be told in advance ends with `here`."""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


@pytest.mark.parametrize("case", STATIC)
def test_a_static_rule_says_what_it_saw_where_and_what_would_pass(builder: Builder, case: str) -> None:
    name, rule = case.split()
    old, new, seen = STATIC[case]
    example = extract(backend(name).contracts[""].partition("The module to replace:")[0]).source
    assert old in example
    source = example.replace(old, new)
    report = builder.build(Candidate(source, name))
    assert (report.fault, report.rule, report.rules) == (Fault.STATIC_VIOLATION, rule, "strict"), report
    assert seen in report.message
    line = re.search(r"line (\d+)(?: of the C source)?", report.message)
    assert line is not None, report.message
    if " here" in source:
        text = source.partition('SOURCE = r"""')[2] if "of the C source" in line[0] else source
        assert text.splitlines()[int(line[1]) - 1].endswith("here")
    assert report.hint.endswith((".", "forward."))


def test_these_are_all_rules() -> None:
    (folder,) = package.__path__
    said = re.compile(r'(?:CheckFailed|_Violation|_violation)\(\s*"(\w+)"|STATIC_VIOLATION,\s+"(\w+)"')
    found = said.findall("\n".join(path.read_text() for path in Path(folder).rglob("*.py")))
    assert {first or second for first, second in found} == {case.split()[1] for case in STATIC}


_SPIN = "void f(const float *x, float *y, long n) { volatile long i = 0; while (n) i++; }"
_FAR = "void f(const float *x, float *y, long n) { y[1L << 40] = x[0]; }"
FAULTS = {
    Fault.FORMAT_ERROR: "import torch\nx = 1\n",
    Fault.STATIC_VIOLATION: "",
    Fault.COMPILE_ERROR: c(head="float g = undeclared;"),
    Fault.RUNTIME_ERROR: c(forward=f"x.nothing; {CALLED}"),
    Fault.TIMEOUT: c(f"import os\nSPIN = '{_SPIN}'", init="self.f = c_kernel(SPIN, 'f')"),
    Fault.OUT_OF_MEMORY: c(forward=f"torch.ones(1 << 42); {CALLED}"),
    Fault.ILLEGAL_ACCESS: c(f"FAR = '{_FAR}'", init="self.f = c_kernel(FAR, 'f')"),
    Fault.INCORRECT: c(forward=f"{CALLED}; y = y[:1]"),
    Fault.CHEATING: c(init=MADE, forward="y = x * 2 + 1"),
    Fault.UNPROVEN: c("import numpy as np", forward="y = torch.from_numpy(x.numpy() * 2 + 1)"),
}
"""By fault a candidate that has it under `open`; of static violations see above."""


@pytest.mark.parametrize("fault", [fault for fault, source in FAULTS.items() if source])
def test_every_fault_says_what_was_seen_where_and_what_would_pass(
    free: Verifier, problem: Problem, fault: Fault
) -> None:
    verdict = free.verify(problem, FAULTS[fault]).verdict
    assert (verdict.fault, verdict.rules) == (fault, "open"), verdict
    assert verdict.hint.endswith("."), verdict
    assert re.search(r"\bline \d+|kernel\.\w+:\d+", verdict.message) or fault is Fault.FORMAT_ERROR, verdict


def test_these_are_all_faults_of_a_candidate() -> None:
    assert {*FAULTS, *INFRASTRUCTURE_FAULTS, Fault.OK} == {*Fault}
