"""`kbrl serve` as its users have it: real verdicts over TCP, and nothing lost over kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("starlette", reason="the extra kbrl-async[serve] is not installed")

from tests.e2e.test_docs import SOFTMAX
from tests.pages import ROOT

pytestmark = pytest.mark.timeout(600)
WRONG = SOFTMAX.replace("b[i] /= sum", "b[i] = sum")


class Service:
    """`kbrl serve` in a folder; killed with all of its processes at the end."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = folder / "said"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment.pop("KBRL_RUN_DIR", None)
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kbrl_async", "serve", "--port", "0", *words],
                cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.client = httpx.Client(base_url=self._address(), timeout=300)

    def _address(self) -> str:
        until = time.monotonic() + 240
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(r"ready at (http://\S+)", self._log.read_text(errors="replace")):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(self._log.read_text(errors="replace")[-2000:])

    def ask(self, **more: object) -> httpx.Response:
        return self.client.post("/v1/verify", json={"candidate": SOFTMAX, "problem": "L1/13", **more})

    def kill(self) -> None:
        """As a power cut: nobody is told."""
        everyone = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    running: list[Service] = []

    def start(*words: str) -> Service:
        running.append(Service(tmp_path, *words))
        return running[-1]

    yield start
    for service in running:
        if service.process.poll() is None:
            service.kill()


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("--broker", "timing_bench.cap_s=0.05")], ids=["alone", "over a broker"])
def test_verdicts_are_real_and_survive_kill_9(started: Any, words: tuple[str, ...]) -> None:
    service = started(*words)
    right = as_expected(service.ask().json(), "ok")
    as_expected(service.ask(candidate=WRONG).json(), "incorrect")
    untimed = as_expected(service.ask(timing=False).json(), "ok")
    proven, lo = right["verdict"]["verdict"]["passed"], right["verdict"]["timing"]["lo"]
    assert (proven > 0, lo > 0, right["reward"] >= 0.65) == (True, True, True), json.dumps(right)
    assert untimed["verdict"]["timing"] is None, json.dumps(untimed)
    queued = [service.ask(candidate=SOFTMAX + f"\n# {n}\n", wait_s=0).json()["id"] for n in range(3)]
    service.kill()

    again = started(*words)
    assert again.ask().json()["finished_at"] == right["finished_at"]  # known, not done again
    for job in queued:
        as_expected(wait_for(again, job), "ok")


def as_expected(answer: dict[str, Any], fault: str) -> dict[str, Any]:
    """The message holds all of an answer that is another one: what a loaded host does may not come again for weeks."""
    is_right = fault == "ok"
    found = answer["ok"], answer["fault"], answer["fault_owner"] == "candidate", answer["reward"] >= 0.5
    assert found == (is_right, fault, not is_right, is_right), json.dumps(answer)
    return answer


def wait_for(service: Service, job: str) -> dict[str, Any]:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        found: dict[str, Any] = service.client.get(f"/v1/jobs/{job}").json()
        if found["status"] in ("done", "failed"):
            return found
        time.sleep(0.2)
    raise AssertionError(found)


def test_it_stops_in_order_and_says_who_has_the_port(started: Any, tmp_path: Path) -> None:
    service = started("--no-timing")
    port = str(httpx.URL(service.client.base_url).port)
    there = {connection.laddr.ip for connection in psutil.net_connections("tcp") if str(connection.laddr.port) == port}
    assert there == {"127.0.0.1"}
    words = [sys.executable, "-m", "kbrl_async", "serve", "--port", port, "--folder", str(tmp_path / "other")]
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH":
                            os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}, check=False)  # fmt: skip
    assert second.returncode == 3
    assert f"127.0.0.1:{port} can't be had" in second.stdout + second.stderr
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(120) == 0
