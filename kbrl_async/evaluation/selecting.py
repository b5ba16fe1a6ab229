"""Which problems an evaluation asks."""

from __future__ import annotations

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.finding import choose
from kbrl_async.runs.config import Config
from protocols.records import Problem


class Chosen(msgspec.Struct, frozen=True):
    problems: list[Problem]
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Problems that were asked for and can't be, with the reason."""


def select(config: Config) -> Chosen:
    """By ids, else by levels; then by split. Problems that an audit flags stay in: the figures know of them.

    :raises UserError: an id names no problem, or nothing is left.
    :raises ProblemError: a level is empty, or a file breaks the contract.
    """
    shapes = "gpu" if runs_on_gpu(config.backend) else "cpu"
    wanted = config.evaluation
    levels = () if wanted.ids else config.levels
    found = load_problems(config.problems or "", levels=levels, shapes=shapes, precision=config.precision)
    if wanted.ids:
        found = list({p.problem_id: p for p in (choose(id_, found) for id_ in wanted.ids)}.values())
    if wanted.split != "all":
        found = [problem for problem in found if problem.split == wanted.split]
    if not found:
        where = "these ids" if wanted.ids else f"level {', '.join(map(str, config.levels))}"
        raise UserError(f"none of {where} is {wanted.split}", "Leave out --heldout, or choose other levels")
    return Chosen(found)
