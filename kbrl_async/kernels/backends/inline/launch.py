"""torch's `load_inline` and `load`, answered from what was built elsewhere.

::

    load_inline(name, cpp_sources, …) ─▶ Extension (what would be compiled) ─key─▶ built artifact ─▶ module
                                                                                  └─ unknown: RuntimeError

The compile farm and the bench make the same `Extension` from the same arguments, so its key finds the artifact. Outside
a sandbox nothing of this is active: there a candidate meets torch's own functions and compiles as always.

Invariants
* The key covers everything that reaches a compiler; the extension's name only where the source depends on it.
* Every call of an extension's function, and of a method of its classes, passes through `RECORDER`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.kernels.backends.launch.recorder import RECORDER

PREFIX = "inline:"
ANY_NAME = "kbrl_extension"
_CPP_HEADERS = ("#include <torch/extension.h>",)
_CUDA_HEADERS = ("#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>")
_CUDA_SUFFIXES = (".cu", ".cuh")
_OWN_NAME = re.compile(r"PYBIND11_MODULE\s*\(\s*(?!TORCH_EXTENSION_NAME\b)\w+|TORCH_LIBRARY")
Flags = tuple[str, ...]


class Unit(msgspec.Struct, frozen=True):
    """One translation unit."""

    is_cuda: bool
    text: str


class Extension(msgspec.Struct, frozen=True):
    """What one call of `load_inline` or `load` would compile."""

    name: str
    units: tuple[Unit, ...]
    cflags: Flags = ()
    cuda_cflags: Flags = ()
    ldflags: Flags = ()
    include_paths: Flags = ()
    with_cuda: bool = False
    functions: tuple[str, ...] = ()
    """Names that get generated bindings."""

    @property
    def key(self) -> str:
        return PREFIX + hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def inline_extension(
    name: str,
    cpp_sources: str | list[str],
    cuda_sources: str | list[str] | None = None,
    sycl_sources: str | list[str] | None = None,
    functions: str | list[str] | dict[str, str] | None = None,
    extra_cflags: list[str] | None = None,
    extra_cuda_cflags: list[str] | None = None,
    extra_sycl_cflags: list[str] | None = None,
    extra_ldflags: list[str] | None = None,
    extra_include_paths: list[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
) -> Extension:
    """The extension of a `load_inline` call. Raises what torch would raise for arguments that mean nothing."""
    if sycl_sources:
        raise RuntimeError("SYCL sources are not supported")
    cpp, cuda = _texts(cpp_sources), _texts(cuda_sources)
    bound = _bound(functions)
    parts = [*(() if no_implicit_headers else _CPP_HEADERS), *cpp]
    if functions is not None:
        call = "torch::wrap_pybind_function({})" if with_pytorch_error_handling else "{}"
        defined = [f'm.def("{key}", {call.format(key)}, "{doc}");' for key, doc in bound.items()]
        parts += ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *defined, "}"]
    units = [Unit(False, "\n".join(parts))]
    if cuda:
        units.append(Unit(True, "\n".join([*(() if no_implicit_headers else _CUDA_HEADERS), *cuda])))
    return Extension(
        _name(name, units),
        tuple(units),
        _flags(extra_cflags),
        _flags(extra_cuda_cflags),
        _flags(extra_ldflags),
        _flags(extra_include_paths),
        bool(cuda) if with_cuda is None else bool(with_cuda),
        tuple(bound),
    )


def file_extension(
    name: str,
    sources: str | list[str],
    extra_cflags: list[str] | None = None,
    extra_cuda_cflags: list[str] | None = None,
    extra_sycl_cflags: list[str] | None = None,
    extra_ldflags: list[str] | None = None,
    extra_include_paths: list[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> Extension:
    """The extension of a `load` call: the files' contents count, not where they lie."""
    paths = [Path(sources)] if isinstance(sources, str) else [Path(path) for path in sources]
    units = [Unit(path.suffix in _CUDA_SUFFIXES, path.read_text()) for path in paths]
    has_cuda = any(unit.is_cuda for unit in units)
    return Extension(
        _name(name, units),
        tuple(units),
        _flags(extra_cflags),
        _flags(extra_cuda_cflags),
        _flags(extra_ldflags),
        _flags(extra_include_paths),
        has_cuda if with_cuda is None else bool(with_cuda),
    )


