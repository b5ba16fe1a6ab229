"""The process that audits one problem after the other: `python -m kbrl_async.kernels.audit.worker OPTIONS`.

::

    stdin: one `Problem` a line ─▶ probe ─▶ ours ─▶ stdout: `AuditProgress` lines, the last of a problem with `done`

It limits its own memory; whoever started it watches the clock and kills it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels import sandbox
from kbrl_async.kernels.audit import ours, probe
from kbrl_async.kernels.audit.probe import AuditProbe, AuditTask
from kbrl_async.kernels.audit.wire import READY, AuditOptions, AuditProgress
from kbrl_async.kernels.problems.audit_file import (
    CANNOT_RUN,
    CLEAN,
    FLAGGED,
    NOT_AUDITED,
    AuditFinding,
    ProblemAudit,
    problem_hash,
)
from kbrl_async.kernels.sandbox import Isolation, Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options
from kbrl_async.kernels.verify.device import Device, device_of
from kbrl_async.kernels.verify.references import References
from protocols.records import Problem

_GIB = 1 << 30
_CASTS_S, _CASTS_SHARE = 5.0, 4.0
"""What casts may take on a CPU, in all or in times of what came before: some processors have no instructions for half
precision and take a hundred times as long, for what no verdict is held against.
"""

_PRELOAD = ("kbrl_async.kernels.audit.probe", "kbrl_async.kernels.audit.meta")

Tell = Callable[[ProblemAudit, bool], None]


class AuditWorker:
    def __init__(self, zygote: Zygote, options: AuditOptions, device: Device) -> None:
        self.zygote, self.options, self._device = zygote, options, device
        self._lasting: References | None = None
        self._ends, self._allowed_s = 0.0, options.time_limit_s
        self.memory = int(options.memory_limit_gib * _GIB)
        self.limits = sandbox.Limits(
            cpu_s=int(options.time_limit_s) + 1, memory_bytes=self.memory, file_bytes=self.memory
        )

    def audit(self, problem: Problem, tell: Tell) -> None:
        began = time.perf_counter()
        self._ends, self._allowed_s = began + self.options.time_limit_s, self.options.time_limit_s
        audit = ProblemAudit(problem.problem_id, problem_hash(problem), NOT_AUDITED, reason="it did not start")

        def elapsed() -> float:
            return round(time.perf_counter() - began, 3)

        found, isolation = self._probe(
            problem, "scores", lambda f, i: tell(_with_scores(audit, f, i, elapsed()), False)
        )
        audit = _with_scores(audit, found, isolation, elapsed())
        if not found.error:
            tell(concluded(msgspec.structs.replace(audit, reason="our own tolerances were not tried")), False)
            audit = self._ours(problem, audit, found.bytes)
            tell(concluded(msgspec.structs.replace(audit, reason="casts were not tried")), False)
            if self.options.device == "cpu":
                self._allow(max(_CASTS_S, _CASTS_SHARE * elapsed()))
            casts, _ = self._probe(problem, "casts", lambda _probe, _isolation: None)
            cut = f"casts: {casts.error}" if casts.error else ""
            audit = msgspec.structs.replace(audit, findings=audit.findings + casts.findings, reason=cut)
        tell(concluded(msgspec.structs.replace(audit, seconds=elapsed())), True)

    def _probe(self, problem: Problem, part: str, partly: Callable[[AuditProbe, str], None]) -> tuple[AuditProbe, str]:
        task = AuditTask(problem.source, self.options.device, part)
        found = AuditProbe("start", error="it ended before its first step")
        if self.options.device != "cpu":
            return _run_here(task, partly), "none"
        entry, payload = "kbrl_async.kernels.audit.probe:main", msgspec.msgpack.encode(task)
        child = self.zygote.spawn(entry, payload, (), self.limits, sandbox.Access())
        try:
            isolation = "none"
            child.channel.settimeout(self._left())
            isolation = msgspec.msgpack.decode(child.channel.recv(1 << 16), type=Isolation).level
            while data := self._message(child):
                told = probe.read(data)
                if told is None:
                    text = f"it sent what no probe sends, in the step after {found.step!r}"
                    return msgspec.structs.replace(found, error=text), isolation
                found = told
                partly(found, isolation)
                if found.error or found.step == probe.LAST[part]:
                    return found, isolation
            child.ends(1.0)
            text = f"its process ended with status {child.result(0.0)} in the step after {found.step!r}"
            return msgspec.structs.replace(found, error=text, out_of_memory=True), isolation
        except TimeoutError:
            text = f"it took longer than {self._allowed_s:.3g} s in the step after {found.step!r}"
            return msgspec.structs.replace(found, error=text, out_of_memory=True), isolation
        finally:
            child.close()

    def _message(self, child: sandbox.Child) -> bytes:
        """Empty where the child is gone."""
        child.channel.settimeout(self._left())
        with contextlib.suppress(ConnectionError):
            return child.channel.recv(1 << 20)
        return b""

    def _allow(self, seconds: float) -> None:
        """From now on, where so much is left of this problem's time."""
        if seconds < self._left():
            self._ends, self._allowed_s = time.perf_counter() + seconds, seconds

    def _left(self) -> float:
        """Seconds of this problem's time."""
        return max(0.01, self._ends - time.perf_counter())

    def _ours(self, problem: Problem, audit: ProblemAudit, size: int) -> ProblemAudit:
        if self.options.device == "cpu" and size * ours.COPIES > self.memory:
            needed = size * ours.COPIES / _GIB
            return msgspec.structs.replace(audit, ours=f"not tried: it would need about {needed:.1f} GiB")
        try:
            with self._references() as references:
                made = ours.cheap_outputs(references, problem)
        except ProblemError as error:
            return msgspec.structs.replace(audit, ours=f"not tried: {error}")
        except (InfraError, MemoryError, RuntimeError, OSError) as error:
            return msgspec.structs.replace(audit, ours=f"not tried: {type(error).__name__}: {error}"[:300])
        found = tuple(probe.finding(trial) for trial in made if trial.passes)
        return msgspec.structs.replace(audit, findings=audit.findings + found, trials=audit.trials + made)

    @contextlib.contextmanager
    def _references(self) -> Iterator[References]:
        """Of one problem: on a CPU with its own deadline, on a GPU with processes that serve all of them."""
        if self.options.device == "cpu":
            with contextlib.closing(self._made(self._left())) as found:
                yield found
            return
        self._lasting = self._lasting or self._made(self.options.time_limit_s)
        try:
            yield self._lasting
        finally:
            self._lasting.forget()

    def _made(self, deadline_s: float) -> References:
        share = gpu_share(self.options) if self.options.device != "cpu" else 1.0
        options = bench_options(
            TimingBench(), self.options.device, reference_deadline_s=deadline_s, limits=self.limits, memory_share=share
        )
        fitted = self._device.fitted(options)
        return References(self.zygote, fitted, secrets.SystemRandom(), self._device)


