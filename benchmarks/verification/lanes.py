"""Verdicts a second on GPUs, over what a policy in training writes.

::

    answers of the small policy's author, groups of 8, built beforehand ─▶ queue of groups ─▶ lanes (processes) ─▶ rows
"""

from __future__ import annotations

import contextlib
import cProfile
import math
import multiprocessing as mp
import os
import queue
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Literal

import msgspec

from benchmarks.harness import CORES, Result, percentiles, say
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, Judge
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.stages import spans
from kbrl_async.kernels.timing import ready
from kbrl_async.kernels.timing.turns import Turns
from kbrl_async.kernels.verify import bench_options
from kbrl_async.kernels.verify.options import ALONE_SHARE
from kbrl_async.lab.small_policy.author import Author, Habits
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS
from kbrl_async.rollouts.prompts import extract
from protocols.records import OBSERVED, BenchReport, BuildReport, Candidate, Fault, Problem

GROUP = 8
PRACTISED = Habits(**{name: 0.4 * share for name, share in msgspec.structs.asdict(Habits()).items()})
"""Makes fewer slips than a beginner: in a run on a GPU seven of ten answers that compile are right."""
_SEED, _PATIENCE_S = 11, 180
_WARM = 2
"""Groups of which a lane judges some before it counts: as many references as it keeps."""


class Item(msgspec.Struct, frozen=True):
    candidate: Candidate
    build: BuildReport
    slips: tuple[str, ...]


class Row(msgspec.Struct, frozen=True):
    """One verdict."""

    problem: str
    fault: str
    rule: str
    trust: str
    reason: str
    slips: tuple[str, ...]
    begun: float
    ended: float
    stages: dict[str, float]
    spans: dict[str, float]
    """Of pieces of work, some of which lie within others."""
    measured: tuple[float, float, float] | None
    """Speedup with its interval."""
    pairs: str = ""
    """How many, why no more, and why some were set aside."""


class Asked(msgspec.Struct, frozen=True):
    """The options of `verdicts`."""

    lanes: tuple[int, ...]
    shapes: str
    alone_share: float
    gpus: int
    timing: bool
    references: int
    profile: str
    limit_s: float
    rows: str
    timers: int
    backend: str


Group = tuple[Problem, list[Item]]


def verdicts(
    lanes: Annotated[tuple[int, ...], "processes; several numbers: one after the other"] = (1, 4),
    groups: Annotated[int, "of 8 answers to one problem each, for each number of lanes"] = 24,
    levels: tuple[int, ...] = (1, 2),
    shapes: Annotated[Literal["gpu", "cpu"], "sizes of the inputs: of our suite for GPUs, or its small ones"] = "gpu",
    alone_share: Annotated[float, "of what is in doubt, decided by a process that served nobody else"] = ALONE_SHARE,
    gpus: Annotated[int, "lanes are spread over so many, each with all of its work on one"] = 1,
    timing: bool = True,
    references: int = 2,
    profile: Annotated[str, "folder for a profile of each lane"] = "",
    limit_s: Annotated[
        float, "for each number of lanes; what is left then is left out, and later numbers with it"
    ] = 600,
    rows: Annotated[str, "folder for every verdict of each number of lanes, as JSON"] = "",
    built: Annotated[str, "folder that keeps what was built for the next time"] = "",
    timers: Annotated[int, "processes on the last GPU that time what the lanes, on the others, only find right"] = 0,
    backend: Annotated[Literal["cuda-nvrtc", "c"], "c: on the CPU"] = "cuda-nvrtc",
) -> Result:
    """Verdicts a second, with timing, over what a policy in training writes.

    Answers in CUDA by the author whom the small policy imitates, slips and all, of problems at their GPU shapes. They
    are built beforehand, as farms do; those that do not compile are left out, because no bench sees them. Each number
    of lanes gets the same groups. What a lane has of them from before is gone, so references are made anew.
    """
    asked = Asked(lanes, shapes, alone_share, gpus, timing, references, profile, limit_s, rows, timers, backend)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(built or scratch)
        made = _kept(folder, _WARM * max(lanes) + groups, levels, shapes, backend)
        phases = _through_lanes(folder, made, asked, groups)
    found = {f"{number} lanes": summary(each) for number, each in zip(lanes, phases, strict=False)}
    return {**msgspec.structs.asdict(asked), **found}


def summary(rows: list[Row]) -> Result:
    """Of all verdicts between the first begun and the last ended."""
    wall = max(row.ended for row in rows) - min(row.begun for row in rows)
    right = [row for row in rows if row.fault == Fault.OK]
    exclusive = [row.stages["alone"] for row in right if "alone" in row.stages]
    accused = [row for row in rows if row.fault == Fault.CHEATING]
    return {
        "verdicts": len(rows),
        "a_second": len(rows) / wall,
        "faults": Counter(row.fault for row in rows),
        "observed": Counter(row.reason[:90] for row in rows if row.trust == OBSERVED),
        "observed_of": [(row.problem, row.fault, row.slips) for row in rows if row.trust == OBSERVED][:12],
        "pairs": Counter(row.pairs for row in right).most_common(6),
        "right_s": _spread([row.ended - row.begun for row in right]),
        "wrong_s": _spread([row.ended - row.begun for row in rows if row.fault != Fault.OK]),
        "exclusive_s": _spread(exclusive),
        "stages_mean_s": _of_each(rows, lambda row: row.stages),
        "spans_mean_s": _of_each(rows, lambda row: row.spans),
        "right_though_slipped": sum(bool(row.slips) for row in right),
        "wrong_without_a_slip": [
            (row.problem, row.fault, row.rule) for row in rows if row.fault != Fault.OK and not row.slips
        ][:8],
        "accused": [(row.problem, row.rule, row.slips) for row in accused][:8],
    }  # fmt: skip


