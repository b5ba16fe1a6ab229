"""The bench against itself: what does it claim where the true speedup is known?

::

    A/A  a reference against itself (1)            ─┐
    A/B  against itself with more of the same work ─┴▶ Trials (kept, so that a table can be made in parts) ─▶ Report

A slower candidate repeats one small operation on data that stays in the cache `BASE + more` times instead of `BASE`
times; every repetition costs the same, so the truth is known by construction, without timing anything.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.timing import share_at
from kbrl_async.kernels.timing.device import hardware_of, timed_device
from kbrl_async.kernels.timing.methods import Function, ratio
from kbrl_async.kernels.timing.recipe import PLACEMENT
from kbrl_async.kernels.timing.resolution import CaseRow, ResolutionReport, Trial, clock_range, summarise
from kbrl_async.kernels.verify import Bench, BenchOptions, zygote_for
from kbrl_async.lab.report.plots import STANDALONE, Series, line_chart
from protocols.records import BenchReport, Candidate, Problem, Timing

Tell = Callable[[str], None]
Kind = Literal["aa", "ab"]
_LOSSES = 3
_MOST_BESIDE = 20

# ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────────

BASE = 200
SLOWER = {"0.5 %": 201, "1 %": 202, "2 %": 204, "5 %": 210, "20 %": 240}
"""Repetitions, by how much slower they are."""

_BODY = """
import torch
import torch.nn as nn


class NAME(nn.Module):
    def forward(self, x):
        BODY


def get_inputs():
    return [torch.randn(SHAPE, dtype=torch.DTYPE)]


def get_init_inputs():
    return []
