from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.building import ArtifactStore, Builder
from protocols.records import Candidate

_TEXT = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = {source!r}

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "f")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        {forward}
        return y
"""
GOOD = "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }"


def make(source: str = GOOD, forward: str = "pass", replace: tuple[str, str] = ("", "")) -> Candidate:
    return Candidate(_TEXT.format(source=source, forward=forward).replace(*replace), "c")


@pytest.fixture
def candidate() -> object:
    return make


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


@pytest.fixture(scope="session")
def warm_builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """One for all tests that need a confined Python: it takes seconds to start."""
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made
