"""What backends `cpp` and `cuda` share: candidates that compile through `torch.utils.cpp_extension`.

::

    candidate ─▶ what would it compile? (read, or recorded confined) ─▶ each extension: cached? ─▶ fast ─▶ full
                                                                                └─▶ artifacts by `Extension.key`
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.backend import Backend, Shot
from kbrl_async.kernels.backends.building.context import BuildContext, Diagnosis
from kbrl_async.kernels.backends.checks import syntax
from kbrl_async.kernels.backends.checks.inline import MAX_UNITS, check_names
from kbrl_async.kernels.backends.inline import ways
from kbrl_async.kernels.backends.inline.build import Build, BuildAttempt
from kbrl_async.kernels.backends.inline.flags import FlagRefused, chosen
from kbrl_async.kernels.backends.inline.launch import PREFIX, Extension, install
from kbrl_async.kernels.backends.inline.recording import mentions_loader, read
from kbrl_async.kernels.backends.inline.toolchain import NVCC_CURE, slim_version, toolchain
from kbrl_async.kernels.backends.open.asked import ask
from protocols.records import BuildReport, Candidate, Fault, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.backends.sanitize.parts import Sanitized, Sanitizes, SanitizeTask

_MAX_TEXT, _MAX_WHY = 800, 100
_MAX_EXTENSIONS = 16
"""Of different ones."""
_AT_ONCE = 4
"""Of one candidate's extensions: three in a row took three times as long as one, with cores that had nothing to do."""
_MAX_NAME = 200
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"__(?:launch_bounds|cluster_dims)__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)"
_KERNEL = re.compile(rf"__global__\s+(?:(?:static|inline|void|{_BOUNDS})\s+)+(\w+)\s*\(")
_BOUND = re.compile(r"\bm\.def\(\s*\"(\w+)\"")
_CUDA_MARKS = re.compile(r"cuda_sources\s*=|\bCUDAExtension\b|\bload\([^)]*\.cu\b")
_CPP_MARKS = re.compile(r"\bload_inline\b|\bCppExtension\b|\bcpp_(sources\s*=|extension\b|kernel\()|torch/extension\.h")
_ERROR = re.compile(r"\berror\b|undefined reference|multiple definition")
_OURS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/|tmpxft_\w+-\d+_|collect2: error: |\(\.text\+\w+\): ")
_HINTS = (
    (
        r"DeprecatedTypeProperties",
        "AT_DISPATCH macros take x.scalar_type(); this torch has no x.type() there any more.",
    ),
    (
        r"no matching function|no instance of|cannot convert|invalid conversion",
        "Check argument types and their number.",
    ),
    (
        r"was not declared|is undefined|has not been declared|is not a member",
        "Declare it, include its header, check the name.",
    ),
    (r"expected", "Check braces, brackets and semicolons around the line."),
    (r"No such file", "Only torch's, CUDA's and the standard library's headers are there."),
    (
        r"uses too much shared data|too many resources",
        "Use less static shared memory: 48 KB at most; more only dynamically.",
    ),
    (
        r"undefined (reference|symbol)",
        "Every function that is declared must be defined: in cuda_sources or cpp_sources.",
    ),
    (r"redefinition|multiple definition|redeclared", "Give every name one definition."),
    (r"has no member", "Tensors have PyTorch's C++ methods: check the name."),
)


