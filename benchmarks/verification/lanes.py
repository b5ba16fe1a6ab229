"""Verdicts a second on GPUs, over what a policy in training writes.

::

    answers of the small policy's author, groups of 8, built beforehand ─▶ queue of groups ─▶ lanes (processes) ─▶ rows
                                                     a fault of the host: counted by its reason, and the next answer ◀─┘
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import math
import multiprocessing as mp
import os
import queue
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from benchmarks.harness import CORES, Result, say
from benchmarks.verification.lane_rows import HostFault, Row, summary
from kbrl_async.errors import InfraError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, Judge
from kbrl_async.kernels.problems import load_suite
from kbrl_async.kernels.stages import spans
from kbrl_async.kernels.timing import ready
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import bench_options
from kbrl_async.kernels.verify.hoarding import is_out_of_memory
from kbrl_async.kernels.verify.options import ALONE_SHARE
from kbrl_async.lab.small_policy.author import Author, Habits
from kbrl_async.lab.small_policy.languages import respond
from kbrl_async.lab.small_policy.specs import HELDOUT, SPECS
from kbrl_async.rollouts.prompts import extract
from protocols.records import BenchReport, BuildReport, Candidate, Fault, Problem

GROUP = 8
PRACTISED = Habits(**{name: 0.4 * share for name, share in msgspec.structs.asdict(Habits()).items()})
"""Makes fewer slips than a beginner: in a run on a GPU seven of ten answers that compile are right."""
_SEED, PATIENCE_S, _END_S = 11, 180, 10
_LAST_LINES = 12
SETBACK_S = 0.5
"""After a fault of the host, as a worker of a run waits: a lane whose GPU is gone should not take others' work."""
_ROUNDS = 20
_END = "a lane has come to the end of a phase"
_WARM = 3
"""Groups of which a lane judges some before it counts: as many references as it keeps, and the process of one more."""
_WARM_ITEMS = 4
"""Of each: some are wrong, so that the second recorder is there."""


class Item(msgspec.Struct, frozen=True):
    candidate: Candidate
    build: BuildReport
    slips: tuple[str, ...]
    written: int = 1
    """Answers that were written until this one built."""


class LanePhase(NamedTuple):
    """Some of the lanes, all else equal."""

    lanes: int
    alone_share: float

    def __str__(self) -> str:
        return f"{self.lanes} lanes, {self.alone_share:.3g} alone"


class Asked(msgspec.Struct, frozen=True):
    """The options of `verdicts`."""

    lanes: tuple[int, ...]
    shapes: str
    alone_share: tuple[float, ...]
    gpus: int
    timing: bool
    references: int
    profile: str
    seconds: float
    rows: str
    timers: int
    timing_gpus: int
    backend: str

    @property
    def verifying(self) -> int:
        """GPUs of the lanes."""
        return max(1, self.gpus - self.timing_gpus) if self.timers else self.gpus

    @property
    def phases(self) -> list[LanePhase]:
        return [LanePhase(lanes, share) for share in self.alone_share for lanes in self.lanes]


Group = tuple[Problem, list[Item]]
LaneResults = tuple[list[Row], Counter[str]]
"""The rows of a phase, and how often the host failed instead, by reason."""


