"""`Verifier` keeps builder, zygote and bench alive between candidates; `verify` is one candidate and no state left.

::

    Verifier ── __enter__ ─▶ store, Builder (starts at once), a Judge (its zygote starts while the first compiles)
        verify(problem, candidate) ─▶ Result      (any number of times, one at a time)
    Verifier ── __exit__ ─▶ all of it ends
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from kbrl_async.errors import InfraError, MissingTool, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import modules_of
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.checks.arithmetic import arithmetic_options
from kbrl_async.kernels.funnel.build import Builder
from kbrl_async.kernels.funnel.judge import Judge
from kbrl_async.kernels.funnel.reading import Reading, read_candidate
from kbrl_async.kernels.funnel.result import Result, early, unbuilt, with_findings
from kbrl_async.kernels.problems import beside, downloads, find_problem, parse_problem
from kbrl_async.kernels.problems.precision import in_precision
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.settings import OUTPUTS, CompileFarm, Outputs, Rules, TimingBench
from kbrl_async.kernels.stages import StageClock
from kbrl_async.kernels.timing import Recipe, resolution
from kbrl_async.kernels.timing.peaks import peaks_of
from kbrl_async.kernels.timing.roofline import Peaks
from kbrl_async.kernels.verify import BenchOptions, bench_options, zygote_for
from kbrl_async.kernels.verify.options import Tick, Watch, no_tick
from protocols.records import BuildReport, Candidate, Fault, Problem, StageReport

BARE = {".c": "c", ".h": "c", **dict.fromkeys((".cpp", ".cc", ".cxx"), "cpp"), ".cu": "cuda", ".cuh": "cuda"}
"""Files of a kernel without a module, and the backend that a candidate with it would have."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
_CPU_S = 600
"""Of one child: a reference of many large inputs needs minutes, and every call has its own deadline besides."""


class VerifyOptions(msgspec.Struct, frozen=True):
    timing: bool = True
    sanitize: bool = False
    """Run what compiled under sanitizers too."""
    cores: tuple[int, ...] = ()
    """Children, and the calling thread while it times, are pinned to these."""
    store: str = ""
    """Folder of built artifacts that later calls find again; empty: one of its own, gone afterwards."""
    farm: CompileFarm = CompileFarm(nice=0, rules="open")
    """Nobody times while it compiles here; and whoever asks is a person, so any Python is taken that runs confined."""
    bench: BenchOptions | None = None
    """None: made for this host, with half of the free memory for a candidate."""

    @staticmethod
    def by(rules: Rules, *, timing: bool = True) -> VerifyOptions:
        """The usual ones under these rules, with a bench that is made where the cores are known."""
        usual = VerifyOptions(timing=timing)
        return msgspec.structs.replace(usual, farm=msgspec.structs.replace(usual.farm, rules=rules))


