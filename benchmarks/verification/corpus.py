"""Kernels that others wrote: is each honest one accepted, and each hostile one refused for its reason?

A corpus is a folder with one folder a pair: `candidate.py` with whatever lies beside it, `problem.py` (without it a
pair is only built), and for a hostile one `expected.json`: `{"rules": ["decoy_kernel"]}`, a fault where no rule has a
name. `adapt` makes such folders.

::

    pair ─▶ is it a kernel? a problem? ─▶ built (rules) ─▶ judged, where this host has its device ─▶ accepted | refused
                     └─ no_kernel, problem, missing, cut_short, host: named, counted, nobody's fault, in no share
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec

from benchmarks.harness import Result, say
from benchmarks.harness.crew import Crew, CrewTask, Start, Work
from benchmarks.verification import adapters
from kbrl_async.errors import KbrlError, ProblemError, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import backends
from kbrl_async.kernels.funnel import Verifier, VerifyOptions, read_candidate
from kbrl_async.kernels.funnel.result import early, unbuilt
from kbrl_async.kernels.funnel.verifier import check_device, choose_device, default_bench, read_text, under
from kbrl_async.kernels.problems import load_file
from kbrl_async.kernels.settings import Rules
from protocols.records import Candidate, Fault, Problem, Verdict

ENOUGH_HONEST, ENOUGH_HOSTILE = 0.97, 0.99
State = Literal["accepted", "built", "refused", "no_kernel", "problem", "missing", "cut_short", "host"]
"""`built`: it ran to its end where tensors have no values, and all that it asked for was compiled. From `no_kernel` on
it says nothing of the candidate: it needs a package that is `missing` here, or its run without a GPU was `cut_short`.
"""
_FALLBACK = re.compile(r" full: ([^;]*)")
_MISSING = re.compile(r"\b(?:ModuleNotFound|Import)Error: |fatal error: [\w./-]+: No such file")
_SHARES = 3
"""Verifiers that may plan with all of a GPU's memory between them; if there are more, some wait at times."""
Corpus = Annotated[Path, "a folder of pairs"]
Out = Annotated[Path | None, "a file with one JSON object a pair; what is in it is not judged again"]
Again = Annotated[tuple[str, ...], "states that are judged again all the same, as in refused,host"]
Jobs = Annotated[int, "processes, each with a verifier"]
Seconds = Annotated[float, "after which no further pair is begun"]


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
    again: Again = (),
    out: Out = None,
) -> Result:
    """Every pair through the funnel; `ok` where at least 97 % are accepted and none is called cheating."""
    crew = Crew(jobs, seconds, out=out, again=again, is_together=bool(warm))
    judge = partial(judging, rules, deadline_s, False, corpus / warm if warm else None)
    outcomes = run(_pairs(corpus, only, repeat), crew, judge)
    judged = [one for one in outcomes if one.counts]
    share = sum(one.state != "refused" for one in judged) / max(1, len(judged))
    accused = [one.name for one in judged if one.fault == Fault.CHEATING]
    ok = bool(judged) and share >= ENOUGH_HONEST and not accused
    return {"ok": ok, "accepted_share": share, "accused": accused, **_counted(outcomes)}


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
    outcomes = run(
        _pairs(corpus), Crew(jobs, seconds, out=out, again=again), partial(judging, rules, deadline_s, timing, None)
    )
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
    return [CrewTask(folder.name + mark.strip(), (folder, mark)) for mark in marks for folder in folders]


def run(pairs: list[CrewTask], crew: Crew, judge: Start) -> list[CorpusOutcome]:
    """One outcome a pair; whatever a pair is, it is an outcome and no exception."""
    outcomes = []
    for row in crew.run(pairs, judge):
        outcomes.append(msgspec.convert(row, CorpusOutcome))
        say(f"{outcomes[-1].state:9} {outcomes[-1].name} {outcomes[-1].rule or outcomes[-1].message[:100]}")
    return outcomes


@contextlib.contextmanager
def judging(rules: Rules, deadline_s: float, timing: bool, warm: Path | None, number: int, jobs: int) -> Iterator[Work]:
    """What a worker does with a pair, as `(folder, mark)`; with `warm` it has judged that one before."""
    farm = msgspec.structs.replace(VerifyOptions().farm, deadline_s=deadline_s)
    options = VerifyOptions(timing=timing, farm=farm)
    if jobs > 1:
        bench = msgspec.structs.replace(default_bench(()), memory_share=min(1.0, _SHARES / jobs))
        options = msgspec.structs.replace(options, bench=bench)
    with Verifier(None, under(options, rules)) as verifier:

        def judge(given: tuple[Path, str]) -> Result:
            begun = time.time()
            outcome = _one(*given, verifier)
            told: Result = msgspec.to_builtins(msgspec.structs.replace(outcome, begun=round(begun, 2)))
            del told["name"]
            return told

        if warm is not None:
            judge((warm, "# warm\n"))
        yield judge


def _one(folder: Path, mark: str, verifier: Verifier) -> CorpusOutcome:
    if not (folder / "candidate.py").is_file():
        return CorpusOutcome(folder.name, "no_kernel", message="there is no candidate.py")
    try:
        text = mark + read_text(folder / "candidate.py")
        candidate = read_candidate(text, response=False).candidate
    except (UserError, UnicodeError) as error:
        return CorpusOutcome(folder.name, "no_kernel", message=str(error))
    if candidate is None or max(load_backend(name).claims(text) for name in backends()) <= 0:
        return CorpusOutcome(folder.name, "no_kernel", message="no backend knows what it is")
    try:
        path = folder / "problem.py"
        problem = load_file(path) if path.is_file() else None
        verdict, state, stages, details, tools = _judged(candidate, problem, verifier)
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
    candidate: Candidate, problem: Problem | None, verifier: Verifier
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
        result = verifier.verify(problem, candidate)
        verdict, state = (result.verdict, "accepted") if result.ok else _refused(result.verdict)
        details = {stage.name: stage.detail for stage in result.stages if stage.detail}
        return verdict, state, result.seconds, details, result.toolchain
    build = verifier.build(candidate, problem)
    stages = {"build": build.finished_at - build.started_at}
    if build.fault is Fault.OK:
        is_cut = build.hint.startswith("not all was compiled ahead")
        state = "missing" if _MISSING.search(build.hint) else "cut_short" if is_cut else "built"
        return early(Fault.OK, build.hint), state, stages, {}, build.toolchain
    return *_refused(unbuilt(build)), stages, {}, build.toolchain


def _refused(verdict: Verdict) -> tuple[Verdict, State]:
    """What was not there when it ran is nobody's fault; a rule that names an import is one."""
    is_missing = verdict.fault in (Fault.RUNTIME_ERROR, Fault.COMPILE_ERROR) and _MISSING.search(verdict.message)
    return verdict, "missing" if is_missing else "refused"


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
        "not_built_fast": dict(Counter(why for one in outcomes for why in _FALLBACK.findall(one.toolchain))),
        "not_counted": [f"{one.name}: {one.state}: {one.message[:160]}" for one in outcomes if not one.counts],
        "p90_s": seconds[int(0.9 * (len(seconds) - 1))] if seconds else 0.0,
        "median_s": median(seconds or [0.0]),
        "most_s": max(seconds, default=0.0),
    }
