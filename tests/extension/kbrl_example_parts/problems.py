"""A source of problems: `problems=kbrl_example_parts.problems:chains`."""

from __future__ import annotations

import itertools

from kbrl_async.kernels.problems import parse_problem
from protocols.records import Problem

SOURCE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = torch.{first}(x)
        x = torch.{second}(x)
        return x


def get_inputs():
    return [torch.randn({rows}, 512)]


def get_init_inputs():
    return []
"""
OPERATORS = ("sigmoid", "tanh", "relu")


def chains(shapes: str) -> list[Problem]:
    """Two elementwise operators after each other. `shapes` is `cpu` or `gpu`: which of two sizes fits the device."""
    rows = 4096 if shapes == "gpu" else 64
    return [
        parse_problem(SOURCE.format(first=first, second=second, rows=rows), f"L1/{first}_{second}", level=1)
        for first, second in itertools.permutations(OPERATORS, 2)
    ]
