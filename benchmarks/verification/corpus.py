"""Kernels that others wrote: is each honest one accepted, and each hostile one refused for its reason?

A corpus is a folder with one folder a pair: `candidate.py` with whatever lies beside it, `problem.py` (without it a
pair is only built), and for a hostile one `expected.json`: `{"rules": ["decoy_kernel"]}`, a fault where no rule has a
name. `adapt` makes such folders.

::

    pair ─▶ is it a kernel? a problem? ─▶ built (rules) ─▶ judged, where this host has its device ─▶ accepted | refused
                     └─ no_kernel, problem, missing, cut_short, host: named, counted, nobody's fault, in no share

With `--benches` it is as in a run: `--jobs` processes build all pairs, then so many benches judge what was built. With
`--in-flight`, too, so many pairs at once are between source and verdict: a pair's seconds hold all of its waiting.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch

from benchmarks.harness import Result, say
from benchmarks.harness.crew import Crew, CrewTask, Flight, Start, Take, Work
from benchmarks.verification import adapters
from kbrl_async.errors import KbrlError, ProblemError, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import backends
from kbrl_async.kernels.backends.inline.ways import FAST, ways
from kbrl_async.kernels.funnel import Verifier, VerifyOptions, read_candidate
from kbrl_async.kernels.funnel.result import early, unbuilt
from kbrl_async.kernels.funnel.verifier import check_device, choose_device, default_bench, read_text, under
from kbrl_async.kernels.problems import load_file
from kbrl_async.kernels.settings import CompileFarm, Rules
from kbrl_async.kernels.verify.options import ALONE_SHARE, BenchOptions
from kbrl_async.kernels.verify.reservations import even_share
from protocols.records import BuildReport, Candidate, Fault, Problem, Verdict

ENOUGH_HONEST, ENOUGH_HOSTILE = 0.97, 0.99
State = Literal["accepted", "built", "refused", "no_kernel", "problem", "missing", "cut_short", "host"]
"""`built`: it ran to its end where tensors have no values, and all that it asked for was compiled. From `no_kernel` on
it says nothing of the candidate: it needs a package that is `missing` here, or its run without a GPU was `cut_short`.
"""
_MISSING = re.compile(
    r"\b(?:ModuleNotFound|Import)Error: |fatal error: [\w./+-]+: No such file|fatal error: '[\w./+-]+' file not found"
    r"|cannot open source file \"[\w./+-]+\""
)
_ELSEWHERE = re.compile(r"^the flag (?:extra_include_paths=|-(?:I|isystem|idirafter)[ =]?)['\"]?(/[^'\" ]+)")
"""A folder of somebody else's library, named to the compiler."""
_SHARES = 3
"""Verifiers that may plan with all of a GPU's memory between them; if there are more, some wait at times. Benches that
judge what others built have what `even_share` says, as in a run: so none waits, and each keeps what it has.
"""
Corpus = Annotated[Path, "a folder of pairs"]
Out = Annotated[Path | None, "a file with one JSON object a pair; what is in it is not judged again"]
Again = Annotated[tuple[str, ...], "states that are judged again all the same, as in refused,host"]
Jobs = Annotated[int, "processes, each with a verifier"]
Seconds = Annotated[float, "after which no further pair is begun"]
_ALONE = "# alone\n"
_STAGES = {
    **dict.fromkeys(("format", "static", "compile", "build"), "built"), "waited": "waited", "reference": "reference",
}  # fmt: skip


class CorpusPair(NamedTuple):
    """A pair."""

    folder: Path
    mark: str = ""
    """A comment in front of its candidate."""
    built: BuildReport | None = None
    """What was built of it, where another has done that."""
    since: float = 0.0
    """When it was begun, where its waiting counts."""


