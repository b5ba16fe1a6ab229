"""The same cheap outputs at our own tolerances: on the very input sets that a candidate would meet."""

from __future__ import annotations

import contextlib
import random

import torch

from kbrl_async.kernels.audit import trials
from kbrl_async.kernels.problems.audit_file import OURS, Trial
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.verify import BenchOptions
from kbrl_async.kernels.verify.references import References
from kbrl_async.kernels.verify.sets import InputSet
from protocols.records import Problem

COPIES = 25
"""How often inputs and outputs of one call are in memory while a reference is made."""


def cheap_outputs(zygote: Zygote, problem: Problem, options: BenchOptions, rng: random.Random) -> tuple[Trial, ...]:
    """Trials over all input sets of one reference.

    :raises ProblemError: the reference fails, is random or gives nothing finite.
    """
    with contextlib.closing(References(zygote, options, rng)) as references:
        return _trials(references.get(problem).cases[0].reference.sets)


def _trials(sets: list[InputSet]) -> tuple[Trial, ...]:
    other = sets[1]  # of another draw than the first
    offers: dict[str, list[list[torch.Tensor] | None]] = {
        "zeros": [*(trials.zeros(s.expected) for s in sets)],
        "constant": [*(trials.constants(other.expected) for _ in sets)],
        "input_independent": [*(other.expected for _ in sets)],
        "half_rows": [*(trials.half_rows(s.expected) for s in sets)],
    }
    made: list[Trial] = []
    for name, outputs in offers.items():
        fits = [
            trials.verified(got, one.expected, one.tolerances)
            for got, one in zip(outputs, sets, strict=True)
            if got is not None and not (name == "input_independent" and one is other)
        ]
        if fits:
            made.append(trials.trial(name, OURS, fits))
    unproven = sum(one.degenerate for one in sets)
    return *made, Trial("unchanged_input", OURS, unproven == len(sets), len(sets), unproven, 0.0, 0.0)
