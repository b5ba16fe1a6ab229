"""Hosts with real addresses and a cable that has a delay, loses packets, and can be cut: network namespaces and TUN.

::

    our namespace                      router, a process                    the host's namespace
    tun 10.A.B.1 ◀── the kernel's own TCP ──▶ [ lost? ─ heap by due time ] ◀──▶ tun 10.A.B.2

Each end of a link is a TUN device; the router reads IP packets from one, drops some, holds the others back and writes
them to the other. So TCP's retransmissions, windows and timeouts are the kernel's, as on a real line, and no netem is
needed: only the right to make namespaces (root) and `/dev/net/tun`.

Invariants
* What is dropped is drawn from a generator with a seed, one per direction: the n-th packet of it is lost in every run.
* Packets of one direction keep their order, jitter or not, and at most `QUEUE` of them wait; one more is lost.
* The router ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 1500
QUEUE = 20_000
_BATCH = 64


class Weather(NamedTuple):
    """What a packet meets on its way, in either direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more, drawn for each packet."""
    loss: float = 0.0
    cut: bool = False


class Pipe:
    """One direction, as a pure machine: `offer` a packet, take what is `due`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._waiting: list[tuple[float, int, bytes]] = []
        self._last_due = 0.0
        self.weather = Weather()
        self.carried = self.lost = self.bytes = 0

    def offer(self, packet: bytes, now: float) -> None:
        weather, luck, slowness = self.weather, self._rng.random(), self._rng.random()
        if weather.cut or luck < weather.loss or len(self._waiting) >= QUEUE:
            self.lost += 1
            return
        self.carried += 1
        self.bytes += len(packet)
        self._last_due = max(self._last_due, now + weather.delay_s + slowness * weather.jitter_s)
        heapq.heappush(self._waiting, (self._last_due, self.carried, packet))

    def due(self, now: float) -> list[bytes]:
        out: list[bytes] = []
        while self._waiting and self._waiting[0][0] <= now:
            out.append(heapq.heappop(self._waiting)[2])
        return out

    def next_at(self) -> float:
        return self._waiting[0][0] if self._waiting else float("inf")

    def change(self, weather: Weather) -> None:
        """What is on its way when a cable is cut is gone too."""
        if weather.cut:
            self.lost += len(self._waiting)
            self._waiting.clear()
        self.weather = weather


# ── the router's process ──────────────────────────────────────────────────────────────────────────────────────────


def _open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return fd


def _pump(fd: int, pipe: Pipe) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(fd, _MTU + 64)
        except OSError:  # nothing more, or the device is down for now
            return
        pipe.offer(packet, time.monotonic())


def _deliver(pipe: Pipe, fd: int) -> None:
    for packet in pipe.due(time.monotonic()):
        with contextlib.suppress(OSError):  # a full or absent device loses it, as a cable would
            os.write(fd, packet)


def _obey(pipes: Sequence[Pipe]) -> bool:
    """One command from our owner; False at its end."""
    line = sys.stdin.readline()
    if not line:
        return False
    if (weather := json.loads(line)) is not None:
        for pipe in pipes:
            pipe.change(Weather(*weather))
    print(json.dumps([[pipe.carried, pipe.lost, pipe.bytes] for pipe in pipes]), flush=True)
    return True


def route(near: str, far: str, seed: int) -> None:
    fds = (_open_tun(near), _open_tun(far))
    pipes = (Pipe(2 * seed), Pipe(2 * seed + 1))
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    print("ready", flush=True)
    if not _obey(pipes):  # the devices are read only once they are where they belong
        return
    for fd in fds:
        selector.register(fd, selectors.EVENT_READ)
    while True:
        wait_s = min(pipe.next_at() for pipe in pipes) - time.monotonic()
        for key, _ in selector.select(max(0.0, min(wait_s, 1.0))):
            if key.fd == 0 and not _obey(pipes):
                return
            if key.fd in fds:
                _pump(key.fd, pipes[fds.index(key.fd)])
        _deliver(pipes[0], fds[1])
        _deliver(pipes[1], fds[0])


