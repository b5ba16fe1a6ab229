"""What a search leaves beside its kernel: everything as JSON, and what a person wants to read as Markdown. Pure."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kbrl_async.kernels.verify.inputs import KINDS
from kbrl_async.lab.optimize.proving import Final, Proof
from kbrl_async.lab.optimize.search import Search
from kbrl_async.lab.optimize.targets import UserModule
from kbrl_async.lab.optimize.tree import POLICY, Attempt, Judgement, fingerprint

FORMAT = 1
METHOD = (
    "Every kernel was compiled and run in a sandbox on secret inputs that its author could not know; a trusted process "
    "compared its outputs with the module's. Times are pairs of module and kernel in random order on one pinned core; "
    "the interval is that of the median of their ratios, and it counts as faster only where all of it lies above 1. "
    "The file itself was read back from disk, verified again on new secret inputs and timed for longer."
)
_SHOWN_ERRORS = 5


class Facts(msgspec.Struct, frozen=True):
    """What the search was made with."""

    engine: str
    prompt_option: str
    backend: str
    seconds: float
    budget: dict[str, Any]
    examples: tuple[str, ...] = ()
    cost: float = 0.0


class SearchResult(msgspec.Struct, frozen=True):
    """What came of a search; `proof` is None where nothing was written."""

    target: UserModule
    search: Search
    facts: Facts
    proof: Proof | None = None
    finals: tuple[Final, ...] = ()


def author(search: Search, number: int, engine: str) -> str:
    """Who wrote an attempt: the engine, or where it was taken from; a refinement names what it began with, too."""
    attempt = first = search.tree[number]
    while first.parent is not None:
        first = search.tree[first.parent]
    if attempt.origin != POLICY:
        return f"{attempt.origin}, and taken as it was found there"
    return engine if first.origin == POLICY else f"{engine}, beginning with what was written by {first.origin}"


def versions() -> dict[str, str]:
    """Of what took part."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("kbrl-async", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def document(found: SearchResult) -> dict[str, Any]:
    """`optimized_X.evidence.json`."""
    target, search, facts, proof = found.target, found.search, found.facts, found.proof
    return {
        "format": FORMAT,
        "target": {"title": target.title, "kind": target.kind, "problem": target.problem.source},
        "written": proof and {"path": proof.path, "sha256": proof.winner.sha256, "author": _winner(found)},
        "proof": proof and proof.winner.result.document(),
        "began_with": search.start,
        "finals": [{"attempt": f.attempt, "sha256": f.sha256, "result": f.result.document()} for f in found.finals],
        "input_sets": [kind.name for kind in KINDS],
        "method": METHOD,
        "versions": versions(),
        "search": {**msgspec.to_builtins(facts), "stopped": search.stopped, **counts(search)},
        "tree": search.tree.document(),
        "sources": {fingerprint(a.source): a.source for a in search.tree if a.source and a.same_as is None},
    }


def counts(search: Search) -> dict[str, Any]:
    attempts = list(search.tree)
    judged = Counter(a.judgement.category for a in attempts if a.judgement is not None and a.same_as is None)
    return {
        "attempts": len(attempts),
        "tokens": search.tokens,
        "distinct": sum(a.judgement is not None and a.same_as is None for a in attempts),
        "repeats": sum(a.same_as is not None for a in attempts),
        "lost": sum(bool(a.lost) for a in attempts),
        "proven": len(search.tree.proven()),
        "by_category": dict(judged),
    }


def markdown(found: SearchResult) -> str:
    """`optimized_X.evidence.md`."""
    search, facts = found.search, found.facts
    parts = [f"# {found.target.title}", "", conclusion(found), ""]
    if found.proof is not None:
        parts += ["## Proof", "", *_table(("", ""), proof_rows(found)), "", METHOD, ""]
        sets = ", ".join(dict.fromkeys(kind.name for kind in KINDS))
        parts += [f"Kinds of secret inputs: {sets} (fewer for very large inputs).", ""]
    elif errors := failures(search):
        parts += ["## How far the best attempts came", "", *_table(("attempt", "verdict", "what"), errors), ""]
    total = counts(search)
    parts += ["## Search", ""]
    rows = [("engine", facts.engine), ("prompt", facts.prompt_option), ("seconds", f"{facts.seconds:.1f}")]
    rows += [(name, str(total[name])) for name in ("attempts", "distinct", "repeats", "proven", "tokens")]
    rows += [("began with", began_with(search))] if search.start is not None else []
    rows += [("ended by", search.stopped), ("verdicts", ", ".join(f"{n} {c}" for c, n in total["by_category"].items()))]
    parts += [*_table(("", ""), rows), "", "```", *tree_lines(search), "```", ""]
    parts += ["## Versions", "", *_table(("", ""), list(versions().items())), ""]
    return "\n".join(parts)


