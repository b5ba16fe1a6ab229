"""Problems like the suite's without end: `problems=grammar:500` is the suite and so many drawn from its grammar.

Invariants
* No two have the same chain of operations, and none has that of a problem of the suite: neither of one that is held
  out, which no policy may have met, nor of one that is there already.
* The problems of one number and seed are the first of those of a larger number.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import load_suite, parse_problem
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.lab.small_policy.families.blocks import Attention, Perceptron
from kbrl_async.lab.small_policy.families.source import ProblemFamily
from kbrl_async.lab.small_policy.specs import SPECS, chain_of, difficulty, random_spec
from protocols.records import Problem

_WORD = re.compile(r"(\d+)(?::(\d+))?")
LEVELS = (1, 2, 3)
PATIENCE = 2_000
"""Drawn in vain one after the other: there are no more."""


def grammar(shapes: str, wanted: str = "") -> list[Problem]:
    """The suite's levels 1 to 3 and `N` problems like them; `wanted` is `N` or `N:SEED`.

    :raises ProblemError: it does not read like that, or there are no so many.
    """
    match = _WORD.fullmatch(wanted)
    if match is None or not int(match[1]):
        raise ProblemError(f"problems=grammar:{wanted} names no problems", "Write grammar:500, or grammar:500:SEED")
    count, seed = int(match[1]), int(match[2] or 0)
    return [*load_suite(levels=LEVELS, shapes=shapes), *(_problem(*one, seed, shapes) for one in _drawn(count, seed))]


def _drawn(count: int, seed: int) -> Iterator[tuple[int, ProblemFamily, tuple[str, ...]]]:
    rng, seen = random.Random(f"grammar/{seed}"), {chain_of(spec) for spec in SPECS.values()}
    vain = taken = 0
    while taken < count:
        spec = random_spec(rng)
        does = chain_of(spec)
        vain = vain + 1 if does in seen else 0
        if vain > PATIENCE:
            raise ProblemError(f"the suite's grammar has only {taken} problems of {count}", "Ask for fewer")
        if vain:
            continue
        seen.add(does)
        yield taken, spec, does
        taken += 1


def _problem(number: int, spec: ProblemFamily, does: tuple[str, ...], seed: int, shapes: str) -> Problem:
    level = 3 if isinstance(spec, Perceptron | Attention) else 1 if len(does) == 1 else 2
    name = "_".join(dict.fromkeys(does))[:40]
    return parse_problem(
        render_problem(spec.module()),
        f"L{level}/s{seed}n{number:05d}_{name}",
        level=level,
        shapes=shapes,
        difficulty=difficulty(spec),
    )