def _of_each(rows: list[Row], of: Callable[[Row], dict[str, float]]) -> dict[str, list[float]]:
    """How many candidates had each, its seconds on the mean and at the median, and those a verdict (of its kind)."""
    found: dict[str, list[float]] = {}
    kinds = Counter(_kind(row) for row in rows)
    for row in rows:
        for name, seconds in of(row).items():
            found.setdefault(f"{_kind(row)}: {name}", []).append(seconds)
    return {
        name: [len(each), mean(each), median(each), sum(each) / kinds[name.partition(":")[0]]]
        for name, each in sorted(found.items())
    }


def _kind(row: Row) -> str:
    return "right" if row.fault == Fault.OK else "wrong"


def _spread(seconds: list[float]) -> list[float]:
    """10th percentile, median, 90th percentile, mean."""
    return [*percentiles(seconds, 10, 50, 90), mean(seconds)] if seconds else []


# ── what is verified ──────────────────────────────────────────────────────────────────────────────────────────────


def _kept(folder: Path, count: int, levels: tuple[int, ...], shapes: str, backend: str = "cuda-nvrtc") -> list[Group]:
    path = folder / f"answers-{shapes}-{backend}.json"
    if path.exists() and len(found := msgspec.json.decode(path.read_bytes(), type=list[Group])) >= count:
        return found[:count]
    folder.mkdir(parents=True, exist_ok=True)
    made = _built(folder, count, levels, shapes, backend)
    path.write_bytes(msgspec.json.encode(made))
    return made


