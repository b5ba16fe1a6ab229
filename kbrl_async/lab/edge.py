"""Problems one small step away from those that a policy solves at times: what a proposer offers it next.

A problem that is always or never solved teaches nothing, and one that is written unlike all that a policy has seen is
never solved, however few operations it has. So a proposal is a problem of the policy's own run with one line of its
`forward` left out, doubled from another problem, put in place of another, or moved: a step that the policy knows, where
it has not met it.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.generator import GeneratedProblem, chain_of
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from protocols.records import VERIFIER, Problem

RECENT = 0.5
"""Share of a run's answers, the newest, that say what its policy can do now."""
PATIENCE = 2_000
"""Steps in vain, one after the other: there are no more problems so near."""
_NAMES = re.compile(r"\b(?!torch\b|F\b)[A-Za-z_]\w*\b(?!\s*[(=.])")


class Parent(msgspec.Struct, frozen=True):
    """A problem of a run, and the share of its answers that were correct."""

    source: str
    solved: float


class Chain(msgspec.Struct, frozen=True):
    """A `forward` that is a row of lines, each of which makes the same variable anew."""

    lines: tuple[str, ...]
    begin: int
    steps: tuple[str, ...]

    @classmethod
    def of(cls, source: str) -> Chain | None:
        """None where `forward` is anything else."""
        forwards = [f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef) and f.name == "forward"]
        if len(forwards) != 1 or len(forwards[0].body) < 2:
            return None
        *steps, last = forwards[0].body
        names = {ast.unparse(step.targets[0]) for step in steps if isinstance(step, ast.Assign)}
        whole = all(isinstance(step, ast.Assign) and step.lineno == step.end_lineno for step in steps)
        if not whole or not isinstance(last, ast.Return) or names != {ast.unparse(last.value or ast.Constant(None))}:
            return None
        lines, begin = tuple(source.splitlines()), steps[0].lineno - 1
        return cls(lines, begin, lines[begin : begin + len(steps)])

    def text(self, steps: Sequence[str]) -> str:
        after = self.lines[self.begin + len(self.steps) :]
        return "\n".join([*self.lines[: self.begin], *steps, *after]) + "\n"


def parents_in(runs: Sequence[Path]) -> list[Parent]:
    """Problems that the newer half of these runs' training answers is about.

    :raises UserError: a folder is no run, or has no answers.
    """
    found: list[Parent] = []
    for run in runs:
        if not (run / FILE).is_file():
            raise UserError(f"{run} has no archive to learn from", "Give a run folder; see 'kbrl runs'")
        with ArchiveReader(run / FILE) as archive:
            rows = [row for row in archive.rows(purpose="train") if row.reward is not None and row.role != VERIFIER]
            solved, sources = defaultdict[str, list[bool]](list), dict[str, str]()
            for row in rows[int(len(rows) * (1 - RECENT)) :]:
                solved[row.problem_id].append(row.correct)
                if row.problem_id not in sources and (record := archive.record(row.task_id)) is not None:
                    sources[row.problem_id] = record.request.problem.source
        found += [Parent(sources[p], sum(of) / len(of)) for p, of in sorted(solved.items()) if p in sources]
    if not found:
        raise UserError("these runs hold no answers to learn from", "Give a run with a few updates")
    return found


def propose(parents: Sequence[Parent], count: int, seed: int, avoid: Iterable[Problem] = ()) -> list[GeneratedProblem]:
    """`count` problems near those that are solved at times, none with the operations of a parent or of `avoid`.

    :raises UserError: there are no so many, or no parent is a chain of lines.
    """
    chains = [(parent, chain) for parent in parents if (chain := Chain.of(parent.source)) is not None]
    if not any(parent.solved for parent, _ in chains):
        raise UserError("these runs solved no problem that is a row of lines", "Give a run that solves some")
    seen = {chain_of(text) for text in [*(p.source for p in parents), *(p.source for p in avoid)]}
    found: list[GeneratedProblem] = []
    vain = 0
    for number, (text, solved) in enumerate(_steps_from(chains, random.Random(seed))):
        does = chain_of(text)
        vain = vain + 1 if not does or does in seen else 0
        if vain > PATIENCE:
            raise UserError(f"only {len(found)} problems of {count} are so near", "Ask for fewer, or name more runs")
        if vain:
            continue
        seen.add(does)
        name = "_".join(dict.fromkeys(does))[:40]
        found.append(GeneratedProblem(seed, number, text, name, 1 if len(does) == 1 else 2, round(1 - solved, 3), does))
        if len(found) == count:
            break
    return found


def _steps_from(chains: Sequence[tuple[Parent, Chain]], rng: random.Random) -> Iterator[tuple[str, float]]:
    """Texts without end, and how often their parent is solved: those that are solved half of the time come most."""
    known = [chain for parent, chain in chains if parent.solved > 0]
    weights = [parent.solved * (1 - parent.solved) + 0.02 * (parent.solved > 0) for parent, _ in chains]
    while True:
        parent, chain = rng.choices(chains, weights)[0]
        donor = rng.choice(rng.choice(known).steps)
        steps, place = list(chain.steps), rng.randrange(len(chain.steps))
        match rng.choice(("drop", "put", "put", "replace", "replace", "move")):
            case "drop" if len(steps) > 1:
                del steps[place]
            case "move":
                steps.insert(rng.randrange(len(steps)), steps.pop(place))
            case "put" if _fits(donor, chain):
                steps.insert(place, donor)
            case "replace" if _fits(donor, chain):
                steps[place] = donor
        yield chain.text(steps), parent.solved


def _fits(donor: str, chain: Chain) -> bool:
    """Whether a line of another problem has all that it names here."""
    target = chain.steps[0].split("=")[0].strip()
    names = set(_NAMES.findall(donor)) - {"True", "False", "None"}
    has_f = "F." not in donor or any("functional as F" in line for line in chain.lines)
    return names <= {target} and has_f and "self" not in donor