class Verifier:
    """See the module. One thread at a time; several verifiers do not know of each other."""

    def __init__(self, device: str | None = None, options: VerifyOptions | None = None) -> None:
        self.options = options or VerifyOptions()
        self._device = device
        self._judges: dict[tuple[str, ...], Judge] = {}
        self._zygotes: dict[tuple[str, ...], Zygote] = {}
        self._stack = contextlib.ExitStack()
        self._builder: Builder | None = None

    def __enter__(self) -> Verifier:
        with contextlib.ExitStack() as stack:
            folder = self.options.store or tempfile.mkdtemp(prefix="kbrl-verify-")
            if not self.options.store:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store = ArtifactStore(Path(folder), self.options.farm.store_max_bytes)
            self._builder = stack.enter_context(Builder(store, self.options.farm, self.options.cores))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._judges, self._zygotes, self._builder = {}, {}, None
        self._stack.close()

    def restart(self) -> None:
        """Everything anew: after a fault of the host nothing is known about what is still alive."""
        self.close()
        self.__enter__()

    @property
    def builder(self) -> Builder:
        """The build half."""
        assert self._builder is not None, "a Verifier is used inside its with block"
        return self._builder

    def judge(self, device: str, backend: str = "c") -> Judge:
        """The bench half on `device`, started if it is not yet: for what is timed in the same session, too."""
        key = (device, *modules_of(backend))
        if key not in self._judges:
            assert self._builder is not None, "a Verifier is used inside its with block"
            check_device(device)
            self._start_ahead(device, backend)
            bench = self.options.bench or default_bench(self.options.cores, rules=self.options.farm.rules)
            options = msgspec.structs.replace(bench, device=device)
            made = Judge(self._builder.store, options, self._zygotes[key], probe=prober(options))
            self._judges[key] = self._stack.enter_context(made)
        return self._judges[key]

    def _start_ahead(self, device: str, backend: str) -> None:
        """Python and torch of the sandbox start while compilers run."""
        key = (device, *modules_of(backend))
        if key in self._zygotes or not has_device(device):
            return
        zygote = self._stack.enter_context(contextlib.closing(zygote_for(device, backend)))
        self._zygotes[key] = zygote
        threading.Thread(target=_start, args=(zygote,), daemon=True).start()

    def verify(
        self,
        problem: Problem | str | Path,
        candidate: Candidate | Reading | str | Path,
        backend: str | None = None,
        *,
        response: bool | None = None,
        timing: bool | None = None,
        problems: str = "",
        tick: Tick = no_tick,
        watch: Watch | None = None,
        built: BuildReport | None = None,
    ) -> Result:
        """The whole funnel, as `verify` describes it; but a `str` is always the text of a candidate, which may be a
        model's response of one line, and a file is a `Path`. `tick` is called before each step and between those of the
        bench; what it raises ends the work and passes through. `watch` as in `Bench.evaluate`. `built`: what another
        Verifier with the same store has built of the candidate.
        """
        assert self._builder is not None, "a Verifier is used inside its with block"
        clock = StageClock()
        origin = "file"
        if isinstance(candidate, Path):
            candidate = read_text(candidate)
        if isinstance(candidate, str):
            candidate = read_candidate(candidate, backend, response=response)
        problem = _asked(problem, candidate, backend, self._device, problems)
        if isinstance(candidate, Reading):
            reading, origin = candidate, candidate.origin
            if reading.candidate is None:
                clock.ends("format", Fault.FORMAT_ERROR)
                verdict = early(
                    Fault.FORMAT_ERROR, reading.problem, "Answer with one ```python … ``` block.", "no_candidate"
                )
                return Result(problem.problem_id, backend or "", "", verdict, clock.reports, origin=origin)
            candidate = reading.candidate
        clock.ends("format", detail=f"taken from a {origin}")
        timed = self.options.timing if timing is None else timing
        return self._judge(problem, candidate, clock.reports, origin, timed, tick, watch, built)

    def build(self, candidate: Candidate, problem: Problem | None) -> BuildReport:
        """The first half alone, for what this host can't run."""
        assert self._builder is not None, "a Verifier is used inside its with block"
        return self._builder.build(candidate, problem)

    def _judge(
        self,
        problem: Problem,
        candidate: Candidate,
        stages: tuple[StageReport, ...],
        origin: str,
        timing: bool,
        tick: Tick,
        watch: Watch | None,
        built: BuildReport | None,
    ) -> Result:
        assert self._builder is not None
        tick()
        device = choose_device(candidate.backend, self._device)
        self._start_ahead(device, candidate.backend)
        build = built or self._builder.build(candidate, problem)
        result = Result(
            problem.problem_id,
            candidate.backend,
            device,
            unbuilt(build),
            (*stages, *build.stages),
            toolchain=build.toolchain,
            build_isolation=build.isolation,
            origin=origin,
            arithmetic=arithmetic_options(candidate.source),
        )
        if build.fault is not Fault.OK:
            return result
        tick()
        judge = self.judge(device, candidate.backend)
        bench = judge.judge(problem, candidate, build, timing=timing, tick=tick, watch=watch)
        all_stages = (*result.stages, *bench.stages)
        result = msgspec.structs.replace(result, verdict=bench.verdict, timing=bench.timing, stages=all_stages)
        if not self.options.sanitize:
            return result
        clock = StageClock()
        found = judge.sanitize(problem, candidate, build)
        fault = found.findings[0].fault if found.findings else Fault.OK
        clock.ends("sanitize", fault, f"{len(found.findings)} findings by {', '.join(found.ran) or 'nothing that ran'}")
        return with_findings(result, found, clock.reports)


def choose_device(backend: str, wanted: str | None) -> str:
    """`"cpu"` or `"cuda:N"`: `wanted`, or where nothing was asked for the GPU for GPU kernels on a host that has one.

    :raises UserError: `wanted` is no device, or kernels of the backend do not run there.
    """
    kinds = load_backend(backend).runs_on if backend else frozenset({"cpu"})
    if wanted not in (None, "auto"):
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(wanted)):
            raise UserError(f"{wanted!r} is no device", "Choose cpu, cuda or cuda:N")
        if wanted == "cpu" and "cpu" not in kinds:
            raise UserError(f"kernels of {backend} run on a GPU, not on cpu", "Leave the device out, on a GPU host")
        return "cuda:0" if wanted == "cuda" else str(wanted)
    return "cuda:0" if "cuda" in kinds and ("cpu" not in kinds or NVIDIA_DEVICE.exists()) else "cpu"


def shapes_for(device: str) -> str:
    """Which of a problem's two sizes fit a device."""
    return "gpu" if device.startswith("cuda") else "cpu"


def check_device(device: str) -> None:
    """:raises MissingTool: the host has no such device."""
    if not has_device(device):
        cure = "Verify on a GPU host, or a kernel for CPUs: kbrl verify --example c"
        raise MissingTool("this host has no NVIDIA GPU to run the kernel on", cure)