class InlineBackend(Backend):
    """See the module."""

    key_prefix = PREFIX

    def prepare(self, artifacts: dict[str, str], device: str) -> None:
        install(artifacts)

    @property
    def contracts(self) -> Mapping[str, str]:
        from kbrl_async.kernels.backends.inline import prompt

        return {"": prompt.CONTRACTS[self.name]}

    @property
    def shots(self) -> tuple[Shot, ...]:
        from kbrl_async.kernels.backends.inline import prompt

        return prompt.SHOTS[self.name]

    def missing(self) -> str:
        try:
            toolchain()
        except MissingTool as error:
            return str(error)
        return ""

    def check(self, candidate: Candidate) -> BuildReport | None:
        tree = syntax.parsed(candidate.source)
        if isinstance(tree, BuildReport):
            return tree
        return syntax.model_fault(ast.walk(tree)) or check_names(tree) or self._check_loader(tree)

    def _check_loader(self, tree: ast.Module) -> BuildReport | None:
        if mentions_loader(tree):
            return None
        hint = "Compile with `from torch.utils.cpp_extension import load_inline`."
        return _report(Fault.STATIC_VIOLATION, "no_kernel", "the candidate compiles no extension", hint)

    def build(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        extensions = read(ast.parse(candidate.source))
        if extensions is None:
            found = self._recorded(candidate, problem, context)
            if isinstance(found, BuildReport):
                return found
            extensions = found
        each = list({extension.key: extension for extension in extensions}.values())[:_MAX_EXTENSIONS]
        reports = []
        with ThreadPoolExecutor(min(len(each), _AT_ONCE)) as pool:
            for asked in [pool.submit(self.unit, extension, context) for extension in each]:
                if (report := asked.result()).fault is not Fault.OK:
                    pool.shutdown(cancel_futures=True)
                    return report
                reports.append(report)
        artifacts = {key: address for report in reports for key, address in report.artifacts.items()}
        kernels = list(dict.fromkeys(name for report in reports for name in report.kernels))
        cached, tools = all(report.cached for report in reports), ways.joined(report.toolchain for report in reports)
        whole = msgspec.structs.replace(reports[-1], artifacts=artifacts, kernels=kernels, cached=cached)
        return msgspec.structs.replace(whole, toolchain=tools)

    def unit(self, extension: Extension, context: BuildContext) -> BuildReport:
        """One extension."""
        if extension.with_cuda and "cuda" not in self.runs_on:
            hint = f"Backend {self.name} compiles cpp_sources only."
            return _report(Fault.STATIC_VIOLATION, "cuda_source", "the extension has CUDA sources", hint)
        if len(extension.units) > MAX_UNITS or len(extension.name) > _MAX_NAME or "\0" in extension.name:
            hint = f"Up to {MAX_UNITS} sources under one plain name."
            return _report(
                Fault.STATIC_VIOLATION, "extension", "the extension's name or sources are no compiler's", hint
            )
        try:
            flags = chosen(extension, context.farm.arch)
        except FlagRefused as refused:
            hint = (
                "Optimisation, warning, macro and floating-point flags are allowed; the architecture is chosen for you."
            )
            return _report(Fault.STATIC_VIOLATION, "flag", f"the flag {refused} is not allowed", hint)
        tools = toolchain()
        label = f"{tools.label(True)} {flags.arch}" if extension.with_cuda else tools.label(False)

        def make() -> tuple[BuildReport, bool]:
            build = Build(extension, flags, tools, context)
            attempt = build.fast()
            why_full = ""
            if not attempt.is_built and not attempt.is_final:
                attempt, why_full = build.full(attempt.failed_units), _why_full(attempt)
            report = _verdict(attempt, extension, context)
            isolation = attempt.run.isolation if attempt.run else "none"
            is_deterministic = attempt.run is None or attempt.run.is_deterministic
            stamped = msgspec.structs.replace(report, toolchain=ways.named(label, why_full), isolation=isolation)
            return stamped, is_deterministic

        return context.cached("inline", label, slim_version(), extension.key, make=make)

    def _recorded(
        self, candidate: Candidate, problem: Problem | None, context: BuildContext
    ) -> list[Extension] | BuildReport:
        found = ask(candidate, problem, context, is_on_gpu="cuda" in self.runs_on)
        if isinstance(found, BuildReport):
            return found
        if not found.asked.extensions:
            text = found.recorded.error or "the candidate called no loader"
            hint = "Call load_inline at the top level, in __init__ or in forward."
            return _report(Fault.RUNTIME_ERROR, "no_extension", text, hint)
        return found.asked.extensions


class CppBackend(InlineBackend):
    """`load_inline(cpp_sources=…)`, compiled by g++ for the CPU."""

    name = "cpp"
    is_recorded = True
    is_extension = True

    def claims(self, source: str) -> float:
        return 0.5 if _CPP_MARKS.search(source) else 0.0

    def sanitize(self, sanitizer: Sanitizes, task: SanitizeTask, folder: Path) -> Sanitized:
        from kbrl_async.kernels.backends.inline.sanitize import sanitize

        return sanitize(sanitizer, task, folder)


class CudaBackend(InlineBackend):
    """`load_inline(cuda_sources=…)`, compiled by nvcc and g++ on any host."""

    name = "cuda"
    runs_on = frozenset({"cuda"})
    hints: ClassVar[Mapping[str, str]] = {
        "slow": "It is right. Make it faster: coalesced 16-byte loads, fewer launches, shared memory for reuse.",
        "runtime": "Check grid and block sizes, bounds in the kernel, and shared memory sizes.",
    }

    def claims(self, source: str) -> float:
        """A kernel alone is CUDA's, too, where nothing says what launches it."""
        return 0.8 if _CUDA_MARKS.search(source) else 0.6 if "__global__" in source else 0.0

    def missing(self) -> str:
        reason = super().missing()
        return reason or ("" if toolchain().nvcc else f"nvcc is not installed: {NVCC_CURE}")


def _verdict(attempt: BuildAttempt, extension: Extension, context: BuildContext) -> BuildReport:
    assert attempt.run is not None, "a full build always runs a tool"
    if not attempt.is_built:
        return context.failure(attempt.run, diagnose)
    if attempt.open_symbols:
        text = "\n".join(f"undefined symbol: {symbol}" for symbol in attempt.open_symbols[:8])
        return BuildReport(Fault.COMPILE_ERROR, message=text[:_MAX_TEXT], hint=_hint(text))
    address = context.store.put(attempt.content)
    return BuildReport(Fault.OK, {extension.key: address}, kernels=kernel_names(extension))


def _why_full(fast: BuildAttempt) -> str:
    """What kept an extension from the fast way, in few words, so that like is counted with like."""
    if fast.unfit or fast.run is None:
        return fast.unfit or "not tried"
    lines = [_clean(line) for line in fast.run.output.splitlines() if _ERROR.search(line)]
    first = lines[0] if lines else "a tool ended without a word"
    return re.sub(r"^[^:]*:\d+:(\d+:)?\s*|^[^(]*\(\d+\):\s*", "", first)[:_MAX_WHY]


def kernel_names(extension: Extension) -> list[str]:
    """Of its `__global__` functions; of an extension for the CPU, the functions that Python can call."""
    texts = [_COMMENT.sub(" ", unit.text) for unit in extension.units]
    kernels = [name for text in texts for name in _KERNEL.findall(text)]
    return list(dict.fromkeys(kernels or [name for text in texts for name in _BOUND.findall(text)]))


def diagnose(output: str) -> Diagnosis:
    """The first errors of g++, nvcc, ptxas or ld, without folders of ours."""
    lines = [line for line in output.splitlines() if _ERROR.search(line) and "warning: " not in line]
    text = "\n".join(_clean(line) for line in (lines or output.splitlines())[:6])
    return Diagnosis(text[:_MAX_TEXT], _hint(text))


def _clean(line: str) -> str:
    return _OURS.sub("", line).strip()


def _hint(text: str) -> str:
    return next(
        (hint for pattern, hint in _HINTS if re.search(pattern, text)),
        "Fix the first error; others may follow from it.",
    )


def _report(fault: Fault, rule: str, message: str, hint: str) -> BuildReport:
    return BuildReport(fault, message=message[:_MAX_TEXT], hint=hint, rule=rule)


CPP, CUDA = CppBackend(), CudaBackend()