def gpu_share(options: AuditOptions) -> float:
    """Of a GPU's memory, what an audit may plan with."""
    total: int = torch.cuda.get_device_properties(torch.device(options.device)).total_memory
    return min(1.0, options.memory_limit_gib * _GIB / total)


def _run_here(task: AuditTask, partly: Callable[[AuditProbe, str], None]) -> AuditProbe:
    """On a GPU: in this process, one problem after the other."""
    last = AuditProbe("start")

    def tell(found: AuditProbe) -> None:
        nonlocal last
        last = found
        partly(found, "none")

    probe.run(task, tell)
    gc.collect()  # a problem's module is a cycle, and holds what its code kept
    torch.cuda.empty_cache()
    return last


def _with_scores(audit: ProblemAudit, found: AuditProbe, isolation: str, seconds: float) -> ProblemAudit:
    """What a probe says so far. An error that is the problem's own is a finding, too little room is none."""
    findings, reason = found.findings, found.error
    if found.error and not found.out_of_memory and found.step == "run":
        findings = (*findings, AuditFinding(CANNOT_RUN, found.error))
    return msgspec.structs.replace(
        audit,
        reason=reason,
        findings=findings,
        trials=found.trials,
        outputs=found.outputs,
        output_scale=found.output_scale,
        seconds=seconds,
        isolation=isolation,
    )


def concluded(audit: ProblemAudit) -> ProblemAudit:
    """What speaks against a problem counts even where not everything could be tried."""
    is_whole = not audit.reason or audit.reason.startswith("casts")
    status = FLAGGED if audit.flags else CLEAN if is_whole else NOT_AUDITED
    return msgspec.structs.replace(audit, status=status)


def _limit_own_memory(options: AuditOptions) -> None:
    """Addresses on the CPU; with CUDA, which reserves many, private memory."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    kind = resource.RLIMIT_AS if options.device == "cpu" else resource.RLIMIT_DATA
    limit = mapped + int(options.memory_limit_gib * _GIB)
    resource.setrlimit(kind, (limit, resource.RLIM_INFINITY))


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=AuditOptions)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a problem prints is not an answer
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    device = device_of(options.device)
    with device.zygote(_PRELOAD if options.device == "cpu" else _PRELOAD[:1]) as zygote:
        _limit_own_memory(options)
        if options.device != "cpu":
            device.open(gpu_share(options))
        worker = AuditWorker(zygote, options, device)
        answers.write(READY + b"\n")
        answers.flush()
        with contextlib.suppress(BrokenPipeError):
            for line in sys.stdin.buffer:
                worker.audit(msgspec.json.decode(line, type=Problem), _teller(answers))


def _teller(answers: BinaryIO) -> Tell:
    def tell(audit: ProblemAudit, done: bool) -> None:
        answers.write(msgspec.json.encode(AuditProgress(audit, done)) + b"\n")
        answers.flush()

    return tell


if __name__ == "__main__":
    main()
