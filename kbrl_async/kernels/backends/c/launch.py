"""Launching C kernels from `ModelNew`: `c_kernel(source, name)` is all that a candidate of backend `c` imports.

::

    kernel = c_kernel(SOURCE, "softmax")      # in __init__
    kernel(x, y, rows, cols)                  # in forward: tensor → pointer, int → long, float → float

Inside a sandbox the shared object was compiled elsewhere and `register` said where it lies; nothing is compiled there.
Outside, a person who uses a won kernel gets it compiled on demand into the user's cache folder.

Invariants
* Tensors must be contiguous and on the CPU; anything else is an error that says so, never a silent copy.
* The number of arguments is checked against the C definition wherever that can be parsed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.launch.recorder import RECORDER

if TYPE_CHECKING:
    import torch

C_NATIVE = "-march=native"
C_FLAGS = ("-O3", C_NATIVE, "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-w", "-pipe")
C_LIBRARIES = ("-lm",)
GCC_CURE = "Install it with `apt-get install gcc libc6-dev` (Debian/Ubuntu) or choose another backend"

_registered: dict[str, str] = {}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def source_key(source: str) -> str:
    """The name of a C source in `BuildReport.artifacts`: its sha256."""
    return hashlib.sha256(source.encode()).hexdigest()


def register(artifacts: dict[str, str]) -> None:
    """Say where the shared objects of these sources lie (`source_key` → path)."""
    _registered.update(artifacts)


def registered() -> Mapping[str, str]:
    """Where the shared objects lie, by `source_key`."""
    return _registered


def parameters(source: str, name: str) -> list[str] | None:
    """The parameter declarations of function `name` in C `source`; None where no definition is found.

    >>> parameters("void f(const float *x, long n) {}", "f")
    ['const float *x', 'long n']
    """
    match = re.search(rf"\b{re.escape(name)}\s*\(([^()]*)\)\s*{{", _COMMENT.sub(" ", source))
    if match is None:
        return None
    declared = [" ".join(part.split()) for part in match[1].split(",")]
    return [] if declared in ([""], ["void"]) else declared


def c_kernel(source: str, name: str) -> CKernel:
    """A callable for function `name` of C `source`. Raises `ValueError` where the source does not define it."""
    return CKernel(source, name)


class CKernel:
    """One C function; argument types are looked at once per combination of Python types, then cached."""

    def __init__(self, source: str, name: str) -> None:
        self.name, self.key = name, source_key(source)
        self._declared = parameters(source, name)
        self._library = ctypes.CDLL(_locate(source))
        self._plans: dict[tuple[type, ...], list[Callable[[Any], Any]]] = {}
        try:
            self._function = self._library[name]
        except AttributeError as error:
            raise ValueError(f"the C source defines no exported function {name!r}") from error
        self._function.restype = None

    def __call__(self, *args: torch.Tensor | int | float) -> None:
        kinds = tuple(map(type, args))
        plan = self._plans.get(kinds)
        if plan is None:
            plan = self._plan(args)
            self._plans[kinds] = plan
        values = [convert(arg) for convert, arg in zip(plan, args, strict=True)]
        if RECORDER.tape is not None:
            RECORDER.tape(self, args, values)
        RECORDER.call(self.name, self._function, *values)

    def only_reads(self, place: int) -> bool:
        """Whether its declaration says so of what this argument points to."""
        return self._declared is not None and bool(re.search(r"\bconst\b", self._declared[place].partition("*")[0]))

    def _plan(self, args: tuple[Any, ...]) -> list[Callable[[Any], Any]]:
        declared = self._declared
        if declared is not None and len(declared) != len(args):
            raise TypeError(f"{self.name} takes {len(declared)} arguments ({', '.join(declared)}), got {len(args)}")
        hints = declared if declared is not None else [""] * len(args)
        return [
            _converter(arg, hint, self.name, place) for place, (arg, hint) in enumerate(zip(args, hints, strict=True))
        ]


def _converter(arg: object, declared: str, name: str, place: int) -> Callable[[Any], Any]:
    import torch

    is_pointer = "*" in declared or "[" in declared
    if isinstance(arg, torch.Tensor):
        if declared and not is_pointer:
            raise TypeError(f"{name}: argument {place} is a tensor, but `{declared}` is no pointer")
        return _pointer
    if declared and is_pointer:
        raise TypeError(f"{name}: argument {place} must be a tensor for `{declared}`, not {type(arg).__name__}")
    if isinstance(arg, (int, float)) and re.search(r"\b(float|double)\b", declared):
        return ctypes.c_double if "double" in declared else ctypes.c_float
    if isinstance(arg, int):
        return ctypes.c_int64
    if isinstance(arg, float) and not declared:
        return ctypes.c_float
    raise TypeError(f"{name}: argument {place} is a {type(arg).__name__}; pass a tensor, an int or a float as declared")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    if not tensor.is_cpu:
        raise ValueError(f"a C kernel needs CPU tensors, got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"a C kernel needs contiguous tensors, got strides {tensor.stride()}: call .contiguous()")
    return ctypes.c_void_p(tensor.data_ptr())


def _locate(source: str) -> str:
    key = source_key(source)
    if key in _registered:
        return _registered[key]
    if _registered:
        raise ValueError("this C source was not compiled: give c_kernel a literal, or a module-level name of one")
    return _compile_for_user(source, key)


def _compile_for_user(source: str, key: str) -> str:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kbrl" / "kernels"
    target = folder / f"{key}.so"
    if target.exists():
        return str(target)
    gcc = shutil.which("gcc")
    if gcc is None:
        raise MissingTool("gcc is not installed", GCC_CURE)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        (Path(work) / "kernel.c").write_text(source)
        command = [gcc, *C_FLAGS, "kernel.c", "-o", "kernel.so", *C_LIBRARIES]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"gcc could not compile the kernel: {done.stderr[:800]}")
        (Path(work) / "kernel.so").replace(target)
    return str(target)
