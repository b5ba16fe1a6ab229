"""Compiled baselines of a bench: libraries made once in a confined child with a compiler, timed like candidates."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.problems.cases import cases
from kbrl_async.kernels.sandbox import Access, Limits, Zygote
from kbrl_async.kernels.timing import Interval
from kbrl_async.kernels.timing.baselines import CompiledBaseline, Order, over, wrapper
from kbrl_async.kernels.timing.combining import Part, combined
from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.kernels.verify.bench import Bench
from kbrl_async.kernels.verify.device import device_of
from protocols.records import Candidate, Fault, Problem, Timing

_ENTRY = "kbrl_async.kernels.timing.baselines:compile_child"


class _TorchBaseline(msgspec.Struct, frozen=True):
    path: Path
    single: bool


class Baselines:
    """Speedups over compiled references, in the session of one bench::

        with Baselines(bench) as baselines:
            timing = baselines.beside(problem, timing, ("compile",))

    A library is kept while this lives; its timing is taken anew for each candidate.
    """

    def __init__(self, bench: Bench, *, deadline_s: float = 300.0) -> None:
        self._bench, self._deadline_s = bench, deadline_s
        self._folder = Path(tempfile.mkdtemp(prefix="kbrl-baselines-"))
        self._zygote: Zygote | None = None
        self._libraries: dict[tuple[str, str], _TorchBaseline | str] = {}

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def beside(
        self,
        problem: Problem,
        timing: Timing,
        names: tuple[str, ...],
        told: Callable[[str, Timing], None] = lambda _name, _timing: None,
    ) -> tuple[Timing, dict[str, str]]:
        """`timing` with its speedups over these baselines, and why any is missing. `told` hears each as measured."""
        found: dict[str, tuple[float, float, float]] = {}
        missing: dict[str, str] = {}
        for name in names:
            measured = self._over_all(problem, timing, name)
            if isinstance(measured, str):
                missing[name] = measured
                continue
            told(name, measured)
            candidate = Interval(timing.speedup, timing.lo, timing.hi)
            quotient = over(candidate, Interval(measured.speedup, measured.lo, measured.hi))
            found[name] = (quotient.median, quotient.lo, quotient.hi)
        return msgspec.structs.replace(timing, baselines={**timing.baselines, **found}), missing

    def _over_all(self, problem: Problem, timing: Timing, name: str) -> Timing | str:
        """On the workloads that `timing` is of, each with a library for its own shapes."""
        weights = {one.name: one.weight for one in timing.workloads}
        if not weights:
            return self.measure(problem, name)
        parts = []
        for bound in cases(problem, random.Random(0)):
            if (weight := weights.get(bound.workload.name)) is not None:
                measured = self.measure(bound.problem, name)
                if isinstance(measured, str):
                    return measured
                parts.append(Part(bound.workload.name, weight, measured, ()))
        return combined(parts)

    def measure(self, problem: Problem, name: str) -> Timing | str:
        """Eager against the compiled reference, now; or why that can't be."""
        library = self._library(problem, name)
        if isinstance(library, str):
            return library
        candidate = Candidate(self._runs(problem, library), LIBRARY.name)
        report = self._bench.evaluate(problem, candidate, {f"aoti:{name}": library.path})
        if report.timing is None or report.verdict.fault is not Fault.OK:
            return f"the compiled reference ends {report.verdict.fault.value}: {report.verdict.message[:200]}"
        return report.timing

    def _runs(self, problem: Problem, library: _TorchBaseline) -> str:
        return wrapper(problem.source, str(library.path), single=library.single, device=self._bench.device)

    def _library(self, problem: Problem, name: str) -> _TorchBaseline | str:
        key = (hashlib.sha256(problem.source.encode()).hexdigest()[:16], name)
        if key not in self._libraries:
            self._libraries[key] = self.compiled(problem.source, name, self._folder / "-".join(key))
        return self._libraries[key]

    def compiled(self, source: str, name: str, folder: Path) -> _TorchBaseline | str:
        shutil.rmtree(folder, ignore_errors=True)  # of a compilation that failed
        folder.mkdir()
        library = folder / "reference.so"
        device = self._bench.device
        if self._zygote is None:
            self._zygote = Zygote(("torch", "kbrl_async.kernels.timing.baselines"), device_of(device).tools)
        order = msgspec.msgpack.encode(Order(source, name, str(library), device, dict(timed_device(device).inductor)))
        limits = Limits(cpu_s=int(self._deadline_s), memory_bytes=16 << 30, file_bytes=1 << 30, files=256, threads=64)
        child = self._zygote.spawn(_ENTRY, order, (), limits, Access(write=(str(folder),)))
        try:
            child.channel.settimeout(self._deadline_s)
            data = child.channel.recv(1 << 16)
        except TimeoutError:
            return f"compiling took longer than {self._deadline_s:g} s"
        finally:
            child.close()
        if not data:
            raise InfraError("the child that compiles a baseline died", "The host may lack memory")
        made = msgspec.msgpack.decode(data, type=CompiledBaseline)
        return made.error or _TorchBaseline(library, made.single)
