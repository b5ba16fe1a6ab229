"""From secret draws to input sets: what a reference answers to each, and how far a candidate may be from that.

::

    draw ─vary─▶ inputs ─┬─▶ reference ─▶ expected, mutated?, aliases?       (the same inputs twice: random?)
                         ├─▶ reference in fp64 ─────────┐
                         └─moved─▶ reference ───────────┴─▶ tolerance

Sets of problems too large for that are not kept: they are made again whenever they are looked at (`known`).

A set that the reference does not take, answers with something that is not finite, or on which rounding errors decide,
is replaced by a milder one and at last by a nominal one: the number of sets never depends on the problem.
"""

from __future__ import annotations

import re

import torch

_NARROW = re.compile(r"\b(float16|bfloat16|half|float8\w*)\b")
_FP8 = tuple(kind for name in dir(torch) if name.startswith("float8_") and (kind := getattr(torch, name)).itemsize == 1)
_GROWTH, _DEGREE = 64.0, 4
_LOOSE, _MORE = 0.1, 8.0
