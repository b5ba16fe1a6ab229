"""The example in each backend's contract is a candidate that this backend takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.kernels import backends as package
from kbrl_async.kernels.backends import backend, backends, guess_backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from kbrl_async.rollouts.prompts import extract, render_prompt
from protocols.records import Candidate, Fault
from tests.suite import suite

IMPORTS, NAMES = "Import nothing but", "Refused wherever they stand in the Python code: "
_FLAGS = ", extra_cuda_cflags=['-ccbin=/x'], functions=", ", extra_cflags=['-fplugin=x.so'], functions="
_LONG = f'load_inline(name="{201 * "n"}" if (SOURCE := SOURCE + "// TORCH_LIBRARY") else ""'
BROKEN = {
    "c import": ("import torch", "import socket, torch", IMPORTS),
    "c forbidden_name": ("x.numel()", "getattr(x, 'numel')()", NAMES),
    "c no_kernel": ('c_kernel(SOURCE, "run")', "None", "declares its C code with `c_kernel`"),
    "c kernel_source": ("c_kernel(SOURCE", "c_kernel(str(id(self))", "Its source is a constant"),
    "c include": ("void run", "#include <unistd.h>\nvoid run", "The C code includes nothing but"),
    "c asm": ("void run", 'void g(void) { __asm__("nop"); }\nvoid run', "has no inline assembly"),
    "c forbidden_name in C": ("void run", "__attribute__((constructor)) void run", "Refused in it: constructor"),
    "c unknown_function": ('"run")', '"walk")', 'c_kernel(SOURCE, "run")'),
    "triton import": ("import torch", "import socket, torch", IMPORTS),
    "triton forbidden_name": ("x = x.contiguous()", "x = eval('x')", NAMES),
    "triton no_kernel": ("@triton.jit", "", "defines `@triton.jit` kernels"),
    "cuda-nvrtc import": ("import torch", "import socket, torch", IMPORTS),
    "cuda-nvrtc forbidden_name": ("x = x.contiguous()", "x = eval('x')", NAMES),
    "cuda-nvrtc no_kernel": ('cuda_kernel(SOURCE, "run")', "None", "declares device code with `cuda_kernel`"),
    "cuda-nvrtc kernel_source": (
        "cuda_kernel(SOURCE",
        "cuda_kernel(str(self)",
        "The CUDA source and the kernel's name are",
    ),
    "cuda-nvrtc option": ('"run")', '"run", options=["-I/"])', "options are those that change the code that is made"),
    "cuda-nvrtc unknown_function": ('"run")', '"walk")', 'cuda_kernel(SOURCE, "run")'),
    "cuda import": ("import torch", "import socket, torch", IMPORTS),
    "cuda forbidden_name": ("x.contiguous()", "eval('x')", NAMES),
    "cuda no_kernel": ("load_inline", "some", "builds them with `load_inline(cuda_sources"),
    "cuda flag": (", functions=", _FLAGS[0], "Compiler flags may optimise"),
    "cuda extension": ('load_inline(name="run"', _LONG, "an extension has a plain name"),
    "cpp import": ("import torch", "import socket, torch", IMPORTS),
    "cpp forbidden_name": ("x.contiguous()", "eval('x')", NAMES),
    "cpp no_kernel": ("load_inline", "some", "builds them with `load_inline(cpp_sources"),
    "cpp flag": (", functions=", _FLAGS[1], "Compiler flags may optimise"),
    "cpp cuda_source": (
        "cpp_sources=SOURCE",
        "cpp_sources='', cuda_sources=SOURCE",
        "builds them with `load_inline(cpp_sources",
    ),
}
"""By backend and rule: what breaks it in the example, and the contract's words for it."""
CONTRACTS = [f"{name} {kind}".strip() for name in backends() for kind in backend(name).contracts]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_example_of_a_contract_is_extracted_recognised_and_passes_the_static_checks(contract: str) -> None:
    problem = suite()[0]
    prompt = render_prompt("zero_shot", problem, contract)
    assert problem.source in prompt
    example = extract(prompt.partition("The module to replace:")[0]).source
    name = contract.split()[0]
    assert guess_backend(example) == name
    assert backend(name).check(Candidate(example, name)) is None


def test_every_backend_has_a_contract() -> None:
    assert {contract.split()[0] for contract in CONTRACTS} == set(backends())


def test_an_unknown_contract_is_named() -> None:
    with pytest.raises(ConfigError, match="none of the backends is called 'cute'"):
        render_prompt("zero_shot", suite()[0], "cute")


@pytest.mark.parametrize("rule", BROKEN)
def test_what_strict_refuses_the_contract_says(rule: str, tmp_path: Path) -> None:
    name, wanted = rule.split()[:2]
    old, new, words = BROKEN[rule]
    contract = backend(name).contracts[""]
    example = extract(contract.partition("The module to replace:")[0]).source
    candidate = Candidate(example.replace(old, new), name)
    found = backend(name).check(candidate)
    if found is None:
        with Builder(ArtifactStore(tmp_path)) as builder:
            found = builder.build(candidate)
    assert (found.fault, found.rule) == (Fault.STATIC_VIOLATION, wanted), found
    assert words in contract


def test_each_rule_of_strict_is_among_them() -> None:
    (folder,) = package.__path__
    texts = [path.read_text() for path in Path(folder).rglob("*.py")]
    said = re.compile(r'(?:CheckFailed|_Violation|_violation)\(\s*"(\w+)"|STATIC_VIOLATION,\s+"(\w+)"')
    rules = {first or second for text in texts for first, second in said.findall(text)}
    assert rules == {rule.split()[1] for rule in BROKEN}


@pytest.mark.parametrize("name", ["c", "cpp", "cuda", "cuda-nvrtc", "triton"])
def test_a_name_that_is_refused_stands_in_the_contract(name: str) -> None:
    contract = backend(name).contracts[""]
    example = extract(contract.partition("The module to replace:")[0]).source
    (told,) = re.findall(r"Refused wherever they stand in the Python code: (.*); and as attributes: (.*)\.\n", contract)
    listed = {word for part in told for word in part.split(", ")}
    asked = {*dir(__builtins__), "os", "sys", "gc", "inspect", "socket", "ctypes", "f_back", "_C", *listed} & {*listed}
    for word in sorted(asked):
        texts = (f"{word}\n{example}", f"torch.{word}\n{example}")
        assert any(backend(name).check(Candidate(text, name)) is not None for text in texts), word
