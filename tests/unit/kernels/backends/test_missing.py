"""A host that lacks what a backend builds with says so, with the cure; nobody's candidate is to blame."""

from __future__ import annotations

import pytest

from kbrl_async.errors import MissingTool
from kbrl_async.kernels.backends.triton import build
from kbrl_async.kernels.funnel import Verifier
from kbrl_async.kernels.problems import find_problem
from protocols.records import Candidate

KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def softmax(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        softmax[(1,)](x, y, x.numel(), BLOCK=1024)
        return y
"""


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = build.importlib.util.find_spec
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with Verifier() as verifier, pytest.raises(MissingTool, match="pip install 'kbrl-async"):
        verifier.verify(find_problem("L1/13"), Candidate(KERNEL, "triton"))
