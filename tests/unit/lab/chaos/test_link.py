"""The proxy before the broker: what passes, what comes late, what is held back and whom it is held back from."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.lab.chaos.link import Link

PATIENCE_S = 30.0


class Echo:
    """A server that says everything back; `accepted` counts its connections."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Path, dict[int, str]]]:
    names = {os.getpid(): "learner.1"}
    echo = Echo(tmp_path / "work.behind")
    yield tmp_path / "work", tmp_path / "work.behind", names
    echo.socket.close()


def connected(front: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(PATIENCE_S)
    peer.connect(str(front))
    return peer


def say(peer: socket.socket, word: bytes) -> float:
    """Seconds until it came back."""
    began = time.monotonic()
    peer.sendall(word)
    heard = b""
    while len(heard) < len(word):
        heard += peer.recv(1 << 16)
    assert heard == word
    return time.monotonic() - began


def test_what_is_said_passes_unchanged_both_ways(place: tuple[Path, Path, dict[int, str]]) -> None:
    front, behind, names = place
    with Link([(front, behind)], names.__getitem__), connected(front) as peer:
        say(peer, os.urandom(300_000))
    assert not front.exists(), "it leaves no socket behind"


def test_a_slow_link_delays_each_way_and_only_its_target(place: tuple[Path, Path, dict[int, str]]) -> None:
    front, behind, names = place
    with Link([(front, behind)], names.__getitem__) as link, connected(front) as peer:
        link.delay("learner", 0.2)
        assert say(peer, b"slow") >= 0.4
        link.quicken("learner")
        link.delay("sampler", 60.0)
        say(peer, b"not meant for us")


@pytest.mark.parametrize("target", ["learner", "learner.1"])
def test_what_is_cut_off_hears_nothing_until_it_is_healed_and_then_everything(
    place: tuple[Path, Path, dict[int, str]], target: str
) -> None:
    front, behind, names = place
    with Link([(front, behind)], names.__getitem__) as link, connected(front) as peer:
        say(peer, b"before")
        link.cut(target)
        peer.settimeout(0.3)
        peer.sendall(b"meanwhile")
        with pytest.raises(TimeoutError):
            peer.recv(100)
        link.heal(target)
        peer.settimeout(PATIENCE_S)
        assert peer.recv(100) == b"meanwhile"


def test_others_talk_on_while_one_is_cut_off(place: tuple[Path, Path, dict[int, str]]) -> None:
    front, behind, names = place
    with Link([(front, behind)], names.__getitem__) as link, connected(front) as peer:
        link.cut("sampler")
        say(peer, b"I am the learner")


def test_a_connection_to_a_broker_that_is_away_ends_at_once(tmp_path: Path) -> None:
    front = tmp_path / "work"
    with Link([(front, tmp_path / "nobody")], lambda _pid: ""), connected(front) as peer:
        assert peer.recv(100) == b""


def test_the_end_of_one_side_reaches_the_other(place: tuple[Path, Path, dict[int, str]]) -> None:
    front, behind, names = place
    with Link([(front, behind)], names.__getitem__), connected(front) as peer:
        say(peer, b"hello")
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b""
