"""Backend `cuda-nvrtc`: device code alone, compiled by NVRTC on any host, launched through `launch.cuda_kernel`.

::

    cuda_kernel(SOURCE, "name") or torch.cuda._compile_kernel(SOURCE, "name")
         └─ read from the syntax tree ─▶ NVRTC in a confined child ─▶ bundle of machine code, one for each source

No torch header, no host compiler, no GPU: some 25 to 100 ms a source. The candidate's Python is not executed here.
"""

from __future__ import annotations

import ast
import functools
import re

import msgspec

from kbrl_async.errors import InfraError, MissingTool
from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.building.context import BuildContext, Diagnosis
from kbrl_async.kernels.backends.checks.device import CheckFailed, called, checked_tree, string_constants
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.launch.plan_backend import TakesPlans
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from protocols.records import BuildReport, Candidate, Fault, Problem

LAUNCHERS = ("cuda_kernel", "_compile_kernel")
_CHILD = "kbrl_async.kernels.backends.nvrtc.ahead:compile_nvrtc"
_LAUNCHER = re.compile(r"\b_compile_kernel\b|\b(?:cuda|nvrtc)_kernel\b")
_PLAN = re.compile(r"\A(?=.*^PLAN\s*=).*__global__", re.DOTALL | re.MULTILINE)
_OPTIONS = re.compile(
    r"-{1,2}(use_fast_math|fmad=(true|false)|ftz=(true|false)|prec-(div|sqrt)=(true|false)|maxrregcount[= ]?\d{1,3}"
    r"|std=c\+\+(11|14|17|20)|extra-device-vectorization|O[0-3]|lineinfo)"
)
_OURS = 'extern "C" __global__ void ours(float *x) { x[threadIdx.x] = 1.0f; }'
_MAX_TEXT = 800
_ERROR = re.compile(r"^(?:kernel\.cu|__nv_name_map)\((\d+)\): (?:catastrophic )?error: (.*)$")
_HINTS = (
    (r'identifier ".*" is undefined', "Declare it, or include the header that does; check the spelling."),
    (r"could not open source file|cannot open source file", "Only CUDA's own headers and a few of C's are there."),
    (r"expected a|expected an", "Check braces, brackets and semicolons around the line."),
    (r"no instance of|no operator|argument .* is incompatible|cannot be used to init", "Check the types; cast."),
    (r"name expression", "The kernel that is asked for must be defined in SOURCE, as `__global__ void name(…)`."),
    (r"too many resources|ptxas|shared (data|memory)", "Use less static shared memory (48 KB) or fewer registers."),
)


class LauncherUse(msgspec.Struct, frozen=True):
    """One use of a launcher."""

    source: str
    name: str
    options: tuple[str, ...] = ()


class NvrtcOrder(msgspec.Struct, frozen=True):
    """What the confined child is told."""

    source: str
    names: list[str]
    arch: str
    options: tuple[str, ...]
    folder: str


class Built(msgspec.Struct, frozen=True):
    """How it went; the machine code lies in its bundle."""

    error: str = ""
    """NVRTC's log; empty where it succeeded."""
    unusable: str = ""
    """Why NVRTC itself does not work on this host."""


