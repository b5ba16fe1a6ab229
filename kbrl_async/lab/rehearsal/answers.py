"""What a rehearsal's policy says: for each problem right answers, slow and fast, and some that are wrong.

The small policy's author writes them for the project's suite; for other problems or languages a file does. Right ones
are right by construction: tests build and verify them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.lab.small_policy.author import CAREFUL, Author, Habits
from kbrl_async.lab.small_policy.languages import LANGUAGES, respond
from kbrl_async.lab.small_policy.specs import SPECS
from protocols.records import Problem

EACH = 12
"""Answers to a problem: more than a group has, so that its rewards differ."""


class ForcedAnswer(msgspec.Struct, frozen=True):
    """One line of a file of answers."""

    problem: str
    """Its id, such as L1/13_softmax."""
    answer: str
    """As a policy would write it: prose, then a fenced file."""


def written(problems: Iterable[Problem], backend: str, right: float, seed: int) -> dict[str, list[str]]:
    """By problem id. `right`: the share of answers without a slip, half of them fast.

    :raises UserError: nobody here writes that language, or answers a problem.
    """
    if backend not in LANGUAGES:
        cure = f"Use backend={' or backend='.join(LANGUAGES)}, or give --answers FILE"
        raise UserError(f"nobody here writes demonstrations for backend={backend}", cure)
    return {problem.problem_id: _answers(problem.problem_id, backend, right, seed) for problem in problems}


def _answers(problem_id: str, backend: str, right: float, seed: int) -> list[str]:
    spec = SPECS.get(problem_id)
    if spec is None:
        cure = "Use level=1,2,3 of the project's suite, or give --answers FILE"
        raise UserError(f"there is no demonstration for {problem_id}", cure)
    rng = random.Random(f"{seed}.{problem_id}")
    habits = [msgspec.structs.replace(CAREFUL if n < right * EACH else Habits(), fast=0.5) for n in range(EACH)]
    return [respond(spec, Author(rng, one), backend) for one in habits]


def read(path: Path, problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Of a file with a `ForcedAnswer` a line.

    :raises UserError: it can't be read, or a problem has no answer.
    """
    found: dict[str, list[str]] = {}
    try:
        for given in msgspec.json.Decoder(ForcedAnswer).decode_lines(path.read_bytes()):
            found.setdefault(given.problem, []).append(given.answer)
    except (OSError, msgspec.DecodeError) as error:
        cure = 'Write {"problem": "L1/13_softmax", "answer": "…"} a line'
        raise UserError(f"--answers {path} can't be read: {error}", cure) from None
    if lacking := [problem.problem_id for problem in problems if problem.problem_id not in found]:
        raise UserError(f"--answers {path} has none for {lacking[0]} and {len(lacking) - 1} others", "Add them")
    return found