class HowJudged(msgspec.Struct, frozen=True):
    """What the processes of a crew have in common."""

    rules: Rules = "open"
    deadline_s: float = 60.0
    timing: bool = False
    warm: Path | None = None
    """A pair that each judges first, uncounted."""
    references: int = 1
    """0: as many as there are problems."""
    store: str = ""
    """Where others have built the pairs."""
    nice: int = 0
    """Of compilers."""
    memory_share: float = 0.0
    """Of a GPU, for each; 0: by their number."""

    def options(self, jobs: int) -> VerifyOptions:
        """Of one among so many verifiers."""
        farm = msgspec.structs.replace(VerifyOptions().farm, deadline_s=self.deadline_s, nice=self.nice)
        options = VerifyOptions(timing=self.timing, farm=farm, bench=self._bench(jobs), store=self.store)
        return under(options, self.rules)

    def _bench(self, jobs: int) -> BenchOptions:
        bench = default_bench(())
        bench = msgspec.structs.replace(bench, references=self.references or sys.maxsize, alone_share=ALONE_SHARE)
        if not self.references:
            bench = msgspec.structs.replace(bench, reference_bytes=bench.limits.memory_bytes // jobs)
        return msgspec.structs.replace(bench, memory_share=self.memory_share or self._share(jobs))

    def _share(self, jobs: int) -> float:
        if not self.store or not torch.cuda.is_available():
            return min(1.0, (1 if self.store else _SHARES) / jobs)
        return even_share(torch.cuda.get_device_properties(0).total_memory, jobs)


class CorpusOutcome(msgspec.Struct, frozen=True):
    name: str
    state: State
    backend: str = ""
    fault: str = ""
    rule: str = ""
    rules: str = ""
    message: str = ""
    hint: str = ""
    seconds: float = 0.0
    toolchain: str = ""
    stages: dict[str, float] = {}
    details: dict[str, str] = {}
    """Of the stages: what their time went into."""
    begun: float = 0.0

    @property
    def counts(self) -> bool:
        return self.state in ("accepted", "built", "refused")


def honest(
    *,
    corpus: Corpus,
    rules: Rules = "open",
    deadline_s: float = 60.0,
    jobs: Jobs = 1,
    seconds: Seconds = 3600.0,
    only: Annotated[str, "of names, a regular expression"] = "",
    warm: Annotated[str, "a pair that each process judges first, uncounted; then all begin at once"] = "",
    repeat: Annotated[int, "how often each is judged, with another comment"] = 1,
    benches: Annotated[int, "so many beside each other judge what the jobs have built before; 0: each job has one"] = 0,
    alone_share: Annotated[float, "of pairs that are judged a second time, with nobody beside them"] = 0.0,
    in_flight: Annotated[int, "so many pairs at once are between source and verdict; 0: all are built first"] = 0,
    references: Annotated[int, "that a bench keeps; 0: each problem's is made once and kept"] = 1,
    memory_share: Annotated[float, "of a GPU's memory that each may plan with; 0: by their number"] = 0.0,
    timing: Annotated[bool, "what is right is timed, too, as one bench with nobody beside it does"] = False,
    again: Again = (),
    out: Out = None,
) -> Result:
    """Every pair through the funnel; `ok` where at least 97 % are accepted and none is called cheating.

    `alone`, with --alone-share: medians of each stage's seconds [beside the others, alone], and who got another state.
    """
    if timing and (benches or jobs) > 1:
        raise UserError(f"{benches or jobs} benches would time beside each other", "--benches 1")
    warm_pair = corpus / warm if warm else None
    how = HowJudged(rules, deadline_s, timing, warm=warm_pair, references=references, memory_share=memory_share)
    pairs, until = _pairs(corpus, only, repeat), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="kbrl-corpus-") as store:
        crew = Crew(benches or jobs, seconds, out=out, again=again, is_together=bool(warm))
        judge = partial(judging, msgspec.structs.replace(how, store=store) if benches else how)
        if benches and in_flight:
            outcomes = _flown(pairs, in_flight, (Crew(jobs, seconds), building_of(how, store)), (crew, judge))
        else:
            if benches:
                pairs = _built(pairs, Crew(jobs, seconds), building_of(how, store), crew.known(pairs))
            outcomes = run(pairs, crew._replace(seconds=until - time.monotonic()), judge)
    judged = [one for one in outcomes if one.counts]
    share = sum(one.state != "refused" for one in judged) / max(1, len(judged))
    accused = [one.name for one in judged if one.fault == Fault.CHEATING]
    ok = bool(judged) and share >= ENOUGH_HONEST and not accused
    found = {"ok": ok, "accepted_share": share, "accused": accused, **_counted(outcomes)}
    if alone_share:
        alone = Crew(1, until - time.monotonic(), out=out, again=again)
        found["alone"] = _alone(pairs, judged, alone_share, alone, msgspec.structs.replace(how, store="", warm=None))
    return found


