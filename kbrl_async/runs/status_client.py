"""Asking a broker how the system stands, from the same host or another one."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import zmq

from kbrl_async.errors import UserError
from kbrl_async.keyring import Keyring
from kbrl_async.runs.config import endpoints
from kbrl_async.runs.folder import load_run
from protocols import framing
from protocols.auth import Role
from protocols.messages import StatusReport, StatusRequest
from protocols.sockets import AddressError, ClientKeys, Socket, connect_dealer


def of_run(run_dir: Path) -> tuple[str, ClientKeys | None]:
    """Where the broker of a run on this host answers viewers, and the keys for it, if it needs any.

    :raises ConfigError: no run folder.
    :raises UserError: the run's keys have none for viewers.
    """
    config = load_run(run_dir)
    address = endpoints(config, run_dir).status
    is_keyed = bool(config.broker.keys) and not address.startswith("ipc://")
    return address, Keyring(config.broker.keys or "").local(Role.OBSERVER) if is_keyed else None


class StatusClient:
    """Use as `with StatusClient(address) as client: client.ask(1.0)`. It can ask, and nothing else.

    Each request that got no answer takes its socket with it: nothing piles up for a broker that is away, and the
    next one begins with a fresh connection.
    """

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        """`keys`: of the role `observer`, where other hosts can reach `address`."""
        self._address = address
        self._keys = keys
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket: Socket | None = None
        try:
            self._socket = self._open()
        except AddressError as error:
            self._context.term()
            raise UserError(error.cause, error.cure) from None

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        self._context.term()

    def _open(self) -> Socket:
        return connect_dealer(self._context, self._address, secrets.token_hex(8).encode(), self._keys)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def ask(self, timeout_s: float) -> StatusReport | None:
        """The broker's report, or None where it does not answer in time."""
        self._socket = self._socket or self._open()
        token = secrets.token_hex(8)
        with contextlib.suppress(zmq.Again):  # refused at the handshake, it has no connection that it could wait for
            self._socket.send_multipart(framing.encode(StatusRequest(token)), zmq.DONTWAIT)
        while self._socket.poll(int(timeout_s * 1000)):
            report = _report(self._socket.recv_multipart())
            if report is not None and report.token == token:
                return report
        self._drop()
        return None


def _report(frames: list[bytes]) -> StatusReport | None:
    try:
        message, _ = framing.decode(frames)
    except framing.FrameError:
        return None
    return message if isinstance(message, StatusReport) else None
