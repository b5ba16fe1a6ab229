"""Fixtures for tests that run the whole system."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.rewriting import rewrite
from tests.running import Run, RunFolder, made_once

T = TypeVar("T")

with contextlib.suppress(ImportError):  # hosts with a GPU run their tests without it
    from hypothesis import HealthCheck, settings

    # Others may load the machine: how long an example takes says nothing about the code. A change is judged by the same
    # examples each time; `pytest --hypothesis-profile=anew` draws others.
    settings.register_profile("anew", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("patient", settings.get_profile("anew"), derandomize=True)
    settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected lasts, as torch does. Python's search for garbage would go through it again and again: a tenth
    of the time of collecting, and some of each test's.
    """
    _rewrite_share(session)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _rewrite_share(session: pytest.Session) -> None:
    """Of a whole suite each worker rewrites the asserts of its share of files, and finds the others' in the cache: to
    rewrite all takes as long as the rest of collecting.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    rewrite(files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]], session.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long ones first: one that begins last keeps one worker while the others have nothing left to take over."""
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = spread(long, [item for item in items if not item.get_closest_marker("long")], workers)


def spread(long: list[T], short: list[T], workers: int) -> list[T]:
    """In shares that follow each other, as xdist deals them out. Every second one begins with long ones: one worker
    with all of them took as long as the whole suite, and more than two at a time are more than two cores' work.

    >>> spread(["A", "B", "C"], ["a", "b", "c", "d", "e"], 4)
    ['A', 'C', 'a', 'b', 'B', 'c', 'd', 'e']
    """
    found: list[T] = []
    for worker in range(workers):
        size = (len(long) + len(short) - len(found)) // (workers - worker)
        mine = long[worker // 2 :: (workers + 1) // 2] if worker % 2 == 0 else []
        count = max(0, size - len(mine))
        found += mine
        found += short[:count]
        short = short[count:]
    return found + short


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what takes long to make: all workers find it."""
    session = tmp_path_factory.getbasetemp()
    return session.parent if "PYTEST_XDIST_WORKER" in os.environ else session


@pytest.fixture(scope="session")
def interrupted_run(shared: Path) -> RunFolder:
    """A run that made the tiny policy, was stopped after its first update, and went on to its end when it was started
    again. `policies` beside it is the cache that it began with nothing in."""

    def make(folder: Path) -> None:
        run = Run(folder, folder / "policies", "max_steps=3")
        try:
            run.until(lambda: run.updates() >= 1)
            os.killpg(run.process.pid, signal.SIGINT)
            assert run.wait() == 130, run.tail()
            assert not (run.path / "summary.json").exists()
        finally:
            run.close()
        again = Run(folder, folder / "policies", "max_steps=3")
        try:
            assert again.wait() == 0, again.tail()
        finally:
            again.close()

    return RunFolder(made_once(shared / "interrupted", make))


@pytest.fixture(scope="session")
def policy_cache(interrupted_run: RunFolder) -> Path:
    """Where the tiny policy is kept. Made by each of several runs at once, it took a minute of a core each time."""
    return interrupted_run.path.parent.parent / "policies"


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
