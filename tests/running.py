"""A whole run as a subprocess, small enough for a test: start it, watch it, kill its processes, read its summary."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.__main__ import check

REPOSITORY = Path(__file__).parent.parent
TINY = (
    "level=1",
    "batch_size=2",
    "group_size=4",
    "eval_samples=1",
    "max_minutes=10",
    "sft.examples=4000",
    "sft.max_seconds=1200",
    "sft.steps=300",
    "sft.batch_tokens=1024",
    "sft.lr=0.004",
    "sft.hidden_size=96",
    "sft.layers=2",
    "log_level=debug",
)
"""Half a minute of SFT, or ten on a host that others load: one that is cut would be made again by each run. A policy
whose kernels compile now and then, so that every stage has work."""
PATIENCE_S = 1500.0
"""What a run of a minute has on the slowest machine: for what hangs, not for what is slow."""
SERVICES = ("compile_farm", "timing_bench", "sampler", "reward_aggregator", "learner", "broker")


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by the first of several workers that want it; the others wait. A try that failed is made again."""
    whole = folder / "WHOLE"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


class RunFolder:
    """What a run has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "runs" / "default"

    def log(self, process: str) -> list[dict[str, Any]]:
        """The JSON lines of a process's log."""
        path = self.path / "logs" / f"{process}.1.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may still be written

    def updates(self) -> int:
        return sum(line["event"] == "update" for line in self.log("reward_aggregator"))

    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return loaded


class Run(RunFolder):
    """`kbrl train` with its output in a file; killed, with all its processes, when the test ends."""

    def __init__(
        self, folder: Path, cache: Path, *overrides: str, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder)
        self.output = folder / "output.txt"
        command = [sys.executable, "-m", "kbrl_async", "train", f"log_path={folder / 'runs'}", f"cache_path={cache}"]
        kept = ("KBRL_WEDGED_S",)
        shell = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(("KBRL_", "HONCHO_"))}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *TINY, *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**shell, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
                start_new_session=True,
            )

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {PATIENCE_S} s:\n{self.tail()}") from None

    def until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_true():
            assert self.process.poll() is None, f"the run ended too early:\n{self.tail()}"
            assert time.monotonic() < deadline, f"waited {PATIENCE_S} s in vain:\n{self.tail()}"
            time.sleep(0.1)

    def children(self, service: str) -> list[int]:
        """The working processes of a service, its nannies left out."""
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in processes if self._is_child(entry, service)]

    def _is_child(self, entry: Path, service: str) -> bool:
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return False
        ours = f"KBRL_RUN_DIR={self.path.resolve()}".encode() in variables
        child = any(word.startswith(b"KBRL_NANNY_PID=") for word in variables)
        return ours and child and f"services.{service}".encode() in words

    def kill(self, service: str) -> None:
        """`kill -9` of a service's working process."""
        self.until(lambda: bool(self.children(service)))
        for pid in self.children(service):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(120)


def assert_counters_add_up(summary: dict[str, Any]) -> None:
    """I1: every admitted group has exactly one end."""
    ends = ("groups_trained", "groups_filtered", "groups_dropped_stale", "groups_failed")
    assert summary["groups_admitted"] == sum(summary[name] for name in ends), summary


def assert_figures_are_true(run: RunFolder) -> None:
    """All that the run printed follows from its archive, by other formulas, and its funnel adds up. `wall_s` is left to
    tests of given clocks: here two processes read theirs, and a busy host may stop one of them in between.
    """
    assert set(check(run.path)["different"]) <= {"wall_s"}
    steps = list(run.summary()["funnel"].values())
    for before, after in itertools.pairwise(steps):
        assert after["entered"] == before["passed"], steps


def assert_replays(run: Run) -> None:
    """Journal and archive are complete: every decision and every update can be made again, to the last bit."""
    command = [sys.executable, "-m", "kbrl_async", "replay", str(run.path), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "KBRL_LOG_PATH": str(run.path.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["divergence"] is None
    assert report["unrecorded"] == 0
    assert report["curve"]["exact"] == report["curve"]["updates"] == run.summary()["updates"]
