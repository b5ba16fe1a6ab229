"""What an extension is, how it is found in a candidate, which flags it may have; nothing is compiled here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.inline.backend import diagnose, kernel_names
from kbrl_async.kernels.backends.inline.flags import FlagRefused, chosen
from kbrl_async.kernels.backends.inline.launch import Extension, Unit, file_extension, inline_extension
from kbrl_async.kernels.backends.inline.recording import read
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Candidate, Fault

_HEAD = "from torch.utils.cpp_extension import load_inline\n"
_MODEL = "\nclass ModelNew:\n    def forward(self, x):\n        return x\n"


def found(text: str) -> list[Extension] | None:
    return read(ast.parse(_HEAD + text))


def test_the_text_is_what_torch_would_compile() -> None:
    extension = inline_extension("ours", ["int a();", "int b();"], "k", functions={"a": "doc"})
    assert extension.units == (
        Unit(
            False,
            "#include <torch/extension.h>\nint a();\nint b();\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n"
            'm.def("a", torch::wrap_pybind_function(a), "doc");\n}',
        ),
        Unit(True, "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\nk"),
    )
    assert extension.with_cuda


def test_the_name_counts_only_where_the_source_spells_it() -> None:
    assert inline_extension("one", "x").key == inline_extension("two", "x").key
    by_hand = "PYBIND11_MODULE(one, m) {}"
    assert inline_extension("one", by_hand).key != inline_extension("two", by_hand).key


@pytest.mark.parametrize(
    "changed",
    [
        {"cpp_sources": "y"},
        {"cuda_sources": "k"},
        {"functions": ["f"]},
        {"extra_cflags": ["-O2"]},
        {"extra_cuda_cflags": ["-O2"]},
        {"extra_ldflags": ["-lcublas"]},
        {"with_cuda": True},
        {"no_implicit_headers": True},
    ],
)
def test_the_key_covers_what_reaches_a_compiler(changed: dict[str, Any]) -> None:
    assert inline_extension(**{"name": "n", "cpp_sources": "x"} | changed).key != inline_extension("n", "x").key


def test_files_count_by_what_they_hold(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.cu").write_text("the same")
    first, second = (file_extension("n", [str(tmp_path / folder / f"{folder}.cu")]) for folder in ("a", "b"))
    assert first.key == second.key
    assert first.with_cuda


@pytest.mark.parametrize(
    "text",
    [
        'e = load_inline(name="n", cpp_sources="x", functions=["f"])',
        'S = "x"\nF = ["f"]\ne = load_inline("n", S, functions=F)',
        'S = ("" + "x")\ne = load_inline(name="n", cpp_sources=[S], functions="f", verbose=True)',
        'N = "n"\ne = load_inline(name=N + "2", cpp_sources="x", functions={"f": "f"})',
    ],
)
def test_constants_are_read_without_running(text: str) -> None:
    assert found(text) == [inline_extension("n", "x", functions=["f"])]


@pytest.mark.parametrize(
    "text",
    [
        'S = "x"\nS = S + "y"\ne = load_inline("n", S)',
        'S = "x"\nS += "y"\ne = load_inline("n", S)',
        'S = "x"\nfor S in "ab": pass\ne = load_inline("n", S)',
        'S = "x"\ndef S(): pass\ne = load_inline("n", S)',
        'if True:\n    e = load_inline("n", "x")',
        'def make():\n    return load_inline("n", "x")',
        'e = load_inline("n", open("file").read())',
        'e = load_inline("n", **{"cpp_sources": "x"})',
        'a = load_inline("n", "x")\ndef later():\n    return load_inline("m", "y")',
        "e = 1",
    ],
)
def test_what_only_a_run_would_tell_is_not_guessed(text: str) -> None:
    assert found(text) is None


def test_an_extension_that_was_not_built_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.cpp_extension as loaders

    monkeypatch.setattr(loaders, "load_inline", None)
    monkeypatch.setattr(loaders, "load", None)
    inline.install({"inline:other": "nowhere.so"})
    with pytest.raises(RuntimeError, match="was not built"):
        loaders.load_inline(name="n", cpp_sources="x")


def test_without_artifacts_torch_keeps_its_loaders() -> None:
    import torch.utils.cpp_extension as loaders

    before = loaders.load_inline
    inline.install({})
    assert loaders.load_inline is before
    assert sys.modules["torch.utils.cpp_extension"].load_inline is before


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import subprocess\n" + _HEAD + _MODEL, "import"),
        ("import os\nos.system('ls')\n" + _HEAD + _MODEL, "forbidden_name"),
        ("from os import fork\n" + _HEAD + _MODEL, "import"),
        ("import sys\nx = sys.modules\n" + _HEAD + _MODEL, "forbidden_name"),
        ("from sys import modules\n" + _HEAD + _MODEL, "import"),
        ("from torch.utils._python_dispatch import TorchDispatchMode\n" + _HEAD + _MODEL, "import"),
        ("import torch._C\n" + _HEAD + _MODEL, "import"),
        (_HEAD + "x = torch._C\n" + _MODEL, "forbidden_name"),
        (_HEAD + "x = load_inline.__wrapped__\n" + _MODEL, "forbidden_name"),
        (_HEAD + "eval('1')" + _MODEL, "forbidden_name"),
        (_HEAD + "x = ().__class__.__mro__" + _MODEL, "forbidden_name"),
        ("import torch" + _MODEL, "no_kernel"),
        (_HEAD, "no_model"),
        (_HEAD + "class ModelNew:\n    pass", "no_forward"),
        ("def (", "syntax"),
    ],
)
def test_static_checks_name_their_rule(text: str, rule: str) -> None:
    report = backend("cuda").check(Candidate(text, "cuda"))
    assert report is not None
    assert report.rule == rule


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['TORCH_CUDA_ARCH_LIST'] = '9.0'\nimport torch\n" + _HEAD + _MODEL,
        "import torch.utils.cpp_extension as ext\nimport tempfile, hashlib\nm = ext.load_inline" + _MODEL,
        "from torch.utils.cpp_extension import load as build\nimport torch.nn.functional as F\n" + _MODEL,
        _HEAD + "try:\n    import triton\nexcept ImportError:\n    triton = None\n" + _MODEL,
    ],
)
def test_legitimate_styles_pass_the_static_checks(text: str) -> None:
    assert backend("cuda").check(Candidate(text, "cuda")) is None


def _with(**flags: tuple[str, ...]) -> Extension:
    return Extension("n", (Unit(True, ""),), with_cuda=True, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flags",
    [
        {"cflags": ("-O3", "-march=native", "-ffast-math", "-DN=3", "-std=c++17", "-Wall", "")},
        {"cuda_cflags": ("-O3", "--use_fast_math", "-Xptxas", "-O3,-v", "--ptxas-options=-v", "-lineinfo")},
        {"cuda_cflags": ("-Xcompiler -fPIC", "-gencode arch=compute_80,code=sm_80", "--expt-relaxed-constexpr")},
        {"cuda_cflags": ("-maxrregcount=64", "--extended-lambda", "-U__CUDA_NO_HALF_OPERATORS__", "--fmad=false")},
        {"ldflags": ("-lcublas -lcudart", "-L/usr/local/cuda/lib64", "-Wl,-rpath,/usr/local/cuda/lib64", "-fopenmp")},
    ],
)
def test_ordinary_flags_are_accepted(flags: dict[str, tuple[str, ...]]) -> None:
    assert chosen(_with(**flags), "sm_90").arch == "sm_90"


def test_a_library_named_among_a_compilers_flags_is_linked() -> None:
    flags = chosen(_with(cflags=("-O3 -lm",), cuda_cflags=("-lcublas", "-lineinfo")), "sm_90")
    assert (flags.libraries, flags.host, flags.nvcc) == (["m", "cublas"], ["-O3"], ["-lineinfo"])
    flags = chosen(_with(cuda_cflags=("-Xptxas", "-lm", "-O3")), "sm_90")
    assert (flags.libraries, flags.nvcc) == ([], ["-Xptxas", "-lm", "-O3"]), "an option's value is no flag"
    with pytest.raises(FlagRefused, match="-levil"):
        chosen(_with(cuda_cflags=("-levil",)), "sm_90")


@pytest.mark.parametrize("ldflags", [(), ("-fopenmp",), ("-lgomp",)])
def test_openmp_is_linked_where_it_is_compiled(ldflags: tuple[str, ...]) -> None:
    flags = chosen(_with(cflags=("-O3", "-fopenmp"), ldflags=ldflags), "sm_90")
    assert flags.link == ["-fopenmp"]
    assert chosen(_with(cflags=("-O3",)), "sm_90").link == []


@pytest.mark.parametrize(
    "flags",
    [
        {"cflags": ("-fplugin=evil.so",)},
        {"cflags": ("-B/tmp",)},
        {"cflags": ("@/etc/passwd",)},
        {"cflags": ("-include", "/etc/passwd")},
        {"cflags": ("-Wl,-init,evil",)},
        {"cflags": ("-wrapper", "sh")},
        {"cuda_cflags": ("-ccbin", "evil")},
        {"cuda_cflags": ("-Xcompiler", "-fplugin=evil.so")},
        {"cuda_cflags": ("-Xcompiler=-Wp,-include,/etc/passwd",)},
        {"cuda_cflags": ("--options-file", "x")},
        {"ldflags": ("-levil",)},
        {"ldflags": ("/lib/evil.so",)},
        {"ldflags": ("-Wl,-init,evil",)},
        {"include_paths": ("/etc",)},
    ],
)
def test_flags_that_read_or_run_are_refused(flags: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(FlagRefused):
        chosen(_with(**flags), "sm_90")


def test_a_candidate_learns_which_flag_was_refused() -> None:
    text = _HEAD + 'e = load_inline("n", "x", extra_cflags=["-fplugin=evil.so"])' + _MODEL
    report = backend("cpp").build(Candidate(text, "cpp"), None, _NoContext())  # type: ignore[arg-type]
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, "flag")
    assert "-fplugin=evil.so" in report.message


class _NoContext:
    """Nothing may be built with it."""

    farm = CompileFarm()


def test_cuda_sources_need_the_cuda_backend() -> None:
    text = _HEAD + 'e = load_inline("n", "x", cuda_sources="k")' + _MODEL
    report = backend("cpp").build(Candidate(text, "cpp"), None, _NoContext())  # type: ignore[arg-type]
    assert report.rule == "cuda_source"


@pytest.mark.parametrize(("asked", "arch"), [("sm_90a", "sm_90a"), ("sm_80", "sm_90"), ("sm_100a", "sm_90")])
def test_the_architecture_is_the_benchs(asked: str, arch: str) -> None:
    number = asked.removeprefix("sm_")
    flags = chosen(_with(cuda_cflags=(f"-gencode=arch=compute_{number},code={asked}", "-O3")), "sm_90")
    assert (flags.arch, flags.nvcc) == (arch, ["-O3"])


def test_kernels_are_named() -> None:
    text = """
    // __global__ void commented(int a)
    __global__ void plain(int a) {}
    template <typename T> static __global__ void __launch_bounds__(256, (2)) bounded(T a) {}
    __global__ __launch_bounds__(THREADS) void
    broken_line (int a) {}
    extern "C" __global__ void plain(int);
    """
    assert kernel_names(Extension("n", (Unit(True, text),))) == ["plain", "bounded", "broken_line"]


def test_functions_of_a_cpu_extension_are_named() -> None:
    assert kernel_names(inline_extension("n", "int f();", functions=["f", "g"])) == ["f", "g"]


def test_messages_tell_nothing_of_our_folders() -> None:
    diagnosis = diagnose('/builds/0/cuda.cu(7): error: expected a ";"\n1 error detected\nnote: nothing')
    assert diagnosis.message.splitlines()[0] == 'cuda.cu(7): error: expected a ";"'
    assert "semicolons" in diagnosis.hint


FORGED_RECORD = """
import os, sys
import msgspec
import torch
from torch.utils.cpp_extension import load_inline
from kbrl_async.kernels.backends.launch import bundle