def prober(options: BenchOptions) -> Callable[[], Peaks | None] | None:
    """Measures the peaks of the options' device again; None where none are known."""
    peaks = options.peaks
    if peaks is None:
        return None
    return lambda: peaks_of(options.device, resolution.cache_folder(), peaks.hardware, again=True)


def has_device(device: str) -> bool:
    return not device.startswith("cuda") or NVIDIA_DEVICE.exists()


def _start(zygote: Zygote) -> None:
    """Whoever uses it next meets the same error, in a thread that can tell of it."""
    with contextlib.suppress(InfraError):
        zygote.start()


def default_bench(cores: tuple[int, ...], recipe: Recipe | None = None, rules: Rules = "open") -> BenchOptions:
    """As in a run, but with room for large problems: half of the memory that is free now."""
    memory = max(Limits().memory_bytes, psutil.virtual_memory().available // 2)
    limits = Limits(cores=cores, cpu_s=_CPU_S, memory_bytes=memory, file_bytes=memory)
    return bench_options(TimingBench(outputs=OUTPUTS[rules]), cores=cores, recipe=recipe, limits=limits)


def under(options: VerifyOptions, rules: Rules, outputs: Outputs | None = None) -> VerifyOptions:
    """The options under these rules; where nothing is said of outputs, they decide that, too."""
    bench = msgspec.structs.replace(options.bench or default_bench(options.cores), outputs=outputs or OUTPUTS[rules])
    return msgspec.structs.replace(options, farm=msgspec.structs.replace(options.farm, rules=rules), bench=bench)


def verify(
    problem: Problem | str | Path,
    candidate: Candidate | str | Path,
    backend: str | None = None,
    *,
    timing: bool = True,
    device: str | None = None,
    problems: str = "",
    response: bool | None = None,
    sanitize: bool = False,
    precision: str = "fp32",
    options: VerifyOptions | None = None,
) -> Result:
    """One candidate through the whole funnel, without any running service::

        result = kbrl_async.verify("L1/13_softmax", "my_kernel.py")
        result.ok, result.fault, result.timing, result.stages

    :param problem: a `Problem`, a file, an id of `problems` (a folder; empty: the project's own suite), or source text.
    :param candidate: a `Candidate`, a file, or text: a Python file or a model's response.
    :param backend: None: guessed from what the candidate imports and calls.
    :param precision: `fp32`, `fp16` or `bf16`: module and inputs are cast, as by KernelBench's option.
    :param device: None: the GPU for GPU kernels, else the CPU.
    :param response: None: a text that parses as Python is a file; else fences or tags make it a response.
    :raises UserError: no such file, problem or backend.
    :raises ProblemError: the problem's own reference fails; `MissingTool`, `InfraError`: the host does.
    """
    if not isinstance(candidate, Candidate):
        candidate = read_text(candidate)
    given = read_candidate(candidate, backend, response=response) if isinstance(candidate, str) else candidate
    asked = in_precision(_asked(problem, given, backend, device, problems), precision)
    chosen = msgspec.structs.replace(options or VerifyOptions(), timing=timing, sanitize=sanitize)
    with Verifier(device, chosen) as verifier:
        return verifier.verify(asked, given, backend)


def _asked(
    problem: Problem | str | Path, given: Candidate | Reading, backend: str | None, device: str | None, problems: str
) -> Problem:
    """The problem, in the size of the device that the candidate will run on.

    :raises ProblemError: it loads a model that is not there.
    """
    if not isinstance(problem, Problem):
        found = given.candidate if isinstance(given, Reading) else given
        chosen = choose_device(found.backend if found else backend or "", device)
        problem = load(problem, problems, shapes_for(chosen))
    downloads.check([problem])
    return problem


def load(problem: str | Path, problems: str = "", shapes: str = "cpu") -> Problem:
    """From a file, an id, or source text (anything with a line break)."""
    if isinstance(problem, str) and "\n" in problem:
        return parse_problem(problem, "L0/text", shapes=shapes)
    return find_problem(str(problem), problems, shapes=shapes)


def read_text(candidate: str | Path) -> str:
    """The content of a file, or the text itself where it has a line break.

    :raises UserError: there is no such file, or it is no text, or a kernel without the module that launches it.
    """
    if isinstance(candidate, str) and "\n" in candidate:
        return candidate
    path = Path(candidate).expanduser()
    if path.is_file() and (backend := BARE.get(path.suffix)):
        cause = f"{path} is a kernel alone; a candidate is a Python file whose class ModelNew launches the kernel"
        raise UserError(cause, f"To start from one that works: kbrl verify --example {backend}")
    try:
        return beside.gathered(path) if path.suffix == ".py" else path.read_text()
    except OSError as error:
        raise UserError(f"the candidate {path} can't be read: {error.strerror}", "Give the path of a file") from None
    except UnicodeDecodeError:
        raise UserError(f"the candidate {path} is no text", "Give a Python file or a model's answer") from None
