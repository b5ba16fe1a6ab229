"""The same cheap outputs at our own tolerances: on the very input sets that a candidate would meet."""

from __future__ import annotations

import torch

from kbrl_async.kernels.audit import trials
from kbrl_async.kernels.problems.audit_file import OURS, OutputTrial
from kbrl_async.kernels.verify.input_set import InputSet
from kbrl_async.kernels.verify.references import References
from protocols.records import Problem

COPIES = 25
"""How often inputs and outputs of one call are in memory while a reference is made on a CPU."""


def cheap_outputs(references: References, problem: Problem) -> tuple[OutputTrial, ...]:
    """Trials over all input sets of one reference.

    :raises ProblemError: the reference fails, is random or gives nothing finite.
    """
    return _trials(references.get(problem).cases[0].reference.sets)


def _trials(sets: list[InputSet]) -> tuple[OutputTrial, ...]:
    """One set after the other: those of large problems are made again whenever they are looked at."""
    other = sets[1]  # of another draw than the first
    seen = [tensor.clone() for tensor in other.expected]  # of large problems it is there until the next one is made
    typical = trials.constants(seen)
    fits: dict[str, list[trials.Fit]] = {}
    for one in sets:
        expected = seen if one is other else one.expected
        offers: dict[str, list[torch.Tensor] | None] = {
            "zeros": trials.zeros(expected),
            "constant": typical,
            "input_independent": None if one is other else seen,
            "half_rows": trials.half_rows(expected),
        }
        for name, got in offers.items():
            if got is not None:
                fits.setdefault(name, []).append(trials.verified(got, expected, one.tolerances))
    unproven = sum(one.degenerate for one in sets)
    made = (trials.trial(name, OURS, found) for name, found in fits.items())
    return *made, OutputTrial("unchanged_input", OURS, unproven == len(sets), len(sets), unproven, 0.0, 0.0)