def hostile(
    *,
    corpus: Corpus,
    rules: Rules = "open",
    deadline_s: float = 60.0,
    timing: bool = False,
    jobs: Jobs = 1,
    seconds: Seconds = 3600.0,
    again: Again = (),
    out: Out = None,
) -> Result:
    """Every pair through the funnel; `ok` where at least 99 % are refused, each by a rule that its `expected.json` has.

    An accepted one, and one that is refused for another reason, is named. With `timing`, cheats of the clock are in
    their place, too.
    """
    how = HowJudged(rules, deadline_s, timing)
    outcomes = run(_pairs(corpus), Crew(jobs, seconds, out=out, again=again), partial(judging, how))
    judged = [one for one in outcomes if one.counts]
    wrong = [one for one in judged if not _is_expected(corpus / one.name, one)]
    share = 1 - len(wrong) / max(1, len(judged))
    named = [f"{one.name}: {one.state} {one.fault} {one.rule}".strip() for one in wrong]
    return {
        "ok": bool(judged) and share >= ENOUGH_HOSTILE, "refused_rightly": share, "wrong": named, **_counted(outcomes),
    }  # fmt: skip


def adapt(
    source: Annotated[Literal[tuple(adapters.ADAPTERS)], "of what"],  # type: ignore[valid-type] # read by the harness
    /,
    *,
    checkout: Annotated[Path, "its checkout; for files, a folder of candidates; for cheats, nothing"] = Path(),
    corpus: Annotated[Path, "where pairs are written"],
) -> Result:
    """Pairs from a checkout of somebody's kernels."""
    made = adapters.ADAPTERS[source](checkout, corpus)
    return {"ok": made > 0, "pairs": made}


def _pairs(corpus: Path, only: str = "", repeat: int = 1) -> list[CrewTask]:
    folders = sorted(path for path in corpus.iterdir() if path.is_dir() and re.search(only, path.name))
    marks = [""] if repeat == 1 else [f"# {number}\n" for number in range(repeat)]
    return [CrewTask(folder.name + mark.strip(), CorpusPair(folder, mark)) for mark in marks for folder in folders]


def run(
    pairs: list[CrewTask], crew: Crew, judge: Start, take: Take | None = None, told: Callable[[], None] = lambda: None
) -> list[CorpusOutcome]:
    """One outcome a pair; whatever a pair is, it is an outcome and no exception. `told` is called after each."""
    outcomes = []
    for row in crew.run(pairs, judge, take):
        outcomes.append(msgspec.convert(row, CorpusOutcome))
        say(f"{outcomes[-1].state:9} {outcomes[-1].name} {outcomes[-1].rule or outcomes[-1].message[:100]}")
        told()
    return outcomes


def _built(pairs: list[CrewTask], crew: Crew, build: Start, known: Collection[str]) -> list[CrewTask]:
    """The pairs, each with what was built of it; what is known already is not built."""
    left = [pair for pair in pairs if pair.name not in known]
    found = {row["name"]: row["build"] for row in crew.run(left, build) if "build" in row}
    say(f"{len(found)} of {len(left)} pairs are built")
    return [CrewTask(pair.name, pair.given._replace(built=found.get(pair.name))) for pair in pairs]


def _flown(
    pairs: list[CrewTask], most: int, builders: tuple[Crew, Start], benches: tuple[Crew, Start]
) -> list[CorpusOutcome]:
    """Each pair from its source to its verdict, so many at once."""
    known = benches[0].known(pairs)
    left = {pair.name: pair for pair in pairs if pair.name not in known}
    flight = Flight(list(left.values()), most, lambda pair: _digest(pair.given.folder))

    def build() -> None:
        try:
            for row in builders[0].run(list(left.values()), builders[1], flight.begin):
                name = row["name"]
                given = left[name].given._replace(built=row.get("build"), since=flight.begun[name])
                flight.done(CrewTask(name, given))
        finally:
            flight.close()

    builder = threading.Thread(target=build, daemon=True)
    builder.start()
    try:
        return run(pairs, *benches, flight.take, flight.landed)
    finally:
        flight.close()
        builder.join()