# ── for tests and benchmarks ──────────────────────────────────────────────────────────────────────────────────────


class LinkError(Exception):
    """This host or user can't make namespaces and links."""


def ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
    except FileNotFoundError:
        raise LinkError("the tool 'ip' is not installed") from None
    except subprocess.CalledProcessError as error:
        raise LinkError(f"ip {' '.join(words)}: {error.stderr.decode().strip()}") from None


class Link:
    """A cable between this namespace (`.1`) and another (`.2`)."""

    def __init__(self, namespace: str, number: int, seed: int = 0) -> None:
        self.near, self.far = f"kb{os.getpid() % 100_000}n{number}", f"kb{os.getpid() % 100_000}f{number}"
        net = f"10.{200 + os.getpid() % 50}.{100 + number}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        self.weather = Weather()
        self._namespace, self._seed = namespace, seed
        self._router: subprocess.Popen[str] | None = None

    def open(self) -> None:
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise LinkError("there is no /dev/net/tun that this user may open")
        command = [sys.executable, __file__, self.near, self.far, str(self._seed)]
        self._router = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._router.stdout is not None
        if self._router.stdout.readline() != "ready\n":
            raise LinkError("TUN devices can't be made here")
        ip("link", "set", self.far, "netns", self._namespace)
        for where, device, own, other in (((), self.near, self.here, self.there), *self._far()):
            ip(*where, "addr", "add", own, "peer", other, "dev", device)
            ip(*where, "link", "set", device, "mtu", str(_MTU), "txqueuelen", "5000", "up")
        self.change()

    def _far(self) -> tuple[tuple[tuple[str, ...], str, str, str]]:
        return ((("-n", self._namespace), self.far, self.there, self.here),)

    def change(self, *, delay_s: float | None = None, jitter_s: float | None = None, loss: float | None = None) -> None:
        """From now on; what is not named stays as it is."""
        now = self.weather
        self._tell(
            Weather(
                now.delay_s if delay_s is None else delay_s,
                now.jitter_s if jitter_s is None else jitter_s,
                now.loss if loss is None else loss,
                now.cut,
            )
        )

    def partition(self) -> None:
        """Cut the cable: nothing arrives, nobody is told."""
        self._tell(self.weather._replace(cut=True))

    def heal(self) -> None:
        self._tell(self.weather._replace(cut=False))

    def counts(self) -> dict[str, list[int]]:
        """Packets and bytes, towards the host and back."""
        out, back = self._ask(None)
        return {name: [out[place], back[place]] for place, name in enumerate(("carried", "lost", "bytes"))}

    def _tell(self, weather: Weather) -> None:
        self.weather = weather
        self._ask(weather)

    def _ask(self, question: Weather | None) -> list[list[int]]:
        assert self._router is not None
        assert self._router.stdin is not None
        assert self._router.stdout is not None
        self._router.stdin.write(json.dumps(question) + "\n")
        self._router.stdin.flush()
        answer: list[list[int]] = json.loads(self._router.stdout.readline())
        return answer

    def close(self) -> None:
        """The devices go with their router."""
        if self._router is not None:
            self._router.communicate(timeout=120)


class Host:
    """A namespace with one link to us. `number` makes its names and addresses."""

    def __init__(self, number: int, seed: int = 0) -> None:
        self.name = f"kbrl-{os.getpid()}-{number}"
        self.link = Link(self.name, number, seed)
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> Host:
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        self.link.open()
        return self

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command there, in a session of its own."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(output.open("ab")) if output else None
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=dict(os.environ if environment is None else environment),
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        self.link.close()
        with contextlib.suppress(LinkError):
            ip("netns", "del", self.name)


if __name__ == "__main__":
    route(sys.argv[1], sys.argv[2], int(sys.argv[3]))
