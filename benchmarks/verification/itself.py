"""A bench against itself by several processes of one device, which take turns at timing as the benches of a run do."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from benchmarks.harness import Result, say
from benchmarks.harness.crew import Crew, CrewTask, Work
from kbrl_async.kernels.backends.backend import LIBRARY
from kbrl_async.kernels.funnel.verifier import default_bench
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.timing.device import hardware_of
from kbrl_async.kernels.timing.resolution import Trial
from kbrl_async.kernels.timing.turns import DeviceTurns
from kbrl_async.kernels.verify import Bench, zygote_for
from kbrl_async.lab.self_test import (
    SLOWER,
    cases,
    report,
    slower_candidate,
    slower_case,
    trial_of,
)
from protocols.records import BenchReport, Candidate, Fault, Problem

_RUN = 10
"""Measurements of one case by one process, so that references are not made anew for each; runs come in any order."""


class Measurements(msgspec.Struct, frozen=True):
    """Some measurements of one candidate whose speedup is known."""

    kind: str
    name: str
    problem: Problem
    candidate: Candidate
    truth: float
    count: int


class Claim(msgspec.Struct, frozen=True):
    """One measurement: as sampled, and the interval as a run without a table of its own host is told it."""

    trial: Trial
    lo: float
    hi: float


def itself(
    pairs: Annotated[int, "measurements of a reference against itself"] = 1000,
    slower: Annotated[int, "of each known slowdown"] = 20,
    device: str = "cuda:0",
    jobs: Annotated[int, "processes on the device, which take turns at timing"] = 4,
    seconds: Annotated[float, "after which no further run of ten is begun"] = 600.0,
    out: Annotated[Path | None, "a file with one line a run; what is in it is not measured again"] = None,
) -> Result:
    """`ok` where at most .5 % of A/A measurements claim a speedup.

    Each is a recording, a replay and a timing of its own. Input sets are looked at once a run of ten, as by a bench
    that is told what a verifier found.
    """
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(jobs, seconds, out=out, again=("host", "wrong"))
        rows = []
        for row in crew.run(_tasks(device, pairs, slower), partial(_measuring, device, Path(folder) / "turns")):
            rows.append(row)
            say(row["name"], row["state"], row.get("message", ""))
    claims: dict[str, dict[str, list[Claim]]] = {"aa": {}, "ab": {}}
    for row in rows:
        found = msgspec.convert(row.get("claims", []), list[Claim])
        claims[row["name"].partition(" ")[0]].setdefault(row.get("case", ""), []).extend(found)
    return _result(device, claims, [row["name"] for row in rows if row["state"] != "ok"])


def _tasks(device: str, pairs: int, slower: int) -> list[CrewTask]:
    known = [("aa", case.name, case.problem, case.itself, 1.0) for case in cases(device)]
    base = slower_case(device)
    delayed = [("ab", name, base.problem, *slower_candidate(base, times)) for name, times in SLOWER.items()]
    counts = [pairs // len(known) + (i < pairs % len(known)) for i in range(len(known))] + [slower] * len(delayed)
    asked = [
        Measurements(*one, min(_RUN, count - begin))
        for one, count in zip([*known, *delayed], counts, strict=True)
        for begin in range(0, count, _RUN)
    ]
    tasks = [CrewTask(f"{one.kind} {number} {one.name}", one) for number, one in enumerate(asked)]
    random.Random(0).shuffle(tasks)
    return tasks


@contextlib.contextmanager
def _measuring(device: str, path: Path, _number: int, jobs: int) -> Iterator[Work]:
    options = msgspec.structs.replace(
        default_bench((), Recipe.of(TimingBench())), device=device, memory_share=1 / jobs, references=2
    )
    turns = DeviceTurns(path)
    with (
        contextlib.closing(turns),
        zygote_for(device, LIBRARY.name) as zygote,
        contextlib.closing(Bench(zygote, options, quiet=turns.alone)) as bench,
    ):
        yield partial(_run, bench, turns)


def _run(bench: Bench, turns: DeviceTurns, asked: Measurements) -> Result:
    claims: list[Claim] = []
    verified: BenchReport | None = None
    for _ in range(asked.count):
        with turns.working():
            found = bench.evaluate(asked.problem, asked.candidate, {}, tick=turns.breathe, verified=verified)
        if found.verdict.fault is not Fault.OK or found.timing is None:
            message = f"{found.verdict.fault.value}: {found.verdict.message or 'no timing'}"
            return {"state": "wrong", "message": message[:300]}
        verified = verified or found
        claims.append(Claim(trial_of(found.timing, asked.truth), found.timing.lo, found.timing.hi))
    return {"state": "ok", "case": asked.name, "trust": verified.verdict.trust if verified else "", "claims": claims}


def _result(device: str, claims: dict[str, dict[str, list[Claim]]], missing: list[str]) -> Result:
    trials = {kind: {name: [c.trial for c in each] for name, each in of.items() if each} for kind, of in claims.items()}
    table = report(hardware_of(device), trials["aa"], trials["ab"], {})
    every = [claim for each in claims["aa"].values() for claim in each]
    faster = sum(claim.lo > 1 for claim in every)
    rows: list[dict[str, Any]] = [msgspec.to_builtins(row) for row in (*table.rows, *table.truths)]
    return {
        "ok": bool(every) and faster <= 0.005 * len(every),
        "runs": len(every),
        "called_faster": faster,
        "called_slower": sum(claim.hi < 1 for claim in every),
        "false_faster_with_own_table": table.false_faster,
        "missing": missing,
        "rows": rows,
        "clocks": table.clocks,
        "throttle": table.throttle,
    }