@functools.cache
def _digest(folder: Path) -> bytes:
    """Of its problem: one bench's reference serves all pairs of it."""
    path = folder / "problem.py"
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest()


def _alone(pairs: list[CrewTask], judged: list[CorpusOutcome], share: float, crew: Crew, how: HowJudged) -> Result:
    """A share of what was judged once more, one after the other, in this process."""
    folders = {pair.name: pair.given.folder for pair in pairs}
    drawn = random.Random(0).sample(judged, min(len(judged), math.ceil(share * len(judged))))
    tasks = [CrewTask(f"{one.name}{_ALONE.strip()}", CorpusPair(folders[one.name], _ALONE)) for one in drawn]
    found = {one.name: one for one in run(tasks, crew, partial(judging, how))}
    both = [(one, found[task.name]) for one, task in zip(drawn, tasks, strict=True) if task.name in found]
    stages: dict[str, list[tuple[float, float]]] = {}
    for beside, alone in both:
        for name in (name for name in beside.stages if name in alone.stages):
            stages.setdefault(name, []).append((beside.stages[name], alone.stages[name]))
    unlike = [(one, other) for one, other in both if one.state != other.state]
    return {
        "pairs": len(both),
        "stages_s": {name: [median(side) for side in zip(*each, strict=True)] for name, each in stages.items()},
        "other_state": [f"{one.name}: {one.state}, alone {other.state}" for one, other in unlike],
    }


def building_of(how: HowJudged, store: str) -> Start:
    """What builds for benches of this host: with as little of its cores' time as in a run, as they judge meanwhile."""
    return partial(building, msgspec.structs.replace(how, store=store, nice=CompileFarm().nice))


@contextlib.contextmanager
def building(how: HowJudged, _number: int, jobs: int) -> Iterator[Work]:
    """What a worker does with a pair that others will judge: whatever is wrong with it they will find."""
    with Verifier(None, how.options(jobs)) as verifier:

        def build(given: CorpusPair) -> Result:
            try:
                candidate, _ = _candidate(given.folder, given.mark)
                if candidate is not None:
                    return {"state": "built", "build": verifier.build(candidate, _problem(given.folder))}
            except (UserError, UnicodeError):
                return {"state": "problem"}
            except KbrlError:
                verifier.restart()
                return {"state": "host"}
            return {"state": "no_kernel"}

        yield build


@contextlib.contextmanager
def judging(how: HowJudged, _number: int, jobs: int) -> Iterator[Work]:
    """What a worker does with a pair."""
    with Verifier(None, how.options(jobs)) as verifier:

        def judge(given: CorpusPair) -> Result:
            begun = time.time()
            outcome = _one(given, verifier)
            if given.since:
                whole = time.time() - given.since
                stages = outcome.stages | {"waited": round(whole - sum(outcome.stages.values()), 2)}
                outcome = msgspec.structs.replace(outcome, seconds=round(whole, 2), stages=stages)
            told: Result = msgspec.to_builtins(msgspec.structs.replace(outcome, begun=round(begun, 2)))
            del told["name"]
            return told

        if how.warm is not None:
            judge(CorpusPair(how.warm, "# warm\n"))
        yield judge


def _candidate(folder: Path, mark: str) -> tuple[Candidate | None, str]:
    """With its text. Raises `UserError` or `UnicodeError` where there is none to be read."""
    text = mark + read_text(folder / "candidate.py")
    return read_candidate(text, response=False).candidate, text


def _problem(folder: Path) -> Problem | None:
    path = folder / "problem.py"
    return load_file(path) if path.is_file() else None


def _one(given: CorpusPair, verifier: Verifier) -> CorpusOutcome:
    folder = given.folder
    if not (folder / "candidate.py").is_file():
        return CorpusOutcome(folder.name, "no_kernel", message="there is no candidate.py")
    try:
        candidate, text = _candidate(folder, given.mark)
    except (UserError, UnicodeError) as error:
        return CorpusOutcome(folder.name, "no_kernel", message=str(error))
    if candidate is None or max(load_backend(name).claims(text) for name in backends()) <= 0:
        return CorpusOutcome(folder.name, "no_kernel", message="no backend knows what it is")
    try:
        verdict, state, stages, details, tools = _judged(candidate, _problem(folder), given.built, verifier)
    except (ProblemError, UnicodeError) as error:
        return CorpusOutcome(folder.name, "problem", message=str(error))
    except KbrlError as error:
        verifier.restart()
        return CorpusOutcome(folder.name, "host", message=str(error))
    v = verdict
    return CorpusOutcome(
        folder.name, state, candidate.backend, v.fault.value, v.rule, v.rules, v.message, v.hint,
        round(sum(stages.values()), 2), tools, {name: round(spent, 2) for name, spent in stages.items()},
        details,
    )  # fmt: skip


