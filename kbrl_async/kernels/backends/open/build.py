"""The trusted half: which candidates go this way, and one report of all that they asked for.

What `strict` takes is built as `strict` builds it, whatever the rules are: this way costs a run of the candidate.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial

import msgspec

from kbrl_async.kernels.backends.backend import Backend
from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.c.build import BACKEND as C
from kbrl_async.kernels.backends.checks import syntax
from kbrl_async.kernels.backends.inline.backend import CPP, CUDA
from kbrl_async.kernels.backends.inline.ways import joined
from kbrl_async.kernels.backends.launch import bundle, uncompiled
from kbrl_async.kernels.backends.nvrtc.build import BACKEND as NVRTC
from kbrl_async.kernels.backends.open.asked import RecordedRequests, ask
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.problems.beside import modules_of
from protocols.records import BuildReport, Candidate, Fault, Problem

_NAMED = re.compile(r"\bModelNew\b|\bimport \*")
_TRITON = re.compile(r"\btriton\b")
_MAX_TEXT = 800
_NOTHING_HINT = (
    "Build a kernel at import, in __init__ or in forward: c_kernel, load_inline, load, cuda_kernel, a @triton.jit."
)


def check(candidate: Candidate) -> BuildReport | None:
    """All that is asked of a text: it is Python, and names ModelNew. Everything else shows when it runs."""
    tree = syntax.parsed(candidate.source)
    if isinstance(tree, BuildReport):
        return tree
    if _NAMED.search(candidate.source):
        return None
    return syntax.model_fault(tree.body)


def build(chosen: Backend, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
    """For backends of ours. On a GPU a candidate that asked for nothing is built, too: the bench sees what it runs."""
    is_on_gpu = "cuda" in chosen.runs_on
    has_triton = bool(_TRITON.search(modules_of(candidate.source))) and bool(importlib.util.find_spec("triton"))
    found = ask(candidate, problem, context, is_on_gpu=is_on_gpu, has_triton=has_triton and is_on_gpu)
    if isinstance(found, BuildReport):
        return found
    if found.recorded.compile_error:
        return _report(found, Fault.COMPILE_ERROR, found.recorded.compile_error, "Fix the kernel at this line.")
    reports = []
    for report in _units(found, chosen, context):
        if report.fault is not Fault.OK:
            return report
        reports.append(report)
    if not reports and not is_on_gpu:
        text = f"run confined, the candidate built no kernel; {found.recorded.error or 'it ended as it should'}"
        return msgspec.structs.replace(_report(found, Fault.RUNTIME_ERROR, text, _NOTHING_HINT), rule="no_extension")
    artifacts = {key: address for report in reports for key, address in report.artifacts.items()}
    kernels = [name for report in reports for name in report.kernels]
    if has_triton and is_on_gpu:
        artifacts[triton_cache.key(candidate.source)] = context.store.put(bundle.pack(found.bundle))
        kernels += triton_cache.kernel_names(found.bundle)
    error = found.recorded.error
    notes = [f"not all was compiled ahead: {error}" if error else found.recorded.tuning]
    if is_on_gpu:
        notes.insert(0, uncompiled.remark(modules_of(candidate.source)))
    note = "\n".join(filter(None, notes))
    whole = BuildReport(Fault.OK, artifacts, hint=note[:_MAX_TEXT], kernels=list(dict.fromkeys(kernels)))
    tools = joined(report.toolchain for report in reports)
    cpu = next((report.cpu for report in reports if report.cpu), "")
    return msgspec.structs.replace(whole, toolchain=tools, cpu=cpu, isolation=found.isolation)


def _units(found: RecordedRequests, chosen: Backend, context: BuildContext) -> list[BuildReport]:
    """Built one after the other, up to the first that is not."""
    asked = found.asked
    inline = CUDA if "cuda" in chosen.runs_on else CPP
    reports: list[BuildReport] = []
    by_options: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for kernel in asked.cuda:
        by_options.setdefault((kernel.source, kernel.options), []).append(kernel.name)
    makers: list[Callable[[], BuildReport]] = [
        *(partial(inline.unit, extension, context) for extension in asked.extensions),
        *(partial(C.unit, source, context) for source in asked.c),
        *(partial(NVRTC.unit, text, sorted(n), options, context) for (text, options), n in by_options.items()),
    ]
    for make in makers:
        reports.append(make())
        if reports[-1].fault is not Fault.OK:
            break
    return reports


def _report(found: RecordedRequests, fault: Fault, message: str, hint: str) -> BuildReport:
    return BuildReport(fault, message=message[:_MAX_TEXT], hint=hint, isolation=found.isolation)
