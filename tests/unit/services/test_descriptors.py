"""The broker takes as many descriptors as it may have."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from services.broker.descriptors import raise_descriptor_limit


@pytest.fixture
def few() -> Iterator[int]:
    """A soft limit of 512, as long as the test runs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield 512
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_raised_as_far_as_asked_and_allowed(few: int) -> None:
    assert raise_descriptor_limit(few + 100) == few + 100
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + 100


def test_the_limit_is_never_lowered(few: int) -> None:
    assert raise_descriptor_limit(100) == few
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few
