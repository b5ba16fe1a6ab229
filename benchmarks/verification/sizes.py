"""Problems at their own sizes: which fit, what they take, how long; each with its own code as an honest candidate."""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import torch

from benchmarks.harness import Result, percentiles, say
from benchmarks.harness.crew import Crew, CrewTask, Work
from kbrl_async.errors import KbrlError, ProblemError
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.funnel.verifier import default_bench
from kbrl_async.kernels.problems import load_file
from kbrl_async.kernels.stages import teller
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import Bench, zygote_for
from kbrl_async.kernels.verify.options import ALONE_SHARE
from protocols.records import BenchReport, Candidate, Problem

_LOOK_S = 0.02
_DEADLINE_S = 30.0
"""Of one candidate: level 4 imports transformers in each process."""
_SAME = "\n\nclass ModelNew(Model):\n    pass\n"


def sizes(
    *,
    problems: Annotated[Path, "a folder of problem files, or of level*/ with such"],
    device: str = "cpu",
    memory_share: Annotated[float, "of the device's memory, that one verification may plan with"] = 1.0,
    timing: bool = False,
    jobs: Annotated[int, "verifiers at work at once"] = 1,
    seconds: Annotated[float, "after which no further problem is begun"] = 600.0,
    only: Annotated[str, "of names as level1/19_ReLU, a regular expression"] = "",
    again: Annotated[tuple[str, ...], "states that are verified again all the same"] = (),
    out: Annotated[Path | None, "a file with one JSON object a problem; what is in it is not verified again"] = None,
) -> Result:
    """`ok` where every problem was judged, or refused by its prediction, and none ran out of memory.

    Verifiers take turns to time: the others stand still meanwhile, as the benches of a run do.
    """
    rows: list[Result] = []
    teller.set(say)
    files = sorted([*problems.glob("*.py"), *problems.glob("level*/*.py")])
    tasks = [CrewTask(f"{path.parent.name}/{path.stem}", path) for path in files]
    tasks = [task for task in tasks if re.search(only, task.name)]
    random.Random(0).shuffle(tasks)  # what was reached when the time is over is a sample
    crew = Crew(jobs, seconds, out=out, again=again)
    with tempfile.TemporaryDirectory() as folder:
        for row in crew.run(tasks, partial(verifying, device, memory_share, timing, Path(folder) / "turns")):
            rows.append(row)
            say(" ".join(f"{key}={value}" for key, value in row.items()))
    states = Counter(row["state"] for row in rows)
    bad = [row["name"] for row in rows if row["state"] not in ("ok", "too_large")]
    return {
        "ok": not bad, "asked": len(tasks), "problems": len(rows), "states": dict(states), "bad": bad,
        "trust": dict(Counter(row["trust"] for row in rows if row.get("trust"))),
        "timed": sum("speedup" in row for row in rows),
        "seconds_p50_p90_max": percentiles([row["seconds"] for row in rows if row["state"] == "ok"], 50, 90, 100),
    }  # fmt: skip


@contextlib.contextmanager
def verifying(device: str, memory_share: float, timing: bool, place: Path, _number: int, _jobs: int) -> Iterator[Work]:
    """What a worker does with a problem's file; `place` stands for the device."""
    options = msgspec.structs.replace(
        default_bench(()),
        device=device,
        memory_share=memory_share,
        deadline_s=_DEADLINE_S,
        references=1,
        alone_share=ALONE_SHARE,
    )
    with contextlib.closing(DeviceTurns(place)) as turns, zygote_for(device, LIBRARY.name) as zygote:
        bench = Bench(zygote, options, random.Random(0), quiet=turns.alone)
        with contextlib.closing(bench):
            yield lambda path: _one(bench, load_file(path, shapes="cpu" if device == "cpu" else "gpu"), timing, turns)


def _one(bench: Bench, problem: Problem, timing: bool, turns: DeviceTurns) -> Result:
    begin, report = time.monotonic(), None
    with _watched(bench.device) as peak:
        try:
            candidate = Candidate(problem.source + _SAME, LIBRARY.name)
            with turns.working():
                report = bench.evaluate(problem, candidate, {}, timing=timing, tick=turns.breathe)
            state, message = report.verdict.fault.value, report.verdict.message
        except ProblemError as error:
            state, message = "too_large" if "does not fit: verifying" in str(error) else "problem", str(error)
        except KbrlError as error:
            state, message = "host", str(error)
    spent = time.monotonic() - begin
    found = {"state": state, "seconds": round(spent, 1), "peak_gib": round(peak() / 2**30, 2), "message": message[:300]}
    return found if report is None else found | _judged(report)


def _judged(report: BenchReport) -> Result:
    """What was seen of a problem that was judged; a timing says that its kernel is as fast as itself."""
    verdict, timed = report.verdict, report.timing
    found: Result = {
        "rule": verdict.rule, "trust": verdict.trust, "why": verdict.trust_reason[:200],
        "sets": f"{verdict.passed}/{verdict.total}",
        "stages": {stage.name: f"{stage.seconds:.2f} {stage.detail}".strip() for stage in report.stages},
    }  # fmt: skip
    if timed is not None:
        found |= {"speedup": [timed.speedup, timed.lo, timed.hi], "ms": timed.reference_ms, "stopped": timed.stopped}
        found["method"] = timed.method  # two ways of timing are not compared
    return found


@contextlib.contextmanager
def _watched(device: str) -> Iterator[Callable[[], int]]:
    """The most bytes in use beyond those at the beginning: of a GPU by anybody, of a host by our processes."""
    look = _on_device(device) if device.startswith("cuda") else _of_processes
    first, most, is_over = look(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(_LOOK_S):
            most = max(most, look() - first)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most
    finally:
        is_over.set()
        thread.join()


def _on_device(device: str) -> Callable[[], int]:
    def look() -> int:
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return int(total - free)

    return look


def _of_processes() -> int:
    """Shared pages once for each, so a little too much."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
