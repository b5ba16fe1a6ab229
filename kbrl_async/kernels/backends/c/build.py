"""Backend `c`: plain C functions, compiled by gcc into a shared object, launched through `kbrl_async.launch.c_kernel`.

`#pragma GCC optimize("Ofast")` before `#include <math.h>` gives vectorised expf and friends (libmvec); the
default flags stay
strict, because fast-math is a choice that a candidate should have to make and survive verification with.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.building import remarks
from kbrl_async.kernels.backends.building.context import BuildContext, Diagnosis
from kbrl_async.kernels.backends.building.processor import NATIVE, extensions, needed
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.backends.c.symbols import HEADERS, REFUSED, foreign_calls
from kbrl_async.kernels.backends.checks.python import PythonHalf, parse
from kbrl_async.kernels.backends.launch.plan_backend import TakesPlans
from protocols.records import BuildReport, Candidate, Fault, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.backends.sanitize.parts import Sanitized, Sanitizes, SanitizeTask

_LAUNCHER = re.compile(r"\bc_kernel\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(include\w*|import|embed)\b[ \t]*(.*)$", re.MULTILINE)
_ASM = re.compile(r"\b(asm|__asm__|__asm)\b")
_REFUSED = re.compile(rf"\b({'|'.join(REFUSED)})\b")
_MAX_TEXT = 800
_HINTS = (
    (r"implicit declaration of function", "Declare the function before its use, or include the header that does."),
    (r"undeclared", "Declare every variable; check the spelling and the scope."),
    (
        r"expected .* before|expected declaration|expected expression",
        "Check braces, brackets and semicolons around the line.",
    ),
    (r"undefined (reference|symbol)", "Only libc, libm and OpenMP are linked; define what else you call."),
    (r"too (few|many) arguments", "Match the call to the function's parameters."),
    (r"redefinition|conflicting types", "Give every name one definition."),
    (r"incompatible|invalid operands|invalid type", "Check types: pointers are indexed, scalars are not."),
    (r"unknown type name", "Use plain C types: float, long, int, size_t."),
)


class CBackend(TakesPlans):
    """See the module."""

    name = "c"
    prompt = "kbrl_async.kernels.backends.c.prompt"
    launcher = "c_kernel"
    is_recorded = True
    is_replayed = True
    is_closed = True
    hints: ClassVar[Mapping[str, str]] = {
        "slow": 'It is right. Make it faster: `#pragma GCC optimize("Ofast")` before math.h gives vector math, '
        "`restrict` and one pass over memory let loops vectorise.",
        "compile": "Fix the first error; declare what you use, end statements with a semicolon, include math.h.",
    }

    def claims(self, source: str) -> float:
        return 0.4 if _LAUNCHER.search(source) else 0.0

    def prepare(self, artifacts: dict[str, str], device: str) -> None:
        launch.register(artifacts)

    def sanitize(self, sanitizer: Sanitizes, task: SanitizeTask, folder: Path) -> Sanitized:
        from kbrl_async.kernels.backends.c.sanitize import sanitize

        return sanitize(sanitizer, task, folder)

    def check_module(self, candidate: Candidate) -> BuildReport | None:
        program = parse(candidate.source)
        if isinstance(program, BuildReport):
            return program
        for source, name in program.kernels:
            report = _check_c(source, name)
            if report is not None:
                return report
        return None

    def missing(self) -> str:
        return "" if shutil.which("gcc") else f"gcc is not installed: {launch.GCC_CURE}"

    def build_module(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        program = parse(candidate.source)
        assert isinstance(program, PythonHalf), "build is called only after check"
        reports = []
        for source in dict.fromkeys(source for source, _ in program.kernels):
            report = self.unit(source, context)
            if report.fault is not Fault.OK:
                return report
            reports.append(report)
        artifacts = {key: address for report in reports for key, address in report.artifacts.items()}
        cached = all(report.cached for report in reports)
        return msgspec.structs.replace(reports[-1], artifacts=artifacts, cached=cached)

    def unit(self, source: str, context: BuildContext) -> BuildReport:
        """One C source."""
        march = context.farm.march
        (toolchain, cpu), key = toolchain_of(march), launch.source_key(source)

        def compile_() -> tuple[BuildReport, bool]:
            with context.folder() as folder:
                (folder / "kernel.c").write_text(source)
                run = context.run(command_of("kernel.c", "kernel.so", march), folder)
                if run.status == 0:
                    built = context.collect(folder, "kernel.so")
                    report = _check_calls(built) or BuildReport(Fault.OK, {key: context.store.put(built)})
                else:
                    report = context.failure(run, self.diagnose)
            report = msgspec.structs.replace(report, toolchain=toolchain, cpu=cpu, isolation=run.isolation)
            return report, run.is_deterministic

        return context.cached(self.name, toolchain, key, make=compile_)

    def remarks(self, candidate: Candidate, context: BuildContext) -> tuple[str, ...]:
        """Lines are those of the C source."""
        program = parse(candidate.source)
        assert isinstance(program, PythonHalf), "remarks are asked for only of what was built"
        found: list[str] = []
        for source in dict.fromkeys(source for source, _ in program.kernels):
            with context.folder() as folder:
                (folder / "kernel.c").write_text(source)
                command = [*command_of("kernel.c", "kernel.so", context.farm.march), *remarks.FLAGS]
                found += remarks.lines(remarks.read(context.run(command, folder).output))
        return tuple(found)

    def diagnose(self, output: str) -> Diagnosis:
        lines = [line for line in output.splitlines() if "error" in line or "undefined" in line]
        text = "\n".join(_clean(line) for line in (lines or output.splitlines())[:8])
        hint = next(
            (hint for pattern, hint in _HINTS if re.search(pattern, text)),
            "Fix the first error; others may follow from it.",
        )
        return Diagnosis(text[:_MAX_TEXT], hint)


def _flags(march: str) -> list[str]:
    return [f"-march={march}" if flag == launch.C_NATIVE else flag for flag in launch.C_FLAGS]


def command_of(source: str, target: str, march: str = NATIVE) -> list[str]:
    return [find_gcc(), *_flags(march), "-fdiagnostics-color=never", source, "-o", target, *launch.C_LIBRARIES]


def _clean(line: str) -> str:
    """Without folders of ours, and without the compiler's own names."""
    line = re.sub(r"(/[\w.+-]+)+/", "", line)
    return line.replace("collect2: error: ", "").strip()


