from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate
from tests.candidates import in_c

GOOD = "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }"


def make(source: str = GOOD, forward: str = "pass", replace: tuple[str, str] = ("", "")) -> Candidate:
    return Candidate(in_c(source, forward).replace(*replace), "c")


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
