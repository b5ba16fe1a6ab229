"""Building one extension: fast against stand-in headers, and in full where the fast way does not get through.

::

    Extension ─▶ fast: main.cpp ∥ cuda.cu against slim/ ─▶ link ─▶ artifact       (seconds)
                    └─ any failure ─▶ full: the same against torch's headers ─▶ artifact | compile error (a minute)

Both compile the same texts with the same flags for the same libraries; only the headers differ, and the slim ones only
declare what libtorch defines. So a fast artifact calls the same code, and what slim does not know fails to compile.

Invariants
* "Compile error" is said by a full build only; by a fast one where torch's own headers are seen to refuse the same.
* The halves of an extension compile at the same time, each confined to a folder of its own.
"""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.building.context import BuildContext, ToolRun
from kbrl_async.kernels.backends.inline.flags import Flags
from kbrl_async.kernels.backends.inline.launch import Extension, Unit
from kbrl_async.kernels.backends.inline.ops import OperatorHeaders
from kbrl_async.kernels.backends.inline.toolchain import Toolchain

NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
_OWN_STREAM = ("-DCUDA_API_PER_THREAD_DEFAULT_STREAM", "--default-stream=per-thread")
"""For either compiler, for nvcc. `<<<…>>>` without a stream launches on the thread's own, which can be captured, and
which waits for the default one as that waits for it; launched on the default one it would be in no graph.
"""
_WAITS = """
extern "C" {
int cudaStreamIsCapturing(void*, int*);
int __real_cudaDeviceSynchronize();
int __real_cudaStreamSynchronize(void*);
int __real_cudaStreamSynchronize_ptsz(void*);
static bool is_captured() {
  int status = 0;
  return cudaStreamIsCapturing((void*)2, &status) == 0 && status == 1;
}
int __wrap_cudaDeviceSynchronize() { return is_captured() ? 0 : __real_cudaDeviceSynchronize(); }
int __wrap_cudaStreamSynchronize(void* s) { return is_captured() ? 0 : __real_cudaStreamSynchronize(s); }
int __wrap_cudaStreamSynchronize_ptsz(void* s) { return is_captured() ? 0 : __real_cudaStreamSynchronize_ptsz(s); }
}
"""
"""Waiting for the device, as many extensions do behind a launch, spoils a capture and means nothing in one: all that
follows in a graph waits by itself.
"""
_WRAPPED = tuple(
    f"-Wl,--wrap={name}" for name in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaStreamSynchronize_ptsz")
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_OPEN_SYMBOL = re.compile(r"undefined reference to [`']([^']+)'")
_MISSING_HEADER = re.compile(r"(?:fatal error: |cannot open source file \")([\w./-]+\.h\w*)")
_DISPATCHED = re.compile(r"error: [^\n]*DeprecatedTypeProperties\W[^\n]* to \W*c10::ScalarType\b")
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|el)", re.MULTILINE)
"""Torch's own headers define more than the stand-ins do."""
_GRADIENTS = re.compile(r"requires_grad\w*\s*\((?!\s*false\s*\))")
_WITHOUT_SPECIAL_FUNCTIONS = "-D_GLIBCXX_BITS_SPECFUN_H"
"""<cmath> leaves out Bessel functions and the like, a sixth of nvcc's time, where the text has none of their names."""
_SPECIAL_FUNCTION = re.compile(
    r"\b(beta|expint|hermite|laguerre|legendre|riemann_zeta|((comp_)?ellint|cyl|sph|assoc)_\w+)[fl]?\s*\(|special_func"
)
_MAX_FAST_TEXT = 1 << 20
_FAST_FACTOR, _FULL_FACTOR = 3.0, 30.0
"""How much longer than one unit of C it may take."""
_FULL_MEMORY_FACTOR = 4
_NAMES_A_DEVICE = r"\"(cuda|cpu|meta)[\":]|\.(toString|str|name)\s*\("
# What the full headers bring along: included by the fast way only where the text uses it, for each costs its time.
_STANDARD = {
    "algorithm": r"std::(sort|(min|max)_element|fill|copy|transform|swap|reverse|find|clamp|(any|all)_of|min|max)\b",
    "iterator": r"std::(back_inserter|distance|advance|next|prev|\w+_iterator)\b",
    "numeric": r"std::(accumulate|iota|inner_product)\b",
    "functional": r"std::(function|plus|multiplies|less|greater|hash|bind)\b",
    "memory": r"std::(unique_ptr|shared_ptr|make_unique|make_shared)\b",
    "unordered_map": r"std::unordered_map\b",
    "unordered_set": r"std::unordered_set\b",
    "map": r"std::map\b",
    "set": r"std::set\b",
    "mutex": r"std::(mutex|lock_guard|unique_lock|once_flag|call_once)\b",
    "atomic": r"std::atomic",
    "string": r"std::(string|to_string|sto[a-z]+|getline)\b|" + _NAMES_A_DEVICE,
    "string_view": r"\bstring_view\b",
    "iostream": r"std::(cout|cerr|clog|endl)\b",
    "sstream": r"std::\w*stream\b|operator\s*<<|\b(c10|at|torch)::str\b",
    "random": r"std::mt19937",
    "complex": r"std::complex\b",
    "stdexcept": r"std::(\w+_error|invalid_argument|out_of_range)\b",
    "cassert": r"\bassert\s*\(",
    "cfloat": r"\b(FLT|DBL)_\w+",
    "climits": r"\b(INT|LONG|UINT)_(MAX|MIN)\b",
    "cstdio": r"\bprintf\s*\(",
    "cstdlib": r"\b(malloc|free|getenv|std::abort)\s*\(",
}
_STANDARD_PATTERNS = {name: re.compile(pattern) for name, pattern in _STANDARD.items()}
_DEFINES = {
    "string": "-DKBRL_STRING",
    "string_view": "-DKBRL_VIEW",
    "iostream": "-DKBRL_STREAMS",
    "sstream": "-DKBRL_STREAMS",
    "stdexcept": "-DKBRL_STRING",
}
"""What of the stand-in headers needs the same one: <string> alone is a quarter of a compilation."""
_NAMED = {
    "-DKBRL_PYTHON": re.compile(r"\bpy(bind11)?\s*::|PYBIND11|wrap_pybind|\bPy[A-Z_]|\bTHP"),
    "-DKBRL_FP16": re.compile(r"\bhalf2?\b|__half|__float2half|cuda_fp16|__h[a-z]+2?\s*\("),
    "-DKBRL_BF16": re.compile(r"bfloat16|bfloat162|cuda_bf16"),
}