class NvrtcBackend(TakesPlans):
    """See the module."""

    name = "cuda-nvrtc"
    prompt = "kbrl_async.kernels.backends.nvrtc.prompt"
    runs_on = frozenset({"cuda"})
    launcher = "cuda_kernel"
    is_cuda = True
    reads_bytes = True
    may_tune = False
    key_prefix = cuda.PREFIX

    def claims(self, source: str) -> float:
        return 0.7 if _LAUNCHER.search(source) or _PLAN.search(source) else 0.0

    def prepare(self, artifacts: dict[str, str], device: str) -> None:
        cuda.prepare(artifacts)

    def missing(self) -> str:
        return "" if nvrtc.library_path() else f"NVRTC is not installed: {nvrtc.CURE}"

    def check_module(self, candidate: Candidate) -> BuildReport | None:
        try:
            for kernel in kernels_of(candidate.source):
                _check_kernel(kernel)
        except CheckFailed as refusal:
            return refusal.report
        return None

    def build_module(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        kernels = kernels_of(candidate.source)
        reports = []
        for source, options in dict.fromkeys((kernel.source, kernel.options) for kernel in kernels):
            used = {kernel.name for kernel in kernels if (kernel.source, kernel.options) == (source, options)}
            report = self.unit(source, sorted(used), options, context)
            if report.fault is not Fault.OK:
                return report
            reports.append(report)
        return msgspec.structs.replace(
            reports[-1],
            artifacts={key: address for report in reports for key, address in report.artifacts.items()},
            cached=all(report.cached for report in reports),
            kernels=sorted({kernel.name for kernel in kernels}),
        )

    def unit(self, source: str, names: list[str], options: tuple[str, ...], context: BuildContext) -> BuildReport:
        """These kernels of one CUDA source."""
        toolchain = _toolchain()
        arch = context.farm.arch

        def compile_() -> tuple[BuildReport, bool]:
            done = _compiled(source, names, arch, options, context)
            report = report_of(done, cuda.source_key(source, options), context, arch)
            is_deterministic = not done.is_late and bool(done.data)
            return msgspec.structs.replace(report, toolchain=toolchain, isolation=done.isolation), is_deterministic

        return context.cached(self.name, toolchain, arch, *options, *names, source, make=compile_)

    def diagnose(self, output: str) -> Diagnosis:
        """NVRTC's log with line numbers of the source, each error with the line it stands in."""
        lines, kept = output.splitlines(), []
        for number, line in enumerate(lines):
            found = _ERROR.match(line)
            if found:
                where = f"line {found[1]}: " if line.startswith("kernel") else ""
                code = lines[number + 1].strip() if number + 1 < len(lines) else ""
                kept.append(f"{where}{found[2]}" + (f"\n    {code}" if code and where else ""))
        text = "\n".join(kept[:6]) or output.strip()
        hint = next((hint for pattern, hint in _HINTS if re.search(pattern, text)), "Fix the first error first.")
        return Diagnosis(text[:_MAX_TEXT], hint)


def _compiled(
    source: str, names: list[str], arch: str, options: tuple[str, ...], context: BuildContext
) -> answers.Collected:
    with context.folder() as folder:
        order = NvrtcOrder(source, names, arch, options, str(folder))
        deadline = context.farm.deadline_s
        child = context.python(_CHILD, msgspec.msgpack.encode(order), folder, deadline_s=deadline)
        return answers.collect(child, folder, deadline)


def works_here(arch: str, context: BuildContext) -> bool:
    """Whether NVRTC compiles a source of ours: what a child says of its host, it may say because of its source."""
    done = _compiled(_OURS, ["ours"], arch, (), context)
    return answers.read(done.data, Built) == Built() and bool(done.files)


def report_of(done: answers.Collected, key: str, context: BuildContext, arch: str) -> BuildReport:
    if done.is_late:
        text = f"compiling took longer than {context.farm.deadline_s:g} s"
        return BuildReport(Fault.COMPILE_ERROR, message=text, hint="Simplify the kernel; avoid huge unrolled code.")
    built = answers.read(done.data, Built)
    is_empty = built is not None and not built.error and not done.files
    if built is None or ((built.unusable or is_empty) and works_here(arch, context)):
        hint = "Simplify the kernel; huge templates and constant tables do this."
        return BuildReport(Fault.COMPILE_ERROR, message="the compiler crashed or ran out of memory", hint=hint)
    if built.unusable:
        raise InfraError(f"NVRTC does not work here: {built.unusable}", "It is tried again elsewhere")
    if built.error:
        diagnosis = BACKEND.diagnose(built.error)
        return BuildReport(Fault.COMPILE_ERROR, message=diagnosis.message, hint=diagnosis.hint)
    if not done.files:
        raise InfraError("NVRTC's child left no machine code", "It is tried again elsewhere")
    return BuildReport(Fault.OK, {key: context.store.put(bundle.pack(done.files))})


def kernels_of(source: str) -> list[LauncherUse]:
    """All uses of a launcher, their sources read as literals. Raises `CheckFailed`."""
    tree = checked_tree(source)
    literals = string_constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) in LAUNCHERS]
    if not calls:
        hint = (
            'Write `self.kernel = cuda_kernel(SOURCE, "name")` in __init__, `self.kernel[grid, block](…)` in forward.'
        )
        raise CheckFailed("no_kernel", "the candidate has no cuda_kernel(source, name)", hint)
    return [_kernel(node, literals) for node in calls]


def _kernel(node: ast.Call, literals: dict[str, str]) -> LauncherUse:
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    source = _text(node.args[0] if node.args else named.get("source", named.get("kernel_source")), literals)
    name = _text(node.args[1] if len(node.args) > 1 else named.get("name", named.get("kernel_name")), literals)
    given = named.get("options", named.get("nvcc_options"))
    if given is None and called(node) == "cuda_kernel" and len(node.args) > 2:
        given = node.args[2]
    items = given.elts if isinstance(given, (ast.List, ast.Tuple)) else []
    options = [_text(item, literals) for item in items]
    is_plain = given is None or (isinstance(given, (ast.List, ast.Tuple)) and None not in options)
    if source is None or name is None or not is_plain:
        hint = 'Write cuda_kernel(SOURCE, "name"), where SOURCE is a string literal at the top of the file.'
        raise CheckFailed("kernel_source", f"{called(node)} needs a literal source and a literal name", hint, node)
    return LauncherUse(source, name, tuple(str(option) for option in options))


def _text(node: ast.expr | None, literals: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    return literals.get(node.id) if isinstance(node, ast.Name) else None


def _check_kernel(kernel: LauncherUse) -> None:
    if cuda.parameters(kernel.source, kernel.name) is None:
        text = f"the CUDA source defines no kernel {kernel.name!r}"
        raise CheckFailed("unknown_function", text, f"Define `__global__ void {kernel.name}(…) {{ … }}` in SOURCE.")
    for option in kernel.options:
        if not _OPTIONS.fullmatch(option):
            hint = "Options are those that change the code that is made, as --use_fast_math."
            raise CheckFailed("option", f"compiler option {option!r} is not allowed", hint)


@functools.cache
def _toolchain() -> str:
    """Read from the library's file name: loading it is for confined children."""
    path = nvrtc.library_path()
    if not path:
        raise MissingTool("NVRTC is not installed", nvrtc.CURE)
    return f"nvrtc {nvrtc.identity()}"


BACKEND = NvrtcBackend()
