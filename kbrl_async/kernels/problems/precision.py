"""A problem in another number format, as KernelBench's `precision` means it: module and floating-point inputs are cast.

The cast is a part of the problem's source, so everything that handles problems handles it; a candidate's parameters
take the format of the reference's when they take its weights.
"""

from __future__ import annotations

import re

import msgspec

from kbrl_async.errors import ProblemError
from protocols.records import Problem

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_SEVERAL = re.compile(r"^(WORKLOADS|FREE_SHAPES) =|^def get_input_groups\(", re.MULTILINE)

# The class is changed in place: `super(Model, self)` in a file means this very name.
CAST_MODEL = """

import torch as _torch


def _in_{dtype}(build):
    def __init__(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.to(_torch.{dtype})

    return __init__


Model.__init__ = _in_{dtype}(Model.__init__)
"""
CAST_INPUTS = '''_given_inputs = get_inputs


def get_inputs():
    """The same inputs in {dtype}."""
    cast = []
    for value in _given_inputs():
        is_real = isinstance(value, _torch.Tensor) and value.is_floating_point()
        cast.append(value.to(_torch.{dtype}) if is_real else value)
    return cast
'''


def in_precision(problem: Problem, precision: str) -> Problem:
    """`problem` itself for fp32, which is how problems are written.

    :raises ProblemError: no such format.
    """
    if precision not in DTYPES:
        raise ProblemError(f"unknown precision {precision!r}", f"Choose {', '.join(DTYPES)}")
    if precision == "fp32":
        return problem
    if _SEVERAL.search(problem.source):  # each is cast on its own
        return msgspec.structs.replace(problem, source=f'{problem.source.rstrip()}\n\nDTYPE = "{DTYPES[precision]}"\n')
    source = problem.source.rstrip() + (CAST_MODEL + CAST_INPUTS).format(dtype=DTYPES[precision])
    return msgspec.structs.replace(problem, source=source)