def _check_c(source: str, name: str) -> BuildReport | None:
    bare = _COMMENT.sub(_lines_of, source)
    for found in _INCLUDE.finditer(bare):
        directive, what = found[1], found[2].strip()
        if directive != "include" or what.strip('<>"') not in HEADERS:
            hint = f"Only these headers: {', '.join(sorted(HEADERS))}."
            return _violation("include", f"{_line(bare, found)}: #{directive} {what} is not allowed", hint)
    code = _STRING.sub('""', bare)
    if found_asm := _ASM.search(code):
        text = f"{_line(code, found_asm)}: inline assembly is not allowed"
        return _violation("asm", text, "Use C, OpenMP pragmas or intrinsics from immintrin.h.")
    if word := _REFUSED.search(code):
        text = f"{_line(code, word)}: {word[1]!r} is not allowed"
        return _violation("forbidden_name", text, "A kernel only computes.")
    if name and launch.parameters(source, name) is None:
        text = f"the C source defines no function {name!r}"
        return _violation("unknown_function", text, f"Define `void {name}(…) {{ … }}` in SOURCE.")
    return None


def _lines_of(comment: re.Match[str]) -> str:
    """White space in its place, so that lines keep their numbers."""
    return " " + "\n" * comment[0].count("\n")


def _line(code: str, found: re.Match[str]) -> str:
    text = found[0]
    start = found.start() + len(text) - len(text.lstrip())
    return f"line {code.count(chr(10), 0, start) + 1} of the C source"


def _check_calls(built: bytes) -> BuildReport | None:
    """Looks at what was built, as no macro hides a call there; for a kernel such functions do not exist."""
    calls = foreign_calls(built)
    if not calls:
        return None
    hint = "A kernel may call the mathematics of math.h, plain memory functions and OpenMP; define what else you call."
    message = f"undefined reference to {', '.join(map(repr, calls[:5]))}"[:_MAX_TEXT]
    return BuildReport(Fault.COMPILE_ERROR, message=message, hint=hint, rule="foreign_call")


def _violation(rule: str, message: str, hint: str) -> BuildReport:
    return BuildReport(Fault.STATIC_VIOLATION, message=message[:_MAX_TEXT], hint=hint, rule=rule)


@functools.cache
def find_gcc() -> str:
    path = shutil.which("gcc")
    if path is None:
        raise MissingTool("gcc is not installed", launch.GCC_CURE)
    return path


@functools.cache
def toolchain_of(march: str = NATIVE) -> tuple[str, str]:
    """`gcc 12.2.0 znver4 1f3c…`: version, resolved -march, hash of what the flags resolve to and of a probe; and the
    instruction sets that this makes use of.

    So hosts whose toolchains have one name build the same bytes, and a farm that hands out others has lied.
    """
    name, resolved = needed(find_gcc(), march)
    version = subprocess.run(
        [find_gcc(), "-dumpfullversion"], capture_output=True, text=True, check=False, timeout=30
    ).stdout
    flags = " ".join((*_flags(march), *launch.C_LIBRARIES))
    digest = hashlib.sha256(f"{resolved}\0{flags}\0{probe_hash(march)}".encode()).hexdigest()[:12]
    return f"gcc {version.strip()} {name} {digest}", extensions(resolved)


_PROBE = """
#pragma GCC optimize("Ofast")
#include <math.h>
void probe(const float *x, float *y, long n) {
#pragma omp parallel for
    for (long i = 0; i < n; i++) y[i] = expf(x[i]) + tanhf(x[i]);
}
"""


def probe_hash(march: str = NATIVE) -> str:
    """Hash of what this compiler, with this libc and linker, makes of a source of ours."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.c").write_text(_PROBE)
        subprocess.run(
            command_of("probe.c", "probe.so", march), cwd=folder, capture_output=True, check=False, timeout=30
        )
        built = Path(folder) / "probe.so"
        return hashlib.sha256(built.read_bytes()).hexdigest() if built.exists() else ""


BACKEND = CBackend()