def _built(folder: Path, count: int, levels: tuple[int, ...], shapes: str, backend: str) -> list[Group]:
    rng = random.Random(_SEED)
    problems = [p for p in load_suite(levels=levels, shapes=shapes) if p.problem_id in SPECS.keys() - HELDOUT]
    order = [problem for _ in range(-(-count // len(problems))) for problem in rng.sample(problems, len(problems))]
    farm = sections.CompileFarm(deadline_s=60.0)
    with Builder(ArtifactStore(folder), farm) as builder, ThreadPoolExecutor(len(CORES)) as pool:
        found = list(pool.map(lambda pair: _group(builder, backend, *pair), enumerate(order[:count])))
    say(f"{sum(len(items) for _, items in found)} answers in {len(found)} groups are built")
    return found


def _group(builder: Builder, backend: str, number: int, problem: Problem) -> Group:
    """Eight answers that compile; a comment makes each another one."""
    rng, items = random.Random(_SEED + number), list[Item]()
    while len(items) < GROUP:
        author = Author(rng, PRACTISED)
        read = extract(respond(SPECS[problem.problem_id], author, backend))
        if read.problem:
            continue
        candidate = Candidate(f"{read.source}\n# {number} {len(items)}\n", backend)
        report = builder.build(candidate, problem)
        if report.fault is Fault.OK:
            items.append(Item(candidate, report, tuple(author.slips)))
    return problem, items


# ── lanes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _through_lanes(folder: Path, made: list[Group], asked: Asked, groups: int) -> list[list[Row]]:
    """The rows of each number of lanes. All lanes are warm from the beginning; some have nothing to do at first."""
    context, most = mp.get_context("spawn"), max(asked.lanes)
    works, done, right = [context.Queue() for _ in asked.lanes], context.Queue(), context.Queue()
    chosen, others = made[:groups], made[groups:]
    warm = [others[_WARM * number : _WARM * (number + 1)] for number in range(most)]
    queues = works, right, done
    processes = [
        context.Process(target=_lane, args=(folder, number, asked, warm[number], *queues), daemon=True)
        for number in range(most)
    ] + [
        context.Process(target=_timer, args=(folder, number, asked, warm[0], right, done), daemon=True)
        for number in range(asked.timers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        say(_taken(done, processes))
    phases = []
    for place, (number, work) in enumerate(zip(asked.lanes, works, strict=True)):
        for group in chosen:
            work.put(group)
        for _ in range(number):
            work.put(None)
        wanted = sum(len(items) for _, items in chosen)
        phases.append(_rows(done, processes, wanted, time.monotonic() + asked.limit_s))
        say(f"{number} lanes: {len(phases[-1])} of {wanted}", summary(phases[-1]) if phases[-1] else "")
        if asked.rows:
            Path(asked.rows, f"rows-{asked.shapes}-{number}.json").write_bytes(msgspec.json.encode(phases[-1]))
        if len(phases[-1]) < wanted:
            _end(asked.lanes[place:], works[place:])
            break
    for _ in range(asked.timers):
        right.put(None)
    for process in processes:
        process.join(10)
        process.kill()
    return phases


def _end(lanes: tuple[int, ...], works: list[Any]) -> None:
    """Each lane finishes the group that it is at."""
    for number, work in zip(lanes, works, strict=True):
        with contextlib.suppress(queue.Empty):
            while True:
                work.get_nowait()
        for _ in range(number):
            work.put(None)


def _rows(done: Any, processes: list[Any], wanted: int, end: float) -> list[Row]:
    """As many as there are in time."""
    found: list[Row] = []
    with contextlib.suppress(_TooLate):
        while len(found) < wanted:
            found.append(_taken(done, processes, end))
    return found


class _TooLate(Exception):  # noqa: N818 - an answer
    """Nothing came in time."""


def _taken(done: Any, processes: list[Any], end: float = math.inf) -> Any:
    """What a lane says next."""
    for _ in range(_PATIENCE_S):
        if time.monotonic() > end:
            raise _TooLate
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=1.0)
        if any(process.exitcode for process in processes):
            break
    raise RuntimeError("a lane has failed, or gives no verdict")


def _lane(folder: Path, number: int, asked: Asked, warm: list[Group], works: list[Any], right: Any, done: Any) -> None:
    """Takes one group after the other."""
    verifying = max(1, asked.gpus - 1) if asked.timers else asked.gpus
    share = min(1.0, verifying / max(asked.lanes))
    timing = asked.timing and not asked.timers
    with _judging(folder, f"cuda:{number % verifying}", asked, share, warm, timing) as (judge, windows):
        done.put(f"lane {number} is warm")
        meter = cProfile.Profile() if asked.profile else None
        if meter is not None:
            meter.enable()
        for work in (work for lanes, work in zip(asked.lanes, works, strict=True) if number < lanes):
            while (group := work.get()) is not None:
                for item in group[1]:
                    row, report = _judged(judge, group[0], item, timing, windows)
                    if asked.timers and row.fault == Fault.OK:
                        right.put((group[0], item, report))
                    else:
                        done.put(row)
        if meter is not None:
            meter.dump_stats(Path(asked.profile) / f"lane{number}.prof")


def _timer(folder: Path, number: int, asked: Asked, warm: list[Group], right: Any, done: Any) -> None:
    """Times what lanes have found right."""
    with _judging(folder, f"cuda:{asked.gpus - 1}", asked, 1 / asked.timers, warm, True, is_light=True) as made:
        judge, windows = made
        done.put(f"timer {number} is warm")
        while (one := right.get()) is not None:
            problem, item, report = one
            done.put(_judged(judge, problem, item, True, windows, report)[0])


@contextlib.contextmanager
def _judging(
    folder: Path, device: str, asked: Asked, share: float, warm: list[Group], timing: bool, **more: Any
) -> Iterator[tuple[Judge, _Windows]]:
    """A judge that has judged something already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    if asked.backend == "c":
        device = "cpu"
    windows = _Windows(Turns(folder / f"turns-{device.replace(':', '')}"))
    options = bench_options(
        sections.TimingBench(deadline_s=10),
        device,
        memory_share=share,
        references=asked.references,
        alone_share=asked.alone_share,
        **more,
    )
    judge = Judge(ArtifactStore(folder), options, backend=asked.backend, quiet=windows.open)
    with judge, contextlib.closing(windows.turns):
        ready()
        for problem, items in warm:
            for item in items[:2]:
                _judged(judge, problem, item, timing, windows)
        yield judge, windows


class _Windows:
    """Seconds that a lane waited to be alone on the GPU, and was."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.seconds = dict[str, float]()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        asked = time.perf_counter()
        with self.turns.alone():
            begun = time.perf_counter()
            try:
                yield
            finally:
                self._add("until alone", begun - asked)
                self._add("alone", time.perf_counter() - begun)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _judged(
    judge: Judge, problem: Problem, item: Item, timing: bool, windows: _Windows, verified: BenchReport | None = None
) -> tuple[Row, BenchReport]:
    begun = time.time()
    windows.seconds.clear()
    pieces = dict[str, float]()
    token = spans.set(pieces)
    with windows.turns.working():
        report = judge.judge(
            problem, item.candidate, item.build, timing=timing, tick=windows.turns.breathe, verified=verified
        )
    spans.reset(token)
    ended, verdict, timed = time.time(), report.verdict, report.timing
    parts = dict(windows.seconds)
    for stage in report.stages:
        parts[stage.name] = parts.get(stage.name, 0.0) + stage.seconds
    return Row(
        problem.problem_id, verdict.fault, verdict.rule, verdict.trust, verdict.trust_reason, item.slips, begun, ended,
        parts, pieces, None if timed is None else (timed.speedup, timed.lo, timed.hi),
        "" if timed is None else f"{timed.n} {timed.stopped}{timed.method.rpartition('subtracted')[2]}",
    ), report  # fmt: skip