def _judged(
    candidate: Candidate, problem: Problem | None, built: BuildReport | None, verifier: Verifier
) -> tuple[Verdict, State, dict[str, float], dict[str, str], str]:
    """The verdict, what an accepted one is called, seconds by stage and what they went into, and the compilers."""
    state: State
    device = choose_device(candidate.backend, None)
    try:
        check_device(device)
        is_here = not load_backend(candidate.backend).is_interpreted(device.partition(":")[0])
    except KbrlError:
        is_here = False
    if problem is not None and is_here:
        result = verifier.verify(problem, candidate, built=built)
        verdict, state = (result.verdict, "accepted") if result.ok else refused(result.verdict)
        details = {stage.name: stage.detail for stage in result.stages if stage.detail}
        return verdict, state, result.seconds, details, result.toolchain
    build = built or verifier.build(candidate, problem)
    stages = {"build": build.finished_at - build.started_at}
    if build.fault is Fault.OK:
        is_cut = build.hint.startswith("not all was compiled ahead")
        state = "missing" if _MISSING.search(build.hint) else "cut_short" if is_cut else "built"
        return early(Fault.OK, build.hint), state, stages, {}, build.toolchain
    return *refused(unbuilt(build)), stages, {}, build.toolchain


def refused(verdict: Verdict) -> tuple[Verdict, State]:
    """What was not there when it ran is nobody's fault; a rule that names an import is one."""
    is_missing = verdict.fault in (Fault.RUNTIME_ERROR, Fault.COMPILE_ERROR) and _MISSING.search(verdict.message)
    named = _ELSEWHERE.search(verdict.message) if verdict.rule == "flag" else None
    return verdict, "missing" if is_missing or (named and not Path(named[1]).exists()) else "refused"


def _is_expected(folder: Path, outcome: CorpusOutcome) -> bool:
    try:
        wanted: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    except (OSError, ValueError):
        return False
    return outcome.state == "refused" and (outcome.rule or outcome.fault) in wanted.get("rules", [])


def _counted(outcomes: list[CorpusOutcome]) -> Result:
    refused = Counter(f"{one.fault} {one.rule}".strip() for one in outcomes if one.state == "refused")
    seconds = sorted(one.seconds for one in outcomes if one.counts)
    return {
        "pairs": len(outcomes),
        "states": dict(Counter(one.state for one in outcomes)),
        "refused": dict(refused),
        "not_built_fast": dict(Counter(why for one in outcomes for why in ways(one.toolchain) if why != FAST)),
        "not_counted": [f"{one.name}: {one.state}: {one.message[:160]}" for one in outcomes if not one.counts],
        "p90_s": seconds[int(0.9 * (len(seconds) - 1))] if seconds else 0.0,
        "median_s": median(seconds or [0.0]),
        "most_s": max(seconds, default=0.0),
        "stages_s": {name: _middle_and_p90(each) for name, each in _by_stage(outcomes).items()},
    }


def _by_stage(outcomes: list[CorpusOutcome]) -> dict[str, list[float]]:
    """Seconds of what counts: built, waited (what is in no stage), reference, judged."""
    found: dict[str, list[float]] = {}
    for one in outcomes:
        if one.counts:
            spent = dict.fromkeys(("built", "waited", "reference", "judged"), 0.0)
            for stage, seconds in one.stages.items():
                spent[_STAGES.get(stage, "judged")] += seconds
            for name, seconds in spent.items():
                found.setdefault(name, []).append(seconds)
    return found


def _middle_and_p90(seconds: list[float]) -> list[float]:
    return [round(median(seconds), 2), round(sorted(seconds)[int(0.9 * (len(seconds) - 1))], 2)]