def forge(files):
    open("bundle", "wb").write(bundle._MAGIC + msgspec.msgpack.encode([["asked", files]]))
    frame = sys._getframe()
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["channel"].send(msgspec.msgpack.encode({"error": ""}))
    os._exit(0)

forge(EXTENSIONS)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x
"""


@pytest.mark.parametrize(
    "extensions",
    [
        "b'x'",
        "b'\\x91' * 100_000 + b'\\x90'",
        "msgspec.msgpack.encode({'extensions': [{'name': 'e', 'units': []}], 'c': [], 'cuda': []})",
        "msgspec.msgpack.encode({'extensions': [], 'c': [7], 'cuda': []})",
    ],
)
def test_a_record_that_no_recorder_wrote_is_the_candidates_fault(warm_builder: Builder, extensions: str) -> None:
    candidate = Candidate(FORGED_RECORD.replace("EXTENSIONS", extensions), "cpp")
    report = backend("cpp").build(candidate, None, warm_builder.context)
    assert (report.fault, report.rule) == (Fault.CHEATING, "forged_result")


@pytest.mark.parametrize("name", ["e\\0", "e" * 5000])
def test_a_name_that_no_command_can_hold_is_refused(warm_builder: Builder, name: str) -> None:
    source = f'from torch.utils.cpp_extension import load_inline\nX = load_inline("{name} x", "int f();")\n'
    source += "class ModelNew:\n  def forward(self, x): return x\n"
    report = warm_builder.build(Candidate(source, "cpp"))
    assert (report.fault, report.rule) == (Fault.STATIC_VIOLATION, "extension")


def test_flags_that_no_command_can_hold_are_refused() -> None:
    with pytest.raises(FlagRefused):
        chosen(Extension("e", (), cflags=("-DX=" + "1" * 200_000,)), "sm_90")
