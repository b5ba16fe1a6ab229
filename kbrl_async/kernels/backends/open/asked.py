"""What the recording child is told and tells, and how the trusted side reads it: as the word of a candidate."""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.inline.launch import Extension
from kbrl_async.kernels.backends.triton.tuning import is_tuned
from kbrl_async.kernels.problems.beside import modules_of
from protocols.records import BuildReport, Candidate, Fault, Problem

ASKED = "asked"
_CHILD = "kbrl_async.kernels.backends.open.recording:record"
_TRITON_CHILD = "kbrl_async.kernels.backends.triton.ahead:record"
_MAX_EACH = 64
_LATE_HINT = "Do at import and in the constructor what has to be done once; a forward is called once here, too."


class CudaSource(msgspec.Struct, frozen=True):
    """One use of `cuda_kernel`, or of `torch.cuda._compile_kernel`."""

    source: str
    name: str
    options: tuple[str, ...] = ()


class Requested(msgspec.Struct):
    """Each once, in order."""

    extensions: list[Extension]
    c: list[str]
    """Sources of `c_kernel`."""
    cuda: list[CudaSource]

    def __len__(self) -> int:
        return len(self.extensions) + len(self.c) + len(self.cuda)


class RecordOrder(msgspec.Struct, frozen=True):
    """What the child is told."""

    source: str
    problem: str
    folder: str
    is_on_gpu: bool
    arch: int
    tuning_s: float


class RecorderReport(msgspec.Struct, frozen=True):
    """How it went; untrusted, as the candidate ran beside it."""

    error: str = ""
    """Why the candidate ended early, where it did; what it had asked for before counts."""
    compile_error: str = ""
    """Triton's own, which ends the build."""
    tuning: str = ""
    """What a tuner has to do without."""


class RecordedRequests(msgspec.Struct, frozen=True):
    """What a candidate asked for, read and bounded."""

    asked: Requested
    recorded: RecorderReport
    bundle: dict[str, bytes]
    """Triton's machine code."""
    isolation: str
    is_deterministic: bool


def ask(
    candidate: Candidate, problem: Problem | None, context: BuildContext, *, is_on_gpu: bool, has_triton: bool = False
) -> RecordedRequests | BuildReport:
    """Run it once, confined; a report where that says nothing, or is a lie."""
    is_long = has_triton and is_tuned(modules_of(candidate.source))
    deadline = context.farm.deadline_s + (context.farm.tuning_s if is_long else 0.0)
    with context.folder() as folder:
        source = "" if problem is None else problem.source
        arch = int(context.farm.arch.removeprefix("sm_").rstrip("af"))
        payload = msgspec.msgpack.encode(
            RecordOrder(candidate.source, source, str(folder), is_on_gpu, arch, context.farm.tuning_s)
        )
        child = context.python(_TRITON_CHILD if has_triton else _CHILD, payload, folder, deadline_s=deadline)
        done = answers.collect(child, folder, deadline)
    if done.is_late:
        text = f"importing the candidate, constructing ModelNew and calling it once took longer than {deadline:g} s"
        return BuildReport(Fault.TIMEOUT, message=text, hint=_LATE_HINT, rule="import", isolation=done.isolation)
    recorded = answers.read(done.data, RecorderReport)
    files = dict(done.files)
    asked = answers.read(files.pop(ASKED, msgspec.msgpack.encode(Requested([], [], []))), Requested)
    is_forged = recorded is None and bool(done.data)
    if is_forged or asked is None or not all(extension.units for extension in asked.extensions):
        text = "what the candidate compiles was told in another way than the recorder does"
        hint = "Call load_inline, and write to no file."
        return BuildReport(Fault.CHEATING, message=text, hint=hint, rule="forged_result", isolation=done.isolation)
    bounded = Requested(asked.extensions[:_MAX_EACH], asked.c[:_MAX_EACH], asked.cuda[:_MAX_EACH])
    recorded = recorded or RecorderReport("the candidate ended its process")
    return RecordedRequests(bounded, recorded, files, done.isolation, bool(done.data))
