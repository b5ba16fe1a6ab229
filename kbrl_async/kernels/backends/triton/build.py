"""Backend `triton`: kernels compiled ahead for the bench's GPU, on a host that has none.

::

    candidate + problem ─▶ confined child: forward on tensors without memory (`triton_ahead`) ─▶ bundle of machine code

A compile error of Triton is found here. What this host can't foresee (a launch that depends on values in a tensor) is
said in the report's hint, and compiled on the bench at the first call.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from kbrl_async.errors import InfraError, MissingTool
from kbrl_async.kernels.backends.backend import Backend
from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.checks.device import CheckFailed, called, checked_tree
from kbrl_async.kernels.backends.launch import bundle, uncompiled
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.backends.triton.tuning import is_tuned
from kbrl_async.kernels.problems.beside import modules_of
from protocols.records import BuildReport, Candidate, Fault, Problem

CURE = "Install it with `pip install 'kbrl-async[triton]'`"
_MAX_TEXT = 800
_CHILD = "kbrl_async.kernels.backends.triton.ahead:compile_triton"
_MARKS = re.compile(r"^\s*(import triton|from triton)\b|@triton\.(jit|autotune)|\btl\.load\b", re.MULTILINE)
_HINTS = (
    ("out of resource", "Take smaller blocks, fewer stages or fewer warps."),
    ("power of 2", "Block sizes are powers of two: round up with triton.next_power_of_2 and mask."),
    ("has no attribute", "Use only functions that triton.language has."),
    ("constexpr", "Shapes of blocks and arguments of tl.arange must be tl.constexpr parameters."),
    ("is not defined", "A kernel sees its parameters, its locals, and tl.constexpr globals."),
    ("Cannot make_shape_compatible", "Broadcasting needs shapes that agree: add axes with x[:, None]."),
    ("PassManager", "Simplify the kernel: this construct is not supported by the compiler."),
)


class TritonOrder(msgspec.Struct, frozen=True):
    """What the confined child is told."""

    source: str
    problem: str
    arch: int
    folder: str
    tuning_s: float


class Ahead(msgspec.Struct, frozen=True):
    """How it went. Untrusted: it comes from where the candidate ran."""

    error: str = ""
    """Triton's own compile error, as `line N: source: reason`."""
    note: str = ""
    """Why not everything was compiled."""
    tuning: str = ""
    """What a tuner has to do without."""


class TritonBackend(Backend):
    """See the module."""

    name = "triton"
    prompt = "kbrl_async.kernels.backends.triton.prompt"
    runs_on = frozenset({"cpu", "cuda"})
    is_recorded = True
    reads_bytes = True
    key_prefix = triton_cache.PREFIX
    preload = ("kbrl_async.kernels.backends.triton.preload",)
    hints: ClassVar[Mapping[str, str]] = {
        "mismatch": "Check masks, strides and the reduction axis; accumulate in float32.",
        "slow": "It is right. Make it faster: larger blocks, more warps, fewer passes over memory.",
    }

    def claims(self, source: str) -> float:
        return 0.9 if _MARKS.search(source) else 0.0

    def prepare(self, artifacts: dict[str, str], device: str) -> None:
        for path in artifacts.values():
            triton_cache.prepare(path, device)

    def is_interpreted(self, device: str) -> bool:
        return device == "cpu"

    def refuse(self, candidate: str, problem: str) -> None:
        """The interpreter's arithmetic on bfloat16 is silently wrong: nobody's candidate may be judged by it."""
        if re.search(r"bfloat16|\bbf16\b", candidate + problem):
            cure = "Verify it where there is a GPU"
            raise InfraError("Triton's interpreter computes wrongly with bfloat16, so it says nothing here", cure)

    def missing(self) -> str:
        return "" if importlib.util.find_spec("triton") else f"triton is not installed: {CURE}"

    def check(self, candidate: Candidate) -> BuildReport | None:
        try:
            tree = checked_tree(candidate.source)
            if not any(isinstance(node, ast.FunctionDef) and _is_jit(node) for node in ast.walk(tree)):
                hint = "Define a kernel with @triton.jit and launch it in forward: kernel[grid](…)."
                raise CheckFailed("no_kernel", "the candidate has no @triton.jit kernel", hint)
        except CheckFailed as refusal:
            return refusal.report
        return None

    def build(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        """Without a problem nothing is known of the launches, so nothing is compiled."""
        if self.missing():
            raise MissingTool("triton is not installed", CURE)
        toolchain = f"triton {importlib.metadata.version('triton')}"
        arch = context.farm.arch
        known = "" if problem is None else problem.source

        def compile_() -> tuple[BuildReport, bool]:
            more = context.farm.tuning_s if is_tuned(modules_of(candidate.source)) else 0.0
            deadline = context.farm.deadline_s + more
            with context.folder() as folder:
                number = int(arch.removeprefix("sm_").rstrip("af"))
                order = TritonOrder(candidate.source, known, number, str(folder), context.farm.tuning_s)
                payload = msgspec.msgpack.encode(order)
                child = context.python(_CHILD, payload, folder, deadline_s=deadline)
                done = answers.collect(child, folder, deadline)
            report = _report(done, candidate.source, context, deadline)
            is_deterministic = not done.is_late and bool(done.data)
            return msgspec.structs.replace(report, toolchain=toolchain, isolation=done.isolation), is_deterministic

        return context.cached(self.name, toolchain, arch, candidate.source, known, make=compile_)


def _is_jit(node: ast.FunctionDef) -> bool:
    for item in node.decorator_list:
        function = item.func if isinstance(item, ast.Call) else item
        if called(ast.Call(function, [], [])) == "jit":
            return True
    return False


def _report(done: answers.Collected, source: str, context: BuildContext, deadline_s: float) -> BuildReport:
    if done.is_late:
        text = f"compiling took longer than {deadline_s:g} s"
        hint = "Fewer autotune configurations, smaller blocks, less unrolling; or an endless loop outside the kernel."
        return BuildReport(Fault.COMPILE_ERROR, message=text, hint=hint)
    ahead = answers.read(done.data, Ahead) or Ahead(note="the compiler ended without an answer")
    if ahead.error:
        hint = next((hint for pattern, hint in _HINTS if pattern in ahead.error), "Fix the kernel at this line.")
        return BuildReport(Fault.COMPILE_ERROR, message=ahead.error[:_MAX_TEXT], hint=hint)
    artifacts = {triton_cache.key(source): context.store.put(bundle.pack(done.files))}
    left = f"not all was compiled ahead: {ahead.note}" if ahead.note else ahead.tuning
    note = "\n".join(filter(None, (uncompiled.remark(modules_of(source)), left)))
    return BuildReport(Fault.OK, artifacts, hint=note[:_MAX_TEXT], kernels=triton_cache.kernel_names(done.files))


BACKEND = TritonBackend()
