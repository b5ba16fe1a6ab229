"""Fixtures for tests that run the whole system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rewriting import rewrite
from tests.running import Run

with contextlib.suppress(ImportError):  # hosts with a GPU run their tests without it
    from hypothesis import HealthCheck, settings

    # Others may load the machine: how long an example takes says nothing about the code. A change is judged by the same
    # examples each time; `pytest --hypothesis-profile=anew` draws others.
    settings.register_profile("anew", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("patient", settings.get_profile("anew"), derandomize=True)
    settings.load_profile("patient")


def pytest_collection(session: pytest.Session) -> None:
    """Of a whole suite each worker rewrites the asserts of its share of files, and finds the others' in the cache: to
    rewrite all takes as long as the rest of collecting.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    rewrite(files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]], session.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first: one that begins last keeps one worker while the others have nothing left to take over."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny policy is kept: the first run makes it, the others find it, those of another worker too."""
    session = tmp_path_factory.getbasetemp()
    cache = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "policies"
    cache.mkdir(exist_ok=True)
    return cache


@pytest.fixture
def start_run(tmp_path: Path, policy_cache: Path) -> Iterator[Callable[..., Run]]:
    """`start_run("max_steps=3")` starts a tiny run; a second call goes on with the same folder."""
    started: list[Run] = []

    def start(*overrides: str) -> Run:
        run = Run(tmp_path, policy_cache, *overrides)
        started.append(run)
        return run

    yield start
    for run in started:
        run.close()