def conclusion(found: SearchResult) -> str:
    """One sentence, and a second where the kernel is what the search began with."""
    if found.proof is not None:
        winner = found.proof.winner
        same = " Nothing faster was found than the kernel to begin with." * (winner.attempt == found.search.start)
        if (timing := winner.result.timing) is None:
            return f"Proven right, not timed.{same}"
        interval = f"({timing.lo:.2f} … {timing.hi:.2f})"
        return f"Proven right; {timing.speedup:.2f}× {interval} the speed of the module: {timing.claim}.{same}"
    if any(final.result.timing is not None and final.result.timing.stopped == "disturbed" for final in found.finals):
        return (
            "Kernels were proven right, and others used the core so much that no time could be trusted. No file was "
            "written: try again when the machine is quieter."
        )
    if found.search.tree.proven():
        return "Kernels were proven right, and none was proven faster than the module. No file was written."
    return "No kernel was proven right. No file was written."


def began_with(search: Search) -> str:
    """What became of the kernel that the search was given; empty where it was given none."""
    if search.start is None:
        return ""
    attempt = search.tree[search.start]
    if attempt.judgement is None:
        words = attempt.lost or "not judged"
    else:
        words = _correct(attempt.judgement) if attempt.is_proven else ": ".join(_failure(attempt)[1:])
    return f"what {attempt.origin} wrote: {words}"


def proof_rows(found: SearchResult) -> list[tuple[str, str]]:
    assert found.proof is not None
    rows = [(name, text.replace("\n", " ")) for name, text in found.proof.winner.result.rows()]
    return [("written by", _winner(found)), *rows]


def _winner(found: SearchResult) -> str:
    assert found.proof is not None
    return author(found.search, found.proof.winner.attempt, found.facts.engine)


def failures(search: Search) -> list[tuple[str, str, str]]:
    """(attempt, verdict, message) of the wrong attempts that came furthest."""
    return [_failure(attempt) for attempt in search.tree.failures()[:_SHOWN_ERRORS]]


def _failure(attempt: Attempt) -> tuple[str, str, str]:
    judged = attempt.judgement
    assert judged is not None
    sets = f", {judged.passed} of {judged.total} input sets" if judged.total else ""
    said = " ".join((judged.rule and f"{judged.rule}:", judged.message)).strip()
    return str(attempt.number), judged.fault.value.replace("_", " ") + sets, " ".join(said.split())[:200]


def tree_lines(search: Search, most: int = 40) -> list[str]:
    """The tree as text: distinct attempts, those with proven descendants first."""
    lines: list[str] = []

    def walk(number: int | None, depth: int) -> None:
        for child in sorted(search.tree.children(number), key=lambda n: -_best_below(search, n)):
            attempt = search.tree[child]
            if attempt.same_as is None and attempt.judgement is not None and len(lines) < most:
                lines.append("  " * depth + described(attempt))
                walk(child, depth + 1)

    walk(None, 0)
    hidden = counts(search)["distinct"] - len(lines)
    return [*lines, *([f"… and {hidden} more"] if hidden > 0 else [])]


def described(attempt: Attempt) -> str:
    judged = attempt.judgement
    if judged is None:
        return f"{attempt.number} {attempt.lost or 'not judged'}"
    if judged.is_proven:
        return f"{attempt.number} {_correct(judged)}" + ("" if attempt.origin == POLICY else f", by {attempt.origin}")
    sets = f" {judged.passed}/{judged.total}" if judged.total else ""
    return f"{attempt.number} {judged.category}{sets} {judged.rule}".rstrip()


def _correct(judged: Judgement) -> str:
    return "correct" + ("" if judged.speedup is None else f" {judged.speedup:.2f}× [{judged.lo:.2f}, {judged.hi:.2f}]")


def _best_below(search: Search, number: int) -> float:
    own = search.tree[number].judgement
    mine = -1.0 if own is None else (own.lo or 0.1) if own.is_proven else 0.0
    return max([mine, *(_best_below(search, child) for child in search.tree.children(number))])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in cells),
    ]
