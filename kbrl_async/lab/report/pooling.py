"""Runs of one kind with different seeds as one side of a comparison: means, with intervals over the seeds. Pure.

Seeds differ more than answers of one run do, so an interval within a run says too little about a method. Figures of a
summary get Student's interval over the seeds; answers to held-out problems and of evaluations are put together, problem
by problem, as differences to another side are paired by problem.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from kbrl_async.evaluation import document
from kbrl_async.evaluation.document import Document
from kbrl_async.evaluation.metrics import Sample
from kbrl_async.evaluation.proportions import CONFIDENCE, KEY
from kbrl_async.lab.report.comparing import Side


def pooled(name: str, sides: Sequence[Side]) -> Side:
    """One side of several; of a single one itself, under this name."""
    return Side(name, _summary(sides), _config(sides), _heldout(sides), _evaluation(sides))


def _summary(sides: Sequence[Side]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in {key: None for side in sides for key in side.summary}:
        if key.endswith(KEY):
            continue
        values = [side.summary.get(key) for side in sides]
        found[key] = _together(values)
        if isinstance(found[key], float):
            found[f"{key}{KEY}"] = _interval([v for v in values if isinstance(v, int | float)], sides, key)
    found["first_and_last"] = f"{len(sides)} seeds; intervals of a figure of training are over the seeds."
    return found


def _together(values: Sequence[Any]) -> Any:
    """A mean of numbers, whole where they are; else what all say, or each."""
    there = [value for value in values if value is not None]
    if there and all(type(value) is int for value in there) and len(set(there)) > 1:
        return round(fmean(there))
    if there and all(isinstance(value, float) for value in there):
        return fmean(there)
    if all(value == values[0] for value in values):
        return values[0]
    return ", ".join(str(value) for value in there) if all(isinstance(v, str | int) for v in there) else None


def _interval(values: Sequence[float], sides: Sequence[Side], key: str) -> list[float] | None:
    """Student's, over the seeds; a single run has its own."""
    if len(sides) == 1:
        return sides[0].summary.get(f"{key}{KEY}")
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
    return [fmean(values) - half, fmean(values) + half]


def _config(sides: Sequence[Side]) -> dict[str, str]:
    keys = {key: None for side in sides for key in side.config}
    return {key: ", ".join(dict.fromkeys(side.config.get(key, "–") for side in sides)) for key in keys}


def _heldout(sides: Sequence[Side]) -> dict[str, Mapping[str, Sequence[Sample]]]:
    found: dict[str, dict[str, list[Sample]]] = {}
    for side in sides:
        for phase, problems in side.heldout.items():
            into = found.setdefault(phase, defaultdict(list))
            for problem, samples in problems.items():
                into[problem] += samples
    return dict(found)


def _evaluation(sides: Sequence[Side]) -> Document | None:
    documents = [side.evaluation for side in sides if side.evaluation is not None]
    if not documents:
        return None
    samples = [sample for one in documents for sample in one.samples]
    return document.build(samples, policy=documents[0].policy, settings=documents[0].settings)
