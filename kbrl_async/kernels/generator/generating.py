"""Numbers in, distinct and sound problems out: drawn and checked in worker processes, told apart here."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing.pool
import random
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from protocols.records import Problem

Task = tuple[int, int, tuple[float, float]]
"""Seed, number, difficulty."""
HELDOUT_SHARE = 10
"""One chain of operations in so many is held out."""
PATIENCE = 400
"""Drawn in vain one after the other: there are no more of this kind."""


class GeneratedProblem(msgspec.Struct, frozen=True):
    """What one number of a seed gave."""

    seed: int
    number: int
    source: str
    name: str
    level: int
    difficulty: float
    chain: tuple[str, ...]
    """Its operations, in order."""
    reason: str = ""
    """Why it is left out."""

    @property
    def stem(self) -> str:
        """Its file's name."""
        return f"s{self.seed}n{self.number:05d}_{self.name}"

    @property
    def split(self) -> str:
        """By its operations alone, so that it is the same whatever else is drawn."""
        digest = hashlib.sha256(" ".join(self.chain).encode()).digest()
        return "train" if int.from_bytes(digest[:4]) % HELDOUT_SHARE else "heldout"


def generate(
    count: int,
    seed: int = 0,
    *,
    difficulty: tuple[float, float] = (0.0, 1.0),
    avoid: Iterable[Problem] = (),
    jobs: int = 2,
    told: Callable[[GeneratedProblem], None] = lambda _drawn: None,
) -> Iterator[GeneratedProblem]:
    """`count` problems, those of the smallest numbers first; `told` of every one that was drawn.

    :param avoid: nothing with the operations of one of these is drawn.
    :raises UserError: there are no so many of this difficulty.
    """
    seen = {chain_of(problem.source) for problem in avoid}
    taken = vain = 0
    wanted = ((seed, number, difficulty) for number in range(1_000_000_000))
    with _mapped(wanted, jobs) as results:
        for drawn in results:
            if not drawn.reason and drawn.chain in seen:
                drawn = msgspec.structs.replace(drawn, reason="its operations were drawn before, or are held out")
            told(drawn)
            vain = vain + 1 if drawn.reason else 0
            if vain > PATIENCE:
                raise UserError(f"only {taken} problems of {count} were found", "Ask for fewer, or widen --difficulty")
            if not drawn.reason:
                seen.add(drawn.chain)
                taken += 1
                yield drawn
                if taken == count:
                    return


@contextlib.contextmanager
def _mapped(tasks: Iterator[Task], jobs: int) -> Iterator[Iterator[GeneratedProblem]]:
    """What each task gives, in order; one job needs no process of its own."""
    if jobs == 1:
        yield itertools.starmap(one, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _start) as pool:
        yield _in_order(pool, tasks, 8 * jobs)


def _in_order(pool: multiprocessing.pool.Pool, tasks: Iterator[Task], ahead: int) -> Iterator[GeneratedProblem]:
    """As `imap`, but never more than `ahead` tasks in flight: `imap` would draw all numbers at once."""
    waiting = [pool.apply_async(one, next(tasks)) for _ in range(ahead)]
    while True:
        result = waiting.pop(0)
        waiting.append(pool.apply_async(one, next(tasks)))
        yield result.get()


def _start() -> None:
    import torch

    torch.set_num_threads(1)


def one(seed: int, number: int, difficulty: tuple[float, float]) -> GeneratedProblem:
    """What this number gives; a function of its arguments. What is not sound in several workloads or in half precision
    is tried once more with neither.
    """
    from kbrl_async.kernels.generator import checking, drawing
    from kbrl_async.kernels.generator.draft import Variation

    rng = random.Random(f"{seed}/{number}")
    draft = drawing.draw(rng, difficulty)
    title = drawing.title_of(draft)
    droppable = [n for n, step in enumerate(draft.steps) if step.keeps_shape and len(draft.steps) > 1]
    plain, drawn = Variation(), drawing.variation(draft, rng)
    source = reason = ""
    for varied in (drawn, plain) if drawn != plain else (plain,):
        source = render_problem(draft.module(title, variation=varied))
        shortened = [
            (draft.steps[n].operator, render_problem(draft.module(title, without=n, variation=varied)))
            for n in droppable
        ]
        if not (reason := checking.check(source, shortened)):
            break
    return GeneratedProblem(
        seed,
        number,
        source,
        drawing.name_of(draft),
        drawing.level_of(draft),
        drawing.difficulty_of(draft),
        chain_of(source),
        reason,
    )


def chain_of(source: str) -> tuple[str, ...]:
    """What it computes, whatever names, constants and shapes it has."""
    return operations(Scope(source))