def verdicts(
    lanes: Annotated[tuple[int, ...], "processes; several numbers: one after the other"] = (1, 4),
    groups: Annotated[int, "of 8 answers to one problem each, for each number of lanes"] = 24,
    levels: tuple[int, ...] = (1, 2),
    shapes: Annotated[Literal["gpu", "cpu"], "sizes of the inputs: of our suite for GPUs, or its small ones"] = "gpu",
    alone_share: Annotated[tuple[float, ...], "of what is in doubt, decided by a process that served nobody else"] = (
        ALONE_SHARE,
    ),
    gpus: Annotated[int, "lanes are spread over so many, each with all of its work on one"] = 1,
    timing: bool = True,
    references: int = 2,
    profile: Annotated[str, "folder for a profile of each lane"] = "",
    seconds: Annotated[float, "of each number of lanes, which go through the groups over and over; 0: once"] = 0,
    rows: Annotated[str, "folder for every verdict of each number of lanes, as JSON"] = "",
    built: Annotated[str, "folder that keeps what was built for the next time"] = "",
    timers: Annotated[int, "processes on the last GPUs that time what the lanes, on the others, only find right"] = 0,
    timing_gpus: Annotated[int, "GPUs that these are spread over"] = 1,
    backend: Annotated[Literal["cuda-nvrtc", "c"], "c: on the CPU"] = "cuda-nvrtc",
) -> Result:
    """Verdicts a second, with timing, over what a policy in training writes.

    Answers in CUDA by the author whom the small policy imitates, slips and all, of problems at their GPU shapes. They
    are built beforehand, as farms do; those that do not compile are left out, because no bench sees them. Each number
    of lanes gets the same groups. What a lane has of them from before is gone, so references are made anew. `a_second`
    leaves out the first and the last second of a phase, when not all lanes are at work; `answers_a_second` counts the
    answers that did not compile with it, which is what a run would wait for. An answer that the host had no verdict for
    (memory that others have, a process that was lost) is in no rate; `host_faults` counts them by their reason.
    """
    asked = Asked(
        lanes, shapes, alone_share, gpus, timing, references, profile, seconds, rows, timers, timing_gpus, backend
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(built or scratch).absolute()  # compilers run elsewhere
        made = _kept(folder, _WARM + groups, levels, shapes, backend)
        phases = _through_lanes(folder, made, asked)
    found = {str(phase): summary(*each) for phase, each in zip(asked.phases, phases, strict=False)}
    return {**msgspec.structs.asdict(asked), **found}


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
    rng, items, written = random.Random(_SEED + number), list[Item](), 0
    while len(items) < GROUP:
        written += 1
        author = Author(rng, PRACTISED)
        read = extract(respond(SPECS[problem.problem_id], author, backend))
        if read.problem:
            continue
        candidate = Candidate(f"{read.source}\n# {number} {len(items)}\n", backend)
        report = builder.build(candidate, problem)
        if report.fault is Fault.OK:
            items.append(Item(candidate, report, tuple(author.slips), written))
            written = 0
    return problem, items


# ── lanes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _through_lanes(folder: Path, made: list[Group], asked: Asked) -> list[LaneResults]:
    """What came of each phase. All lanes are warm from the beginning; some have nothing to do at first."""
    context = mp.get_context("spawn")
    works = [context.Queue() for _ in asked.phases]
    done, right, is_over = context.Queue(), context.Queue(), context.Value("i", -1)
    warm, chosen = made[:_WARM], made[_WARM:]
    given: list[tuple[Callable[..., None], tuple[Any, ...]]]
    given = [(lane, (folder, n, asked, warm, works, right, done, is_over)) for n in range(max(asked.lanes))]
    given += [(_timer, (folder, n, asked, warm, right, done)) for n in range(asked.timers)]
    processes = [
        context.Process(
            target=reporting_failure,
            args=(done, what, args),
            name=f"{what.__name__.lstrip('_')} {args[1]}",
            daemon=True,
        )
        for what, args in given
    ]
    for process in processes:
        process.start()
    for _ in processes:
        say(next_said(done, processes))
    phases = []
    for number, (phase, work) in enumerate(zip(asked.phases, works, strict=True)):
        for group in chosen * (_ROUNDS if asked.seconds else 1):
            work.put(group)
        for _ in range(phase.lanes):
            work.put(None)
        end = time.monotonic() + asked.seconds if asked.seconds else math.inf
        stop = functools.partial(setattr, is_over, "value", number)
        phases.append(phase_rows(done, processes, phase.lanes, end, stop))
        found = summary(*phases[-1])
        say(f"{phase}:", found)
        if asked.rows:
            _write(Path(asked.rows), f"{asked.shapes}-{phase.lanes}-{phase.alone_share:.3g}", phases[-1][0], found)
    for _ in range(asked.timers):
        right.put(None)
    for process in processes:
        process.join(_END_S)
        process.kill()
    return phases


def _write(folder: Path, name: str, rows: list[Row], found: Result) -> None:
    """As each phase ends: who is killed later has these."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rows-{name}.json").write_bytes(msgspec.json.encode(rows))
    (folder / f"summary-{name}.json").write_bytes(msgspec.json.encode(found))


def phase_rows(done: Any, processes: list[Any], lanes: int, end: float, stop: Callable[[], None]) -> LaneResults:
    """Until so many lanes have said that they are at the end, for which they are asked at `end`."""
    found, faults = list[Row](), Counter[str]()
    while lanes:
        try:
            said = next_said(done, processes, end)
        except TimeoutError:
            stop()
            end = math.inf
            continue
        lanes -= said is None
        found += [said] if isinstance(said, Row) else []
        faults.update([said.reason] if isinstance(said, HostFault) else [])
    return found, faults


def next_said(done: Any, processes: list[Any], end: float = math.inf) -> Any:
    """What a lane says next.

    :raises TimeoutError: nothing came until `end`.
    :raises LaneError: one has ended by an error, which is told with its last lines, or by a signal; or all are silent.
    """
    patient_until = time.monotonic() + PATIENCE_S
    while time.monotonic() < patient_until:
        if time.monotonic() > end:
            raise TimeoutError
        is_over = next((process for process in processes if process.exitcode), None)
        with contextlib.suppress(queue.Empty):
            said = done.get(timeout=max(0.0, min(1.0, end - time.monotonic())))
            if isinstance(said, LaneError):
                raise said
            return said
        if is_over is not None:  # its last word would have come by now
            raise LaneError(f"{is_over.name} ended with {is_over.exitcode}, and said nothing")
    at_work = ", ".join(process.name for process in processes if process.is_alive())
    raise LaneError(f"no verdict for {PATIENCE_S} s; at work: {at_work or 'nobody'}")


class LaneError(RuntimeError):
    pass


def reporting_failure(done: Any, what: Callable[..., None], args: tuple[Any, ...]) -> None:
    """In a process of its own: an error's last lines go to whoever reads the verdicts."""
    try:
        what(*args)
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines()[-_LAST_LINES:]
        done.put(LaneError("\n".join([f"{mp.current_process().name} has failed: {error}"[:500], *lines])))
        done.close()
        done.join_thread()
        sys.exit(1)


def lane(
    folder: Path, number: int, asked: Asked, warm: list[Group], works: list[Any], right: Any, done: Any, is_over: Any
) -> None:
    """Takes one group after the other."""
    share = min(1.0, asked.verifying / max(asked.lanes))
    timing = asked.timing and not asked.timers
    with judging(folder, f"cuda:{number % asked.verifying}", asked, share, warm, timing) as (judge, windows):
        done.put(f"lane {number} is warm{_neighbours(judge)}")
        meter = cProfile.Profile() if asked.profile else None
        if meter is not None:
            meter.enable()
        for place, (phase, work) in enumerate(zip(asked.phases, works, strict=True)):
            if number >= phase.lanes:
                continue
            bench = judge.bench
            bench.options = msgspec.structs.replace(bench.options, alone_share=phase.alone_share)
            for problem, item in _items(work, is_over, place):
                row, report = _judged(judge, problem, item, timing, windows)
                if isinstance(row, HostFault):
                    done.put(row)
                elif asked.timers and row.fault == Fault.OK:
                    done.put(msgspec.structs.replace(row, is_last=False))
                    right.put((problem, item, report))
                else:
                    done.put(row)
            (right if asked.timers else done).put(_END if asked.timers else None)
        if meter is not None:
            meter.dump_stats(Path(asked.profile) / f"lane{number}.prof")


def _neighbours(judge: Judge) -> str:
    """On its GPU, whose memory is waited for."""
    reservations = getattr(judge.bench._device, "reservations", None)
    return "" if reservations is None else f", beside {len(reservations.others)}"


def _items(work: Any, is_over: Any, place: int) -> Iterator[tuple[Problem, Item]]:
    """What is in the queue until its end; nothing more once this phase is over."""
    while (group := work.get()) is not None:
        for item in group[1]:
            if is_over.value >= place:
                break
            yield group[0], item


def _timer(folder: Path, number: int, asked: Asked, warm: list[Group], right: Any, done: Any) -> None:
    """Times what lanes have found right."""
    device = f"cuda:{asked.gpus - 1 - number % asked.timing_gpus}"
    share = min(1.0, asked.timing_gpus / asked.timers)
    with judging(folder, device, asked, share, warm, True, is_light=True) as made:
        judge, windows = made
        done.put(f"timer {number} is warm")
        while (one := right.get()) is not None:
            if one == _END:
                done.put(None)
                continue
            problem, item, report = one
            done.put(_judged(judge, problem, item, True, windows, report)[0])


@contextlib.contextmanager
def judging(
    folder: Path, device: str, asked: Asked, share: float, warm: list[Group], timing: bool, **more: Any
) -> Iterator[tuple[Judge, _Windows]]:
    """A judge that has judged something already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    if asked.backend == "c":
        device = "cpu"
    windows = _Windows(DeviceTurns(folder / f"turns-{device.replace(':', '')}"))
    given = {"memory_share": share, "references": asked.references, "alone_share": asked.alone_share[0], **more}
    options = bench_options(sections.TimingBench(deadline_s=10), device, **given)
    judge = Judge(ArtifactStore(folder), options, backend=asked.backend, quiet=windows.open)
    with judge, contextlib.closing(windows.turns):
        ready()
        for problem, items in warm:
            for item in items[:_WARM_ITEMS]:
                _judged(judge, problem, item, timing, windows)
        yield judge, windows


class _Windows:
    """Seconds that a lane waited to be alone on the GPU, and was."""

    def __init__(self, turns: DeviceTurns) -> None:
        self.turns = turns
        self.seconds = defaultdict[str, float](float)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        asked = time.perf_counter()
        with self.turns.alone():
            begun = time.perf_counter()
            try:
                yield
            finally:
                self.seconds["until alone"] += begun - asked
                self.seconds["alone"] += time.perf_counter() - begun


def _judged(
    judge: Judge, problem: Problem, item: Item, timing: bool, windows: _Windows, verified: BenchReport | None = None
) -> tuple[Row | HostFault, BenchReport | None]:
    """With its report; a bench in a run gives back what the host fails at, and goes on, too."""
    begun = time.time()
    windows.seconds.clear()
    pieces = dict[str, float]()
    token = spans.set(pieces)
    more: dict[str, Any] = {"tick": windows.turns.breathe, "verified": verified, "group": problem.problem_id}
    try:
        with windows.turns.working():
            report = judge.judge(problem, item.candidate, item.build, timing=timing, **more)
    except (InfraError, MemoryError, RuntimeError) as error:
        if not isinstance(error, InfraError | MemoryError) and not is_out_of_memory(error):
            raise
        time.sleep(SETBACK_S)
        return HostFault.of(error, problem.problem_id), None
    finally:
        spans.reset(token)
    ended, verdict, timed = time.time(), report.verdict, report.timing
    for stage in report.stages:
        windows.seconds[stage.name] += stage.seconds
    return Row(
        problem.problem_id, verdict.fault, verdict.rule, verdict.trust, verdict.trust_reason, item.slips, begun, ended,
        dict(windows.seconds), pieces, None if timed is None else (timed.speedup, timed.lo, timed.hi),
        "" if timed is None else f"{timed.n} {timed.stopped}{timed.method.rpartition('subtracted')[2]}",
        written=item.written,
    ), report  # fmt: skip
