"""The one place where sockets are made, bound and connected: options apply to later binds only, so all are set here.

* `ROUTER` refuses to send to nobody (`EHOSTUNREACH`) and lets a peer that reconnects take its route over.
* An `ipc://` path is locked first: a second bind would silently steal it.
* `tcp://` is bound to loopback addresses only unless the caller allows more: nothing is encrypted or authenticated yet.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
from typing import IO

import zmq

MAX_IPC_PATH_BYTES = 107
MAX_MESSAGE_BYTES = 1 << 30
HIGH_WATER_MARK = 10_000
LINGER_MS = 250
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000

Socket = zmq.Socket[bytes]


class AddressError(ValueError):
    """An address can't be used; `cause` says why and `cure` what to do."""

    def __init__(self, cause: str, cure: str) -> None:
        self.cause = cause
        self.cure = cure
        super().__init__(f"{cause}. {cure}")


class BoundRouter:
    """A bound ROUTER together with the lock on its address; close it to release both."""

    def __init__(self, context: zmq.Context[Socket], address: str, *, allow_remote: bool = False) -> None:
        self.address = address
        self._lock = _lock_path(_ipc_path(address)) if address.startswith("ipc://") else None
        if self._lock is None:
            _check_tcp(address, allow_remote)
        self.socket = _make(context, zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(f"can't bind {address}: {error.strerror}", "Stop its owner or take another") from None
        if self._lock is not None:
            os.chmod(_ipc_path(address), 0o600)

    def close(self) -> None:
        self.socket.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def connect_dealer(context: zmq.Context[Socket], address: str, route: bytes) -> Socket:
    """A DEALER on its way to `address`; `route` is random and belongs to one incarnation of one process."""
    if address.startswith("ipc://"):
        _ipc_path(address)
    socket = _make(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, route)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise AddressError(f"can't connect to {address}: {error.strerror}", "Correct the address") from None
    return socket


def _make(context: zmq.Context[Socket], kind: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    return socket


def _ipc_path(address: str) -> str:
    path = address.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if size > MAX_IPC_PATH_BYTES:
        cause = f"the socket path {path} has {size} bytes, the system allows {MAX_IPC_PATH_BYTES}"
        raise AddressError(cause, "Use a shorter run directory")
    return path


def _lock_path(path: str) -> IO[str]:
    """Hold `path.lock` for the life of this process; the system releases it even after `kill -9`."""
    try:
        lock = open(f"{path}.lock", "a+")  # noqa: SIM115 - held open for as long as the socket is bound
    except OSError as error:
        raise AddressError(f"can't create {path}.lock: {error.strerror}", "Choose a writable run directory") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        cause = f"ipc://{path} is held by process {owner}"
        raise AddressError(cause, "Stop that broker or choose another run directory") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _check_tcp(address: str, allow_remote: bool) -> None:
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or not host:
        raise AddressError(f"{address} is no address", "Use ipc:///path or tcp://host:port")
    if not allow_remote and not _is_loopback(host):
        cause = f"{address} is open to other hosts, and messages are not encrypted"
        raise AddressError(cause, "Bind 127.0.0.1, or allow remote peers on a network that you trust")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