class BuildAttempt(msgspec.Struct, frozen=True):
    """How one way of building ended."""

    content: bytes = b""
    run: ToolRun | None = None
    """The failed tool's; or any of them, for its isolation."""
    open_symbols: tuple[str, ...] = ()
    failed_units: tuple[int, ...] = ()
    unfit: str = ""
    """Why the fast way was not even tried."""
    is_final: bool = False
    """The full way would end in the same error."""

    @property
    def is_built(self) -> bool:
        return bool(self.content)


class Build:
    """One extension, one toolchain, one set of flags."""

    def __init__(self, extension: Extension, flags: Flags, tools: Toolchain, context: BuildContext) -> None:
        self._extension, self._flags, self._tools, self._context = extension, flags, tools, context

    def fast(self) -> BuildAttempt:
        if self._tools.slim_defines is None:
            return BuildAttempt(unfit="no stand-in headers for this torch")
        if reason := next(filter(None, (_needs_full(unit.text) for unit in self._extension.units)), ""):
            return BuildAttempt(unfit=reason)
        attempt = self._attempt(is_slim=True)
        if not attempt.open_symbols:
            return msgspec.structs.replace(attempt, is_final=self._is_final(attempt))
        return BuildAttempt(run=attempt.run, unfit=f"symbol {attempt.open_symbols[0][:80]}")

    def _is_final(self, attempt: BuildAttempt) -> bool:
        """What a unit without conditions is refused for here alone: `AT_DISPATCH_…(x.type(), …)`."""
        if attempt.run is None or attempt.run.status in (None, 0) or self._tools.dispatches_types:
            return False
        errors = [line for line in attempt.run.output.splitlines() if "error: " in line]
        texts = [self._extension.units[number].text for number in attempt.failed_units]
        return bool(errors) and all(map(_DISPATCHED.search, errors)) and not any(map(_CONDITION.search, texts))

    def full(self, suspects: tuple[int, ...] = ()) -> BuildAttempt:
        """`suspects` are the units that failed the fast way: they are built first, and the others only if these pass.

        Raises `MissingTool` where this host's torch or toolkit lacks headers that the candidate rightly includes.
        """
        attempt = self._attempt(is_slim=False, first=suspects)
        if not attempt.is_built and attempt.run is not None:
            self._blame_host(attempt.run.output)
        return attempt

    def _attempt(self, is_slim: bool, first: tuple[int, ...] = ()) -> BuildAttempt:
        units = self._extension.units
        rest = tuple(number for number in range(len(units)) if number not in first)
        with self._context.folder() as folder, ThreadPoolExecutor(len(units)) as pool:
            places = [folder / str(number) for number in range(len(units))]
            for numbers in filter(None, (first, rest)):
                here = [places[number] for number in numbers]
                runs = list(pool.map(functools.partial(self._compile, is_slim), [units[n] for n in numbers], here))
                failed = [place for place, run in enumerate(runs) if run.status != 0]
                if failed:
                    return BuildAttempt(run=runs[failed[0]], failed_units=tuple(numbers[place] for place in failed))
            return self._link(folder, [place / "unit.o" for place in places], is_slim)

    def _compile(self, is_slim: bool, unit: Unit, place: Path) -> ToolRun:
        place.mkdir()
        name = "cuda.cu" if unit.is_cuda else "main.cpp"
        (place / name).write_text(unit.text)
        extra: list[str] = []
        if is_slim:
            extra = [*(self._tools.slim_defines or ()), *self._prepare_slim(unit.text, place)]
        command = self._nvcc(name, is_slim) if unit.is_cuda else self._gxx(name, is_slim)
        return self._run([*command, *extra], place, is_slim)

    def _prepare_slim(self, text: str, place: Path) -> list[str]:
        bare = _COMMENT.sub(" ", text)
        operators = _headers(self._tools.include).declare(bare).text()
        (place / "kbrl_ops.h").write_text(operators)
        needed = [name for name, pattern in _STANDARD_PATTERNS.items() if pattern.search(bare)]
        needed += ["string_view"] if "string_view" in operators else []
        (place / "kbrl_std.h").write_text("".join(f"#include <{name}>\n" for name in needed))
        defines = list(dict.fromkeys(_DEFINES[name] for name in needed if name in _DEFINES))
        defines += [define for define, pattern in _NAMED.items() if pattern.search(bare)]
        defines += [] if _SPECIAL_FUNCTION.search(text) else [_WITHOUT_SPECIAL_FUNCTIONS]
        if "cublas" in bare and (self._tools.cuda / "include" / "cublas_v2.h").exists():
            defines.append("-DKBRL_CUBLAS")
        return ["-I.", "-include", "kbrl_std.h", *defines]

    def _common(self, is_slim: bool, with_cuda: bool) -> list[str]:
        names = [f"-DTORCH_EXTENSION_NAME={self._extension.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        chosen = any("default-stream" in flag for flag in self._flags.nvcc)
        return [*names, *(() if chosen else _OWN_STREAM[:1]), *self._tools.includes(is_slim, with_cuda)]

    def _gxx(self, name: str, is_slim: bool) -> list[str]:
        common = self._common(is_slim, self._extension.with_cuda)
        standard = f"-std={self._tools.standard}"
        flags = ["-fPIC", standard, *self._flags.host, "-w", "-fdiagnostics-color=never", "-pipe"]
        return [self._tools.cxx, *common, *flags, "-c", name, "-o", "unit.o"]

    def _nvcc(self, name: str, is_slim: bool) -> list[str]:
        number = self._flags.arch.removeprefix("sm_")
        standard = [] if any("-std" in flag for flag in self._flags.nvcc) else [f"-std={self._tools.standard}"]
        arch = ["-gencode", f"arch=compute_{number},code=sm_{number}", "-ccbin", self._tools.cxx]
        chosen = any("default-stream" in flag for flag in self._flags.nvcc)
        stream = () if chosen else _OWN_STREAM[1:]
        flags = [*NVCC_FLAGS, *arch, *stream, "-Xcompiler", "-fPIC", *self._flags.nvcc, *standard, "-w"]
        return [self._tools.nvcc, *self._common(is_slim, True), *flags, "-c", name, "-o", "unit.o"]

    def _link(self, folder: Path, objects: list[Path], is_slim: bool) -> BuildAttempt:
        place = folder / "link"
        place.mkdir()
        for number, path in enumerate(objects):
            path.rename(place / f"{number}.o")
        names = [f"{number}.o" for number in range(len(objects))]
        if self._extension.with_cuda:
            (place / "waits.cpp").write_text(_WAITS)
            names += ["waits.cpp", "-fPIC", *_WRAPPED]
        run = self._run([self._tools.cxx, "-shared", *names, "-o", "extension.so", *self.libraries()], place, is_slim)
        if run.status != 0:
            return BuildAttempt(run=run)
        words = self._context.collect(place, "output.txt").decode(errors="replace")  # all: Python's symbols come first
        left = {symbol for symbol in _OPEN_SYMBOL.findall(words) if not self._tools.may_stay_open(symbol)}
        return BuildAttempt(self._context.collect(place, "extension.so"), run, tuple(sorted(left)))

    def libraries(self) -> list[str]:
        here = self._tools.libraries
        cuda = self._extension.with_cuda
        torch = ["c10", "torch_cpu", "torch", "torch_python", *(["c10_cuda", "torch_cuda"] if cuda else [])]
        found = [f"-l{name}" for name in torch if (here / f"lib{name}.so").exists()]
        wanted = [*(["cudart", *self._blas()] if cuda else []), *self._flags.libraries]
        system = {"m", "pthread", "gomp", "stdc++", "dl", "rt"}
        extra = [part for name in dict.fromkeys(wanted) if name not in torch for part in self._library(name, system)]
        # What stays open is a warning here and judged by name: the interpreter's symbols always do.
        checks = ["-Wl,--no-as-needed", "-Wl,-z,defs", "-Wl,--warn-unresolved-symbols"]
        return [f"-L{here}", *checks, *found, *extra, *self._flags.link]

    def _blas(self) -> list[str]:
        """torch has loaded these, so under torch's own build a source may call them without saying so."""
        text = " ".join(unit.text for unit in self._extension.units)
        return [name for name in ("cublas", "cublasLt") if name in text]

    def _library(self, name: str, system: set[str]) -> list[str]:
        return [f"-l{name}"] if name in system else self._tools.cuda_library(name)

    def _run(self, command: list[str], place: Path, is_slim: bool) -> ToolRun:
        deadline = self._context.farm.deadline_s * (_FAST_FACTOR if is_slim else _FULL_FACTOR)
        memory = self._context.memory_bytes * _FULL_MEMORY_FACTOR
        return self._context.run(
            command, place, deadline_s=deadline, memory_bytes=memory, read=self._tools.readable(), threads=2
        )

    def _blame_host(self, output: str) -> None:
        missing = _MISSING_HEADER.search(output)
        is_torch = missing is not None and missing[1].startswith(
            ("cublas", "cusparse", "cusolver", "cudnn", "cufft", "curand")
        )
        if missing and is_torch and not (self._tools.cuda / "include" / missing[1]).exists():
            raise MissingTool(
                f"the CUDA toolkit of this host lacks {missing[1]}",
                "Install the whole toolkit, or build on another host",
            )


def _needs_full(text: str) -> str:
    """What would compile against the stand-in headers and yet mean something else; empty where nothing does."""
    if len(text) > _MAX_FAST_TEXT:
        return "long source"
    return "asks for gradients" if _GRADIENTS.search(_COMMENT.sub(" ", text)) else ""


@functools.cache
def _headers(include: Path) -> OperatorHeaders:
    return OperatorHeaders(include)
