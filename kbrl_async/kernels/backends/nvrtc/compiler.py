"""NVRTC through ctypes: CUDA source in, machine code and the kernels' linked names out. No GPU and no driver is needed.

It parses hostile text, so a farm calls it in a confined child (`nvrtc.ahead`); a person who uses a won kernel
has it called in their own process, on demand.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import site
import sysconfig
from pathlib import Path

import msgspec

from kbrl_async.errors import MissingTool

CURE = "Install it with `pip install 'kbrl-async[cuda-build]'`, or install a CUDA toolkit"
FLAGS = ("--std=c++17", "--device-as-default-execution-space")
_STDINT = "".join(
    f"typedef {'' if sign else 'unsigned '}{name} {'' if sign else 'u'}int{bits}_t;\n"
    for sign in (True, False)
    for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
).replace("typedef char int8_t", "typedef signed char int8_t")
_LIMITS = """
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
"""
_FLOAT = """
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_EPSILON 2.2204460492503131e-16
"""
_MATH = """
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define M_PI 3.14159265358979323846
#define M_SQRT1_2 0.70710678118654752440
#define M_SQRT2 1.41421356237309504880
#endif
"""
# NVRTC brings no C library; these say what a kernel can want of it.
_HEADERS = {
    name: "#pragma once\n" + body
    for names, body in (
        (("stdint.h", "cstdint", "inttypes.h"), _STDINT),
        (("limits.h", "climits"), _LIMITS),
        (("float.h", "cfloat"), _FLOAT),
        (("math.h", "cmath", "math_constants.h"), _MATH),
        (("stdio.h", "cstdio", "stdlib.h", "cstdlib", "stddef.h", "cstddef", "assert.h", "cassert", "string.h"), ""),
    )
    for name in names
}


class CompileError(ValueError):
    """The source is wrong; the text is NVRTC's log."""


class Compiled(msgspec.Struct, frozen=True):
    cubin: bytes
    names: dict[str, str]
    """Name as the source says it (`scale`, `scale<float>`) → name in the machine code."""


def library_path() -> str:
    """Of NVRTC on this host; empty where it has none. Executes nothing."""
    patterns = [f"{root}/nvidia/*/lib/libnvrtc.so.*" for root in dict.fromkeys([*_site(), *site.getsitepackages()])]
    patterns += [f"{root}/{lib}/libnvrtc.so.*" for root in _toolkits() for lib in ("lib64", "targets/*/lib")]
    found = (path for pattern in patterns for path in sorted(glob.glob(pattern)) if ".alt." not in path)
    return next(found, "")


def _site() -> list[str]:
    paths = sysconfig.get_paths()
    return [paths["purelib"], paths["platlib"]]


def _toolkits() -> list[str]:
    return [root for root in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda") if root]


def include_folders() -> list[str]:
    """Where `cuda_fp16.h` and its kind are."""
    beside = Path(library_path()).parent.parent / "include"
    folders = [beside, beside / "cccl", *(Path(root) / "include" for root in _toolkits())]
    return [str(folder) for folder in folders if folder.is_dir()]


@functools.cache
def library() -> ctypes.CDLL:
    """Raises `MissingTool` where there is no NVRTC."""
    path = library_path()
    if not path:
        raise MissingTool("NVRTC is not installed", CURE)
    for builtins in sorted(glob.glob(str(Path(path).parent / "libnvrtc-builtins.so.*"))):
        if ".alt." not in builtins:
            ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)  # NVRTC looks for it by name, not by place
    return ctypes.CDLL(path)


def identity() -> str:
    """Which NVRTC this is, from its files alone: name, size, and where headers come from."""
    path = Path(library_path())
    builtins = sorted(item.name for item in path.parent.glob("libnvrtc-builtins.so.*") if ".alt." not in item.name)
    version = builtins[-1].partition(".so.")[2] if builtins else path.name
    digest = hashlib.sha256(f"{path.stat().st_size} {FLAGS} {sorted(_HEADERS.items())}".encode()).hexdigest()
    return f"{version} {digest[:8]}"


def compile_source(source: str, names: list[str], arch: str, options: tuple[str, ...] = ()) -> Compiled:
    """`arch` is `sm_90`; `names` may be template instances. Raises `CompileError` with the log."""
    nvrtc, program = library(), ctypes.c_void_p()
    texts = [body.encode() for body in _HEADERS.values()]
    headers = (ctypes.c_char_p * len(texts))(*texts)
    header_names = (ctypes.c_char_p * len(texts))(*(name.encode() for name in _HEADERS))
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", len(texts), headers, header_names
    )
    _check(created, "nvrtcCreateProgram")
    try:
        for name in names:
            _check(nvrtc.nvrtcAddNameExpression(program, name.encode()), "nvrtcAddNameExpression")
        flags = [
            *FLAGS,
            f"--gpu-architecture={_full(arch)}",
            *(f"-I{folder}" for folder in include_folders()),
            *options,
        ]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), array) != 0:
            raise CompileError(_text(program, "ProgramLog").decode(errors="replace"))
        return Compiled(_text(program, "CUBIN"), {name: _lowered(program, name) for name in names})
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _full(arch: str) -> str:
    """With the features of exactly this chip, where it has such: `wgmma` is only in `sm_90a`."""
    return arch + "a" if arch in ("sm_90", "sm_100", "sm_103", "sm_120") else arch


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc, size = library(), ctypes.c_size_t()
    _check(nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc[f"nvrtcGet{what}"](program, buffer), what)
    return buffer.raw if what == "CUBIN" else buffer.value


def _lowered(program: ctypes.c_void_p, name: str) -> str:
    found = ctypes.c_char_p()
    _check(library().nvrtcGetLoweredName(program, name.encode(), ctypes.byref(found)), "nvrtcGetLoweredName")
    return (found.value or b"").decode()


def _check(code: int, call: str) -> None:
    if code != 0:
        describe = library().nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise RuntimeError(f"{call}: {describe(code).decode()}")
