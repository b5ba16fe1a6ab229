"""Kernels that others wrote: is each honest one accepted, and each hostile one refused for its reason?

A corpus is a folder with one folder a pair: `candidate.py` with whatever lies beside it, `problem.py` (without it a
pair is only built), and for a hostile one `expected.json`: `{"rules": ["decoy_kernel"]}`, a fault where no rule has a
name. `adapt` makes such folders.

::

    pair ─▶ is it a kernel? a problem? ─▶ built (rules) ─▶ judged, where this host has its device ─▶ accepted | refused
                     └─ no_kernel, problem, missing, cut_short, host: named, counted, nobody's fault, in no share
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from benchmarks.harness import Result, say
from benchmarks.verification import adapters
from kbrl_async.errors import KbrlError, ProblemError, UserError
from kbrl_async.kernels.backends import backend as load_backend
from kbrl_async.kernels.backends import backends
from kbrl_async.kernels.funnel import Verifier, VerifyOptions, read_candidate
from kbrl_async.kernels.funnel.result import early, unbuilt
from kbrl_async.kernels.funnel.verifier import check_device, choose_device, read_text, under
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
Corpus = Annotated[Path, "a folder of pairs"]
Out = Annotated[Path | None, "a file with one JSON object a pair"]


class Outcome(msgspec.Struct, frozen=True):
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

    @property
    def counts(self) -> bool:
        return self.state in ("accepted", "built", "refused")


def honest(*, corpus: Corpus, rules: Rules = "open", deadline_s: float = 60.0, out: Out = None) -> Result:
    """Every pair through the funnel; `ok` where at least 97 % are accepted and none is called cheating."""
    outcomes = run(corpus, rules, deadline_s, out)
    judged = [one for one in outcomes if one.counts]
    share = sum(one.state != "refused" for one in judged) / max(1, len(judged))
    accused = [one.name for one in judged if one.fault == Fault.CHEATING]
    ok = bool(judged) and share >= ENOUGH_HONEST and not accused
    return {"ok": ok, "accepted_share": share, "accused": accused, **_counted(outcomes)}


def hostile(
    *, corpus: Corpus, rules: Rules = "open", deadline_s: float = 60.0, timing: bool = False, out: Out = None
) -> Result:
    """Every pair through the funnel; `ok` where at least 99 % are refused, each by a rule that its `expected.json` has.

    An accepted one, and one that is refused for another reason, is named. With `timing`, cheats of the clock are in
    their place, too.
    """
    outcomes = run(corpus, rules, deadline_s, out, timing)
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


def run(corpus: Path, rules: Rules, deadline_s: float, out: Path | None, timing: bool = False) -> list[Outcome]:
    """One outcome a pair, in order; whatever a pair is, it is an outcome and no exception."""
    farm = msgspec.structs.replace(VerifyOptions().farm, deadline_s=deadline_s)
    options = under(VerifyOptions(timing=timing, farm=farm), rules)
    folders = sorted(path for path in corpus.iterdir() if path.is_dir())
    outcomes = []
    with Verifier(None, options) as verifier, (out or Path(os.devnull)).open("wb", buffering=0) as lines:
        for folder in folders:
            outcomes.append(_one(folder, verifier))
            lines.write(msgspec.json.encode(outcomes[-1]) + b"\n")  # at once: whoever stops a long one keeps these
            say(f"{outcomes[-1].state:9} {folder.name} {outcomes[-1].rule or outcomes[-1].message[:100]}")
    return outcomes


def _one(folder: Path, verifier: Verifier) -> Outcome:
    if not (folder / "candidate.py").is_file():
        return Outcome(folder.name, "no_kernel", message="there is no candidate.py")
    try:
        text = read_text(folder / "candidate.py")
        candidate = read_candidate(text, response=False).candidate
    except (UserError, UnicodeError) as error:
        return Outcome(folder.name, "no_kernel", message=str(error))
    if candidate is None or max(load_backend(name).claims(text) for name in backends()) <= 0:
        return Outcome(folder.name, "no_kernel", message="no backend knows what it is")
    try:
        path = folder / "problem.py"
        verdict, state, seconds, tools = _judged(candidate, load_file(path) if path.is_file() else None, verifier)
    except (ProblemError, UnicodeError) as error:
        return Outcome(folder.name, "problem", message=str(error))
    except KbrlError as error:
        verifier.restart()
        return Outcome(folder.name, "host", message=str(error))
    v = verdict
    return Outcome(
        folder.name, state, candidate.backend, v.fault.value, v.rule, v.rules, v.message, v.hint, round(seconds, 2),
        tools,
    )  # fmt: skip


def _judged(candidate: Candidate, problem: Problem | None, verifier: Verifier) -> tuple[Verdict, State, float, str]:
    """The verdict, what an accepted one is called, seconds, and the compilers."""
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
        return verdict, state, sum(result.seconds.values()), result.toolchain
    build = verifier.build(candidate, problem)
    seconds = build.finished_at - build.started_at
    if build.fault is Fault.OK:
        is_cut = build.hint.startswith("not all was compiled ahead")
        state = "missing" if _MISSING.search(build.hint) else "cut_short" if is_cut else "built"
        return early(Fault.OK, build.hint), state, seconds, build.toolchain
    return *_refused(unbuilt(build)), seconds, build.toolchain


def _refused(verdict: Verdict) -> tuple[Verdict, State]:
    """What was not there when it ran is nobody's fault; a rule that names an import is one."""
    is_missing = verdict.fault in (Fault.RUNTIME_ERROR, Fault.COMPILE_ERROR) and _MISSING.search(verdict.message)
    return verdict, "missing" if is_missing else "refused"


def _is_expected(folder: Path, outcome: Outcome) -> bool:
    try:
        wanted: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    except (OSError, ValueError):
        return False
    return outcome.state == "refused" and (outcome.rule or outcome.fault) in wanted.get("rules", [])


def _counted(outcomes: list[Outcome]) -> Result:
    refused = Counter(f"{one.fault} {one.rule}".strip() for one in outcomes if one.state == "refused")
    seconds = sorted(one.seconds for one in outcomes if one.counts)
    return {
        "pairs": len(outcomes),
        "states": dict(Counter(one.state for one in outcomes)),
        "refused": dict(refused),
        "not_built_fast": dict(Counter(why for one in outcomes for why in _FALLBACK.findall(one.toolchain))),
        "not_counted": [f"{one.name}: {one.state}: {one.message[:160]}" for one in outcomes if not one.counts],
        "p90_s": seconds[int(0.9 * (len(seconds) - 1))] if seconds else 0.0,
    }