"""


class KnownKernel(msgspec.Struct, frozen=True):
    name: str
    body: str
    shape: str
    dtype: str = "float32"

    def source(self, entry: str, body: str = "") -> str:
        text = _BODY.replace("NAME", entry).replace("SHAPE", self.shape).replace("DTYPE", self.dtype)
        return text.replace("BODY", body or self.body)

    @property
    def problem(self) -> Problem:
        return Problem(f"L0/{self.name}", 0, self.name, self.source("Model"))

    @property
    def itself(self) -> Candidate:
        return Candidate(self.source("ModelNew"), LIBRARY.name)


CPU_CASES = (
    KnownKernel("add 1k", "return x + 1", "1024"),
    KnownKernel("softmax 128x512", "return torch.softmax(x, dim=-1)", "128, 512"),
    KnownKernel("gelu 256x1024", "return torch.nn.functional.gelu(x)", "256, 1024"),
    KnownKernel("add 4 MB", "return x + 1", "1024, 1024"),
    KnownKernel("matmul 512", "return x @ x", "512, 512"),
)
"""25 µs to 5 ms on one core."""
GPU_CASES = (
    KnownKernel("add 1k", "return x + 1", "1024"),
    KnownKernel("add 1M", "return x + 1", "1048576"),
    KnownKernel("matmul 2048 bf16", "return x @ x", "2048, 2048", "bfloat16"),
    KnownKernel("add 16M", "return x + 1", "16777216"),
    KnownKernel("softmax 4096x4096", "return torch.softmax(x, dim=-1)", "4096, 4096"),
    KnownKernel("gelu 64M", "return torch.nn.functional.gelu(x)", "8192, 8192"),
    KnownKernel("matmul 8192 bf16", "return x @ x", "8192, 8192", "bfloat16"),
)
"""4 µs to 2 ms on an H100."""

_REPEAT = "y = torch.tanh(x)\n        for _ in range(TIMES - 1):\n            torch.tanh(x, out=y)\n        return y"


def cases(device: str) -> tuple[KnownKernel, ...]:
    return GPU_CASES if device.startswith("cuda") else CPU_CASES


def slower_case(device: str) -> KnownKernel:
    """The reference of the A/B table: some 2 ms on a core, 1 ms on a GPU."""
    shape = "512, 1024" if device.startswith("cuda") else "64, 128"
    return KnownKernel(f"{BASE} × tanh", _REPEAT.replace("TIMES", str(BASE)), shape)


def slower_candidate(case: KnownKernel, times: int) -> tuple[Candidate, float]:
    """`times` repetitions instead of `BASE`, and its true speedup."""
    return Candidate(case.source("ModelNew", _REPEAT.replace("TIMES", str(times))), LIBRARY.name), BASE / times


# ── measurements ──────────────────────────────────────────────────────────────────────────────────────────────────────


class KeptTrial(msgspec.Struct, frozen=True):
    """A line of the file. Files of several equal GPUs may be concatenated."""

    hardware: str
    kind: Kind
    case: str
    trial: Trial


class Trials:
    """What has been measured on `hardware`, by kind and case; kept in `path` where there is one.

    Measuring is over `minutes` after this was made: `is_over`. Raises `UserError` for a file of other hardware or one
    that holds no trials; a last line that was cut off is measured again.
    """

    def __init__(self, hardware: str, path: Path | None = None, minutes: float | None = None) -> None:
        self._hardware, self._path = hardware, path
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._found: dict[Kind, dict[str, list[Trial]]] = {"aa": {}, "ab": {}}
        kept = list(_lines(path)) if path is not None and path.exists() else []
        for line in kept:
            if line.hardware != hardware:
                raise UserError(f"{path} holds measurements of {line.hardware}", f"Give another file for {hardware}")
            self._found[line.kind].setdefault(line.case, []).append(line.trial)
        if path is not None and kept:
            path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def of(self, kind: Kind) -> dict[str, list[Trial]]:
        return {case: list(trials) for case, trials in self._found[kind].items()}

    def count(self, kind: Kind, case: str) -> int:
        return len(self._found[kind].get(case, ()))

    def add(self, kind: Kind, case: str, trial: Trial) -> None:
        self._found[kind].setdefault(case, []).append(trial)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(KeptTrial(self._hardware, kind, case, trial)) + b"\n")


def _lines(path: Path) -> Iterator[KeptTrial]:
    rows = path.read_bytes().split(b"\n")
    for number, row in enumerate(rows, 1):
        try:
            if row:
                yield msgspec.json.decode(row, type=KeptTrial)
        except msgspec.MsgspecError as error:
            if number == len(rows):  # without its newline: the writer was killed
                return
            cause = f"{path}:{number} is no measurement: {error}"
            raise UserError(cause, "Give a file that --trials wrote, or a new one") from None


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class SelfTest(msgspec.Struct, frozen=True):
    """What shall be measured: `pairs` A/A measurements in all, a fifth as many A/B ones of each slowdown."""

    aa: bool
    ab: bool
    pairs: int
    beside: bool = False
    """Other methods on the same kernels too, in as much time."""
    kept: Path | None = None
    """Each measurement is kept there, and what is there is not measured again."""
    minutes: float | None = None
    """Nothing is begun after so long."""


def measure(asked: SelfTest, bench_options: BenchOptions, tell: Tell) -> ResolutionReport:
    """Minutes."""
    device, chosen = bench_options.device, cases(bench_options.device)
    others: dict[str, dict[str, float]] = {}
    trials = Trials(hardware_of(device), asked.kept, asked.minutes)
    with zygote_for(device) as zygote, contextlib.closing(Bench(zygote, bench_options)) as bench:
        if asked.aa:
            aa(bench, chosen, asked.pairs, tell, random.Random(), trials)
        if asked.ab:
            ab(bench, device, max(1, asked.pairs // 5), tell, trials)
        runs, truths = (trials.of("aa") if asked.aa else {}), (trials.of("ab") if asked.ab else {})
        for case in chosen if asked.beside else ():
            tell(f"other methods: {case.name}")
            as_long = [trial.seconds for trial in runs.get(case.name, ())] or [bench_options.recipe.cap_s]
            count = max(3, min(_MOST_BESIDE, asked.pairs // 20))
            others[case.name] = beside(case, device, count, statistics.median(as_long))
    return report(hardware_of(device), runs, truths, others)


def aa(bench: Bench, chosen: Sequence[KnownKernel], pairs: int, tell: Tell, rng: random.Random, trials: Trials) -> None:
    """Until there are `pairs` measurements of a reference against itself in all, or time is over; the cases take turns,
    so that each sees all hours.
    """
    order = list(chosen)
    for number in range(sum(trials.count("aa", case.name) for case in chosen), pairs):
        if trials.is_over:
            return
        rng.shuffle(order)
        case = min(order, key=lambda case: trials.count("aa", case.name))
        tell(f"A/A {number + 1} of {pairs}: {case.name}")
        trials.add("aa", case.name, _trial(bench, case.problem, case.itself, 1.0))


def ab(bench: Bench, device: str, runs: int, tell: Tell, trials: Trials) -> None:
    """Until there are `runs` measurements of each known slowdown, or time is over."""
    case = slower_case(device)
    for number in range(runs):
        for name, times in SLOWER.items():
            if trials.is_over:
                return
            if trials.count("ab", name) > number:
                continue
            tell(f"A/B {number + 1} of {runs}: {name} slower")
            candidate, truth = slower_candidate(case, times)
            trials.add("ab", name, _trial(bench, case.problem, candidate, truth))


def _trial(bench: Bench, problem: Problem, candidate: Candidate, truth: float) -> Trial:
    report = _evaluated(bench, problem, candidate)
    if report.timing is None:
        verdict = report.verdict
        cause = f"a known kernel ended {verdict.fault.value}: {verdict.message or 'no timing'}"
        raise InfraError(cause, "The bench itself is wrong")
    return trial_of(report.timing, truth)


def _evaluated(bench: Bench, problem: Problem, candidate: Candidate) -> BenchReport:
    """Tried again where the host failed, as a run does (I4): after `_LOSSES` it is a fault to tell."""
    for _ in range(_LOSSES - 1):
        with contextlib.suppress(InfraError):
            return bench.evaluate(problem, candidate, {})
    return bench.evaluate(problem, candidate, {})


def trial_of(timing: Timing, truth: float) -> Trial:
    """As measured: what the interval was widened by is taken off again."""
    wide = 1 + timing.resolution
    return Trial(
        timing.speedup,
        timing.lo * wide,
        timing.hi / wide,
        timing.candidate_ms,
        timing.n,
        timing.spent_s,
        timing.stopped,
        truth,
        timing.load or 0.0,
        timing.clock_mhz,
        timing.throttle,
    )


def beside(case: KnownKernel, device: str, runs: int, budget_s: float) -> dict[str, float]:
    """Worst error of other methods on the same kernel against itself, with `budget_s` for each decision."""
    worst: dict[str, float] = {}
    for name, method in timed_device(device).methods().items():
        twins = ((_function(case, device), _function(case, device)) for _ in range(runs))
        worst[name] = max(abs(ratio(method, *pair, budget_s) - 1) for pair in twins)
    return worst


def _function(case: KnownKernel, device: str) -> Function:
    """Our own source, so it may run in this process."""
    namespace: dict[str, Any] = {}
    exec(compile(case.source("Model"), "case.py", "exec"), namespace)  # noqa: S102 - a constant of ours
    model = namespace["Model"]().to(device)
    inputs = [tensor.to(device) for tensor in namespace["get_inputs"]()]

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def report(
    hardware: str,
    trials: dict[str, list[Trial]],
    truths: dict[str, list[Trial]],
    others: dict[str, dict[str, float]],
) -> ResolutionReport:
    rows = [summarise(name, found, **others.get(name, {})) for name, found in trials.items()]
    rows.sort(key=lambda row: row.ms)
    every = [trial for found in (*trials.values(), *truths.values()) for trial in found]
    known = ResolutionReport(hardware, rows)
    return ResolutionReport(
        hardware,
        rows,
        [_truth_row(name, found, known) for name, found in truths.items()],
        statistics.fmean(trial.load for trial in every) if every else 0.0,
        clock_range(every),
        sorted({reason for trial in every for reason in trial.throttle}),
        {name: importlib.metadata.version(name) for name in ("torch", "numpy")},
        time.time(),
    )


def _truth_row(name: str, found: list[Trial], known: ResolutionReport) -> CaseRow:
    """Widened as a reward would see it: by the resolution that A/A found at this length."""
    ms = statistics.median(trial.ms for trial in found)
    return summarise(name, found, share_at(ms, known.points(), PLACEMENT))


# ── what came of it ───────────────────────────────────────────────────────────────────────────────────────────────────


def svg(report: ResolutionReport) -> str:
    """Worst error and resolution by kernel length, both axes logarithmic; other methods beside them."""
    rows = sorted(report.rows, key=lambda row: row.ms)
    errors = {"this bench, worst": [row.worst_error for row in rows], "its resolution": [row.share for row in rows]}
    for name in sorted({name for row in rows for name in row.methods}):
        errors[name] = [row.methods.get(name, 0.0) for row in rows]
    lines = [
        Series(name, [(row.ms, value) for row, value in zip(rows, values, strict=True) if value > 0], dots=True)
        for name, values in errors.items()
    ]
    return line_chart(
        lines,
        label="error by kernel length",
        x_format=lambda ms: f"{ms:.3g} ms",
        y_format=lambda share: f"{100 * share:.3g} %",
        x_ticks=[row.ms for row in rows],
        log="xy",
        labels="names",
        box=STANDALONE,
        standalone={
            "title": f"A/A error by kernel length on {report.hardware}",
            "x": "length of the kernel",
            "y": "error of a speedup",
        },
    )
