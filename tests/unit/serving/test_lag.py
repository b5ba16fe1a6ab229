"""The service's event loop is on time, whoever else wants its core, and says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from services.verification.lag import Lag
from tests.pages import ROOT

ASKED = """
import os, subprocess, sys, threading
from services.verification.lag import go_first

def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK

go_first()
seen = []
thread = threading.Thread(target=lambda: seen.append(policy()))
thread.start()
thread.join()
child = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], capture_output=True)
print(policy(), *seen, int(child.stdout))
"""


def test_the_loop_goes_first_and_what_it_starts_does_not() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    policy, *others = map(int, asked.stdout.split())
    assert others == [os.SCHED_OTHER] * 2
    if policy != os.SCHED_RR:
        pytest.skip("this host allows it to nobody but root")


def test_what_the_loop_computed_itself_is_told_apart_from_what_the_host_took() -> None:
    async def play() -> dict[str, float]:
        lag = Lag()
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0.03)
        time.sleep(0.1)  # as if others had the core
        await asyncio.sleep(0.03)
        watching.cancel()
        return lag.percentiles()

    found = asyncio.run(play())
    assert found["p99"] > 60
    assert found["own_p99"] < 40
    assert Lag().percentiles() == {}