def replace_loaders(answer: Callable[[Extension, bool], Any]) -> None:
    """For the rest of this process, torch's loaders ask `answer(extension, is_python_module)`."""
    import torch.utils.cpp_extension as cpp_extension

    def loader(describe: Callable[..., Extension]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            return answer(describe(*args, **kwargs), kwargs.get("is_python_module", True))

        return load

    cpp_extension.load_inline = loader(inline_extension)
    cpp_extension.load = loader(file_extension)


def install(artifacts: dict[str, str]) -> None:
    """Called in a confined child: answer with these artifacts (`Extension.key` → path)."""
    if not artifacts:
        return
    loaded: dict[str, Any] = {}

    def answer(extension: Extension, is_python_module: bool) -> Any:
        key = extension.key
        if key not in artifacts:
            raise RuntimeError(
                "this extension was not built: its sources or flags differ from those seen when compiling"
            )
        if key not in loaded:
            loaded[key] = _load(extension.name, artifacts[key], is_python_module)
        return loaded[key]

    replace_loaders(answer)


class ExtensionModule(types.ModuleType):
    """What a candidate gets instead of the extension: the same names, their calls proven."""


def _load(name: str, path: str, is_python_module: bool) -> Any:
    before = _operators()
    try:
        return _loaded(name, path, is_python_module)
    finally:
        for operator in _operators() - before:
            _prove_operator(*operator.split("::"))


def _loaded(name: str, path: str, is_python_module: bool) -> Any:
    import torch

    if not is_python_module:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        return None
    loader = importlib.machinery.ExtensionFileLoader(name, path)  # whatever the file is called
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    module = ExtensionModule(name, built.__doc__)
    for key, value in vars(built).items():
        if key.startswith("__"):
            continue
        if isinstance(value, type):
            _prove_methods(value)
        setattr(module, key, _proven(key, value) if isinstance(value, types.BuiltinFunctionType) else value)
    return module


def _prove_methods(made: type) -> None:
    """Of a class that the extension defines."""
    for name, member in list(vars(made).items()):
        if type(member).__name__ == "instancemethod" and (name == "__call__" or not name.startswith("__")):
            setattr(made, name, _proven(f"{made.__name__}.{name}", member))


def _operators() -> set[str]:
    """Without their overloads."""
    import torch

    binding: Any = torch._C
    return {name.partition(".")[0] for name in binding._dispatch_get_all_op_names()}


def _prove_operator(space: str, name: str) -> None:
    """One that is registered for all devices at once: torch calls what is behind it before a dispatch mode sees it."""
    import torch

    packet: Any = getattr(getattr(torch.ops, space), name, None)  # none: only functions of it are registered
    for overload in packet.overloads() if packet is not None else ():
        made = getattr(packet, overload)
        if made.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            made._op = packet._op = _proven(made.name(), made._op)


def _proven(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, assigned=("__doc__", "__name__"), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return RECORDER.proven(name, function, args, kwargs)

    return call


def _name(name: str, units: list[Unit]) -> str:
    """Any name builds the same module, unless the source spells it or it is none."""
    depends = any(_OWN_NAME.search(unit.text) for unit in units)
    return name if depends or not name.isidentifier() else ANY_NAME


def _texts(sources: str | list[str] | None) -> list[str]:
    if sources is None:
        return []
    return [sources] if isinstance(sources, str) else list(sources)


def _bound(functions: str | list[str] | dict[str, str] | None) -> dict[str, str]:
    if functions is None:
        return {}
    if isinstance(functions, dict):
        return dict(functions)
    if not isinstance(functions, (str, list)):
        raise ValueError(f"Expected 'functions' to be a list or dict, but was {type(functions)}")
    return {name: name for name in ([functions] if isinstance(functions, str) else functions)}


def _flags(flags: list[str] | None) -> Flags:
    return tuple(str(flag).strip() for flag in flags or ())
