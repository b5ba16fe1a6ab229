"""Launching CUDA kernels from `ModelNew`: `cuda_kernel(source, name)` is all that backend `cuda-nvrtc` asks for.

::

    kernel = cuda_kernel(SOURCE, "scale")                # in __init__; also "scale<float>" of a template
    kernel[blocks, 256](x, y, n, 2.0)                    # in forward: tensor → pointer, numbers as declared
    kernel[(gx, gy), (16, 16), shared_bytes](x, y, n)    # with dynamic shared memory

Inside a sandbox the machine code was made elsewhere (`prepare` said where it lies) and nothing is compiled. Outside, a
person who uses a won kernel gets it compiled on demand by NVRTC into the user's cache folder.

Invariants
* A launch goes to torch's current stream, so CUDA graphs capture it; nothing waits for the device.
* Tensors must be contiguous and on the GPU, and of the declared element type; anything else is an error that says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbrl_async.kernels import cuda_driver
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc

PREFIX = "cubin:"
Size = int | tuple[int, ...]
Options = tuple[str, ...]
_CODE, _NAMES = "code.cubin", "names.json"
_MAX_BOUND = 256
_registered: dict[str, str] = {}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIERS = re.compile(r"\b(const|volatile|__restrict__|__restrict|restrict|struct|std::|__grid_constant__)\b|::")
_INTEGERS: dict[str, type[Any]] = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_int8,
    "signed char": ctypes.c_int8,
    "int8_t": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "uint8_t": ctypes.c_uint8,
    "short": ctypes.c_int16,
    "int16_t": ctypes.c_int16,
    "unsigned short": ctypes.c_uint16,
    "uint16_t": ctypes.c_uint16,
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "uint32_t": ctypes.c_uint32,
    "long": ctypes.c_int64,
    "long int": ctypes.c_int64,
    "long long": ctypes.c_int64,
    "long long int": ctypes.c_int64,
    "int64_t": ctypes.c_int64,
    "ptrdiff_t": ctypes.c_int64,
    "unsigned long": ctypes.c_uint64,
    "unsigned long long": ctypes.c_uint64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_uint64,
}
_HALVES, _BRAINS = ("half", "__half"), ("__nv_bfloat16", "nv_bfloat16")
_ELEMENTS = {"float": "float32", "double": "float64"} | dict.fromkeys(_HALVES, "float16")
_ELEMENTS |= dict.fromkeys(_BRAINS, "bfloat16")


def source_key(source: str, options: Options = ()) -> str:
    """The name of a CUDA source in `BuildReport.artifacts`."""
    return PREFIX + hashlib.sha256("\0".join((source, *options)).encode()).hexdigest()


def prepare(artifacts: dict[str, str]) -> None:
    """Say where the bundles of these sources lie (`source_key` → path), for both ways to ask for a kernel."""
    _registered.update(artifacts)
    if artifacts:
        import torch

        torch.cuda._compile_kernel = compile_kernel  # type: ignore[attr-defined, unused-ignore]


def forget() -> None:
    """Of another candidate in the same process."""
    _registered.clear()


def to_bundle(compiled: nvrtc.Compiled) -> dict[str, bytes]:
    """The files of an artifact."""
    return {_CODE: compiled.cubin, _NAMES: json.dumps(compiled.names, sort_keys=True).encode()}


def parameters(source: str, name: str) -> list[str] | None:
    """The declared parameters of kernel `name`, template parameters replaced; None where no definition is found.

    >>> parameters("template <typename T> __global__ void f(const T *x, T a, int n) {}", "f<float>")
    ['const float *x', 'float a', 'int n']
    """
    stem, _, given = name.partition("<")
    pattern = (
        rf"(?:template\s*<([^<>]*)>[^;{{}}()]*)?\b__global__\b[^;{{}}]*?\b{re.escape(stem.strip())}\s*\(([^()]*)\)\s*{{"
    )
    match = re.search(pattern, _COMMENT.sub(" ", source))
    if match is None:
        return None
    declared = [" ".join(part.split()) for part in match[2].split(",")]
    if declared in ([""], ["void"]):
        return []
    formal = [part.split("=")[0].split()[-1] for part in (match[1] or "").split(",") if part.strip()]
    actual = [part.strip() for part in given.rstrip("> ").split(",")] if given else []
    for parameter, value in zip(formal, actual, strict=False):
        declared = [re.sub(rf"\b{parameter}\b", value, text) for text in declared]
    return declared


def cuda_kernel(source: str, name: str, options: Options | list[str] = ()) -> CudaKernel:
    """A kernel of CUDA `source`. `options` are NVRTC's, as `["--use_fast_math"]`."""
    return CudaKernel(source, name, tuple(options))


