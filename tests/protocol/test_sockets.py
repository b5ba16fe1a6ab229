"""Addresses that can't be used are refused with cause and cure; sockets fail loudly instead of losing messages."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kbrl_async.errors import HostError
from protocols.sockets import (
    CONNECT_MS,
    HANDSHAKE_MS,
    AddressError,
    BoundRouter,
    ClientKeys,
    ServerKeys,
    Socket,
    connect_dealer,
)
from services.runtime.addresses import addresses


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def test_a_second_bind_on_a_path_names_the_owner_and_the_cure(context: zmq.Context[Socket], tmp_path: Path) -> None:
    first = BoundRouter(context, f"ipc://{tmp_path}/s")
    with pytest.raises(AddressError, match=f"held by process {os.getpid()}. Stop that broker"):
        BoundRouter(context, f"ipc://{tmp_path}/s")
    first.close()


def test_a_path_is_free_again_after_its_owner_has_closed(context: zmq.Context[Socket], tmp_path: Path) -> None:
    BoundRouter(context, f"ipc://{tmp_path}/s").close()
    BoundRouter(context, f"ipc://{tmp_path}/s").close()


def test_the_socket_file_is_the_users_alone(context: zmq.Context[Socket], tmp_path: Path) -> None:
    router = BoundRouter(context, f"ipc://{tmp_path}/s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    router.close()


def test_a_path_that_is_too_long_is_refused(context: zmq.Context[Socket]) -> None:
    with pytest.raises(AddressError, match=r"has 108 bytes.*shorter run directory"):
        BoundRouter(context, "ipc://" + "/x" * 54)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:0", "tcp://[::]:0", "tcp://host:0"]
)
def test_other_hosts_are_not_let_in_without_keys(context: zmq.Context[Socket], address: str) -> None:
    with pytest.raises(
        AddressError, match=r"open to other hosts, and there are no keys. Make them with 'kbrl keys new'"
    ):
        BoundRouter(context, address)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://192.0.2.1:1", "tcp://host:1"])
def test_nothing_is_said_to_another_host_without_keys(context: zmq.Context[Socket], address: str) -> None:
    with pytest.raises(AddressError, match=r"there are no keys for it. Make them with 'kbrl keys new'"):
        connect_dealer(context, address, b"route")


def test_with_keys_a_socket_is_open_to_other_hosts(context: zmq.Context[Socket]) -> None:
    router = BoundRouter(context, "tcp://0.0.0.0:*", keys=ServerKeys(*zmq.curve_keypair()))
    assert router.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    router.close()


def test_a_keyed_socket_without_its_zap_handler_lets_nobody_in(context: zmq.Context[Socket]) -> None:
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    router = BoundRouter(context, "tcp://127.0.0.1:*", keys=ServerKeys(*server))
    endpoint = router.socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    address = endpoint.rstrip(b"\0").decode()
    dealer = connect_dealer(context, address, b"route", ClientKeys(*client, server[0]))
    dealer.send(b"hello")
    assert not router.socket.poll(300)
    dealer.close()
    router.close()


def test_a_peer_that_dies_on_a_full_queue_does_not_take_the_broker_along(tmp_path: Path) -> None:
    """libzmq's own heartbeat would abort the process here, so this runs in another one."""
    code = (
        "import time, zmq\nfrom protocols.sockets import BoundRouter, connect_dealer, HIGH_WATER_MARK\n"
        "ours, theirs = zmq.Context(), zmq.Context()\n"
        "router = BoundRouter(ours, 'tcp://127.0.0.1:*')\n"
        "address = router.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b'\\0').decode()\n"
        "dealer = connect_dealer(theirs, address, b'route')\ndealer.setsockopt(zmq.SNDTIMEO, 300)\n"
        "try:\n    while True:\n        dealer.send(b'x' * 2000)\nexcept zmq.Again:\n    pass\n"
        "dealer.close(0)\ntheirs.term()\ntime.sleep(1.5)\nrouter.close()\nours.term()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_secrets_are_not_shown() -> None:
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    shown = repr([ServerKeys(*server), ClientKeys(*client, server[0])])
    assert server[1].decode() not in shown
    assert client[1].decode() not in shown


def test_a_taken_port_is_refused(context: zmq.Context[Socket]) -> None:
    first = BoundRouter(context, "tcp://127.0.0.1:*")
    taken = first.socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(taken, bytes)
    with pytest.raises(AddressError, match="in use"):
        BoundRouter(context, taken.rstrip(b"\0").decode())
    first.close()


@pytest.mark.parametrize("address", ["", "nonsense", "udp://127.0.0.1:1", "tcp://"])
def test_what_is_no_address_is_refused(context: zmq.Context[Socket], address: str) -> None:
    with pytest.raises(AddressError, match="is no address"):
        BoundRouter(context, address)


def test_a_router_does_not_drop_what_nobody_can_get(context: zmq.Context[Socket], tmp_path: Path) -> None:
    router = BoundRouter(context, f"ipc://{tmp_path}/s")
    with pytest.raises(zmq.ZMQError) as caught:
        router.socket.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH
    router.close()


def test_a_worker_that_reconnects_takes_its_route_over(context: zmq.Context[Socket], tmp_path: Path) -> None:
    router = BoundRouter(context, f"ipc://{tmp_path}/s")
    old = connect_dealer(context, router.address, b"route")
    old.send(b"old")
    router.socket.recv_multipart()
    new = connect_dealer(context, router.address, b"route")
    new.send(b"new")
    router.socket.recv_multipart()
    router.socket.send_multipart([b"route", b"hi"])
    assert new.poll(30_000)
    for socket in (old, new):
        socket.close()
    router.close()


def test_a_run_directory_that_is_too_deep_gets_a_private_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    found = addresses(tmp_path / ("deep" * 40))
    folder = Path(found.submit.removeprefix("ipc://")).parent
    assert folder.parent == tmp_path / f"kbrl-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir(mode=0o777)
    (tmp_path / "sockets").chmod(0o777)
    with pytest.raises(HostError, match="open to others"):
        addresses(tmp_path)


def test_all_processes_of_a_run_compute_the_same_addresses(tmp_path: Path) -> None:
    assert addresses(tmp_path) == addresses(str(tmp_path))


def test_a_connection_that_does_not_come_about_is_tried_afresh(context: zmq.Context[Socket]) -> None:
    """The kernel's own tries are half a minute apart after a partition of one."""
    socket = connect_dealer(context, "tcp://127.0.0.1:9", b"r")
    assert socket.getsockopt(zmq.CONNECT_TIMEOUT) == CONNECT_MS
    assert socket.getsockopt(zmq.HANDSHAKE_IVL) == HANDSHAKE_MS
    socket.close()
