"""Kernels whose true speedup is known: a reference against itself (1), and against itself with more of the same work.

A slower candidate repeats one small operation on data that stays in the cache `BASE + more` times instead of `BASE`
times; every repetition costs the same, so the truth is known by construction, without timing anything.
"""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.backends.backend import LIBRARY
from protocols.records import Candidate, Problem

BASE = 200
SLOWER = {"0.5 %": 201, "1 %": 202, "2 %": 204, "5 %": 210, "20 %": 240}
"""Repetitions, by how much slower they are."""

_BODY = """
import torch
import torch.nn as nn


class NAME(nn.Module):
    def forward(self, x):
        BODY


def get_inputs():
    return [torch.randn(SHAPE, dtype=torch.DTYPE)]


def get_init_inputs():
    return []
"""


class Case(msgspec.Struct, frozen=True):
    name: str
    body: str
    shape: str
    dtype: str = "float32"

    def source(self, entry: str, body: str = "") -> str:
        text = _BODY.replace("NAME", entry).replace("SHAPE", self.shape).replace("DTYPE", self.dtype)
        return text.replace("BODY", body or self.body)

    @property
    def problem(self) -> Problem:
        return Problem(f"L0/{self.name}", 0, self.name, self.source("Model"))

    @property
    def itself(self) -> Candidate:
        return Candidate(self.source("ModelNew"), LIBRARY.name)


CPU_CASES = (
    Case("add 1k", "return x + 1", "1024"),
    Case("softmax 128x512", "return torch.softmax(x, dim=-1)", "128, 512"),
    Case("gelu 256x1024", "return torch.nn.functional.gelu(x)", "256, 1024"),
    Case("add 4 MB", "return x + 1", "1024, 1024"),
    Case("matmul 512", "return x @ x", "512, 512"),
)
"""25 µs to 5 ms on one core."""
GPU_CASES = (
    Case("add 1k", "return x + 1", "1024"),
    Case("add 1M", "return x + 1", "1048576"),
    Case("matmul 2048 bf16", "return x @ x", "2048, 2048", "bfloat16"),
    Case("add 16M", "return x + 1", "16777216"),
    Case("softmax 4096x4096", "return torch.softmax(x, dim=-1)", "4096, 4096"),
    Case("gelu 64M", "return torch.nn.functional.gelu(x)", "8192, 8192"),
    Case("matmul 8192 bf16", "return x @ x", "8192, 8192", "bfloat16"),
)
"""4 µs to 2 ms on an H100."""

_REPEAT = "y = torch.tanh(x)\n        for _ in range(TIMES - 1):\n            torch.tanh(x, out=y)\n        return y"


def cases(device: str) -> tuple[Case, ...]:
    return GPU_CASES if device.startswith("cuda") else CPU_CASES


def slower_case(device: str) -> Case:
    """The reference of the A/B table: some 2 ms on a core, 1 ms on a GPU."""
    shape = "512, 1024" if device.startswith("cuda") else "64, 128"
    return Case(f"{BASE} × tanh", _REPEAT.replace("TIMES", str(BASE)), shape)


def slower_candidate(case: Case, times: int) -> tuple[Candidate, float]:
    """`times` repetitions instead of `BASE`, and its true speedup."""
    return Candidate(case.source("ModelNew", _REPEAT.replace("TIMES", str(times))), LIBRARY.name), BASE / times