class CudaKernel:
    """One kernel; its code is loaded at the first launch, its arguments' types are looked at once."""

    def __init__(self, source: str, name: str, options: Options = ()) -> None:
        declared = parameters(source, name)
        if declared is None:
            raise ValueError(f"the CUDA source defines no `__global__ void {name}(…)`")
        self.name, self._declared = name, declared
        self._source, self._options = source, options
        parsed = [_parameter(text, name, place) for place, text in enumerate(declared)]
        self._converters = [convert for convert, _ in parsed]
        self.arguments = cuda_driver.Arguments([kind() for _, kind in parsed])
        self._bound: dict[tuple[Any, ...], _Bound] = {}
        self._function = 0
        self._shared = cuda_driver.DEFAULT_SHARED
        # Outside a sandbox an error of the source is told here, not at the first launch.
        self._files = _locate(source, name, options)

    def __getitem__(self, config: tuple[Size, Size] | tuple[Size, Size, int]) -> _Bound:
        bound = self._bound.get(config)
        if bound is None:
            if not isinstance(config, tuple) or len(config) not in (2, 3):
                raise TypeError(f"{self.name}: write kernel[grid, block] or kernel[grid, block, shared_bytes]")
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
            grid, block = _three(config[0], "grid"), _three(config[1], "block")
            bound = _Bound(self, grid, block, int(config[2]) if len(config) == 3 else 0)
            self._bound[config] = bound
        return bound

    def __call__(self, *args: Any) -> None:
        raise TypeError(f"{self.name} needs a launch configuration: kernel[grid, block](…)")

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, args: tuple[Any, ...]
    ) -> None:
        """Raises `TypeError` or `ValueError` for wrong arguments, `CudaError` for what the driver refuses."""
        if len(args) != len(self._converters):
            wanted = f"{self.name} takes {len(self._declared)} arguments ({', '.join(self._declared)})"
            raise TypeError(f"{wanted}, got {len(args)}")
        for cell, convert, arg in zip(self.arguments.cells, self._converters, args, strict=True):
            cell.value = convert(arg)
        if RECORDER.tape is not None:
            RECORDER.tape(self, args, [])
        RECORDER.call(self.name, self.start, grid, block, shared)

    def start(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> None:
        from torch._C import _cuda_getCurrentRawStream, _cuda_getDevice

        if not self._function:
            self._load()
        if shared > self._shared:
            self._shared = cuda_driver.driver().allow_shared(self._function)
        stream = _cuda_getCurrentRawStream(_cuda_getDevice())
        cuda_driver.driver().launch(self._function, grid, block, shared, stream, self.arguments)

    def _load(self) -> None:
        import torch

        torch.cuda.current_stream()  # torch makes the context that the code is loaded into
        linked: str = json.loads(self._files[_NAMES]).get(self.name, self.name)
        self._module = cuda_driver.driver().load_module(self._files[_CODE])
        self._function = cuda_driver.driver().function(self._module, linked)


class _Bound:
    """A kernel with its launch configuration."""

    __slots__ = ("_block", "_grid", "_kernel", "_shared")

    def __init__(
        self, kernel: CudaKernel, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
    ) -> None:
        self._kernel, self._grid, self._block, self._shared = kernel, grid, block, shared

    def __call__(self, *args: Any) -> None:
        self._kernel.launch(self._grid, self._block, self._shared, args)


class TorchStyleKernel:
    """What stands in for the kernel that `torch.cuda._compile_kernel` gives, with its calling convention."""

    def __init__(self, kernel: CudaKernel) -> None:
        self._kernel = kernel

    def __call__(
        self,
        grid: Size = (1, 1, 1),
        block: Size = (1, 1, 1),
        args: list[Any] | None = None,
        shared_mem: int = 0,
        stream: Any = None,
    ) -> None:
        import torch

        if stream is None or stream == torch.cuda.current_stream():
            self._kernel.launch(_three(grid, "grid"), _three(block, "block"), shared_mem, tuple(args or ()))
            return
        with torch.cuda.stream(stream):
            self._kernel.launch(_three(grid, "grid"), _three(block, "block"), shared_mem, tuple(args or ()))

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Done by itself at the first launch that needs it."""


def compile_kernel(
    kernel_source: str,
    kernel_name: str,
    compute_capability: str | None = None,
    cuda_include_dirs: list[str] | None = None,
    nvcc_options: list[str] | None = None,
) -> TorchStyleKernel:
    """Stands in for `torch.cuda._compile_kernel` in a sandbox: the same call, answered with what the farm built."""
    return TorchStyleKernel(cuda_kernel(kernel_source, kernel_name, nvcc_options or ()))


def _three(size: Size, what: str) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(item, int) and item > 0 for item in sizes):
        raise ValueError(f"{what} must be one to three positive integers, not {size!r}")
    padded = (*sizes, 1, 1)
    return padded[0], padded[1], padded[2]


def _parameter(declared: str, name: str, place: int) -> tuple[Callable[[Any], Any], type[Any]]:
    """How an argument is converted, and its C type."""
    if "*" in declared or "[" in declared:
        element = " ".join(_QUALIFIERS.sub(" ", declared.split("*")[0].split("[")[0]).split())
        return _pointer(_ELEMENTS.get(element), declared, name, place), ctypes.c_void_p
    words = _QUALIFIERS.sub(" ", declared).split()
    base = " ".join(words[:-1] if len(words) > 1 and " ".join(words) not in _INTEGERS else words)
    kind = f"{name}: argument {place}, `{declared}`, "
    if base in _INTEGERS:
        return _number(int, kind + "is an integer"), _INTEGERS[base]
    if base in ("float", "double"):
        return _number(float, kind + "is a number"), ctypes.c_float if base == "float" else ctypes.c_double
    if base in _HALVES:
        return lambda value: struct.unpack("<H", struct.pack("<e", value))[0], ctypes.c_uint16
    if base in _BRAINS:
        return lambda value: _brain(value), ctypes.c_uint16
    raise ValueError(f"{kind}has a type that can't be passed; use pointers, integers, float, double or half")


def _brain(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _number(kind: type, said: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, (int, float)) and (kind is float or value == int(value)):
            return kind(value)
        raise TypeError(f"{said}, got {type(value).__name__} {value!r}"[:300])

    return convert


def _pointer(element: str | None, declared: str, name: str, place: int) -> Callable[[Any], Any]:
    import torch

    wanted = getattr(torch, element) if element else None

    def convert(value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: argument {place} must be a tensor for `{declared}`, not {type(value).__name__}")
        if not value.is_cuda:
            raise ValueError(f"{name}: argument {place} is on {value.device}; a CUDA kernel needs tensors on the GPU")
        if not value.is_contiguous():
            raise ValueError(f"{name}: argument {place} has strides {value.stride()}: call .contiguous()")
        if wanted is not None and value.dtype is not wanted:
            raise TypeError(f"{name}: argument {place} is {value.dtype}, but is declared `{declared}`")
        return value.data_ptr()

    return convert


def _locate(source: str, name: str, options: Options) -> dict[str, bytes]:
    key = source_key(source, options)
    if key in _registered:
        return bundle.unpack(Path(_registered[key]).read_bytes())
    if _registered:
        raise ValueError("this CUDA source was not compiled: give cuda_kernel a literal, or a module-level name of one")
    return _compile_for_user(source, name, options)


def _compile_for_user(source: str, name: str, options: Options) -> dict[str, bytes]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kbrl" / "kernels"
    digest = hashlib.sha256("\0".join((source, name, *options)).encode()).hexdigest()
    target = folder / f"{digest}-sm_{major}{minor}.bundle"
    if target.exists():
        return bundle.unpack(target.read_bytes())
    files = to_bundle(nvrtc.compile_source(source, [name], f"sm_{major}{minor}", options))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(bundle.pack(files))
    temporary.replace(target)
    return files
