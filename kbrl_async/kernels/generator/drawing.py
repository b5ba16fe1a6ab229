"""One problem, drawn: which operators follow one another, how hard that is, and what it is called."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter

from kbrl_async.kernels.generator.draft import LAYOUTS, ProblemDraft, Size, Unfit, Variation, smaller
from kbrl_async.kernels.generator.operators import OPERATORS, DrawnOperator
from kbrl_async.kernels.generator.operators.table import VECTOR

GROUP_WEIGHTS = {
    "element-wise": 4.0, "element-wise with a second input": 2.0, "reduction": 2.0, "scan": 1.5, "normalisation": 3.0,
    "softmax": 2.0, "matmul": 3.0, "convolution": 3.0, "pooling": 2.0, "attention": 2.5, "layout": 1.5, "gather": 1.5,
    "quantise": 1.0, "cast": 0.3, "skip": 2.0, "loss": 0.7,
}  # fmt: skip
"""How often a group is drawn where it fits."""
_TRIES = 40
_AFTER_END = 2
"""Steps that may follow a reduction."""
_COST_SCALE = 16.0
_BYTES = 1 << 28
"""On a GPU: as many make a problem harder by `_BYTES_COST`, three times as many by twice that."""
_BYTES_COST = 0.25
_WORKLOADS_SHARE, _DTYPE_SHARE = 0.3, 0.15
_MOST_OTHERS = 2
_SLOW_ON_A_CPU = {"matmul", "convolution", "attention"}
"""In half precision: a processor without instructions for it takes tens of times longer."""


def draw(rng: random.Random, difficulty: tuple[float, float] = (0.0, 1.0)) -> ProblemDraft:
    """A draft whose cost lies about where `difficulty`, 0 … 1, says."""
    wanted = cost_of(rng.uniform(*difficulty))
    draft = ProblemDraft(rng, rng.choice(sorted(LAYOUTS)))
    spent, after = 0.0, 0
    while not draft.is_ended and after <= _AFTER_END and (not draft.steps or spent < wanted):
        operator = _follow(draft, rng, first=not draft.steps, room=max(1.0, wanted - spent))
        if operator is None:
            break
        spent += operator.cost
        after += draft.layout == VECTOR
    return draft


def _follow(draft: ProblemDraft, rng: random.Random, *, first: bool, room: float) -> DrawnOperator | None:
    """The next operator, written into the draft; None where none fits."""
    before = draft.steps[-1].operator if draft.steps else ""
    fitting = [
        one
        for one in OPERATORS.values()
        if draft.layout in one.layouts and (one.starts or not first) and one.name != before and one.cost <= room + 3.0
    ]
    weights = [GROUP_WEIGHTS[one.group] / _sizes()[one.group] for one in fitting]
    for _ in range(_TRIES if fitting else 0):
        one = rng.choices(fitting, weights)[0]
        taken = (dict(draft.arguments), list(draft.members), dict(draft.sizes))
        draft.take(one.name)
        try:
            one.write(draft)
        except Unfit:
            draft.arguments, draft.members, draft.sizes = taken
        else:
            return one
    return None


@functools.cache
def _sizes() -> Counter[str]:
    return Counter(one.group for one in OPERATORS.values())


def variation(draft: ProblemDraft, rng: random.Random) -> Variation:
    """Now and then several workloads, half precision, or both; whether it is sound with them is to be tried."""
    free = draft.free_names()
    others, weights, name = tuple[Size, ...](), tuple[int, ...](), ""
    if free and rng.random() < _WORKLOADS_SHARE:
        name = rng.choice(free)
        size = draft.sizes[name]
        below = smaller(size)
        chosen = sorted(rng.sample(below, min(len(below), rng.randint(1, _MOST_OTHERS))), reverse=True)
        ends = ("small",) if len(chosen) == 1 else ("medium", "small")
        others = tuple(
            Size(f"{end}_{name}", cpu, cpu * size.gpu // size.cpu) for end, cpu in zip(ends, chosen, strict=True)
        )
        weights = tuple(rng.choice((1, 1, 2, 4)) for _ in range(1 + len(others)))
    is_quick = not any(OPERATORS[step.operator].group in _SLOW_ON_A_CPU for step in draft.steps)
    dtype = rng.choice(("bfloat16", "float16")) if is_quick and rng.random() < _DTYPE_SHARE else ""
    return Variation(name, others, weights, dtype)


def difficulty_of(draft: ProblemDraft) -> float:
    """0 … 1 from the operators' costs, the longest chain that one kernel could fuse, and the bytes that eager operators
    write on a GPU.
    """
    cost = sum(OPERATORS[step.operator].cost for step in draft.steps) + 0.5 * _longest_chain(draft)
    cost += _BYTES_COST * math.log2(1.0 + 4 * draft.gpu_elements / _BYTES)
    return round(1.0 - math.exp(-cost / _COST_SCALE), 2)


def cost_of(difficulty: float) -> float:
    """About what cost gives this difficulty."""
    return -_COST_SCALE * math.log(1.0 - min(0.97, max(0.0, difficulty)))


def _longest_chain(draft: ProblemDraft) -> int:
    longest = run = 0
    for step in draft.steps:
        run = run + 1 if step.keeps_shape else 0
        longest = max(longest, run)
    return longest


def level_of(draft: ProblemDraft) -> int:
    """1: one operator; 2: a few to fuse; 3: more, or expensive ones."""
    cost = sum(OPERATORS[step.operator].cost for step in draft.steps)
    return 1 if len(draft.steps) == 1 else 2 if len(draft.steps) <= 5 and cost <= 18 else 3


def title_of(draft: ProblemDraft) -> str:
    return ", ".join(step.operator.replace("_", " ") for step in draft.steps).capitalize() + "."


def name_of(draft: ProblemDraft) -> str:
    return "_".join(step.operator for step in draft.steps)[:60].strip("_")
