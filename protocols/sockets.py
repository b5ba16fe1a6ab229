"""The one place where sockets are made, bound and connected: options apply to later binds only, so all are set here.

* `ROUTER` refuses to send to nobody (`EHOSTUNREACH`) and lets a peer that reconnects take its route over.
* An `ipc://` path is locked first: a second bind would silently steal it.
* What is not `ipc://` or loopback is encrypted and authenticated by CURVE, on both ends, or refused: no keys, no
  socket. Whoever has keys uses them on loopback too, where a tunnel to another host may begin.
* A keyed ROUTER asks the ZAP handler of its context about every peer and takes nobody where there is none.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
from typing import IO

import msgspec
import zmq

MAX_IPC_PATH_BYTES = 107
MAX_MESSAGE_BYTES = 1 << 30
MAX_REMOTE_BYTES = 64 << 20
"""Of one frame, on sockets that other hosts can reach."""
HIGH_WATER_MARK = 10_000
LINGER_MS = 250
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
HANDSHAKE_MS = 5000
"""A connection that has not proven its key by then is cut."""
RECONNECT_MS = (50, 250)
"""First and longest pause between two tries. A broker that is killed is away for a second or two: all that a pause is
longer than its start adds to what everybody waits."""
KEEPALIVE_S = (10, 5, 3)
"""TCP asks an idle peer after so long, again after so long, and gives it up after so many questions: 25 s. A ZMTP
heartbeat does not do: libzmq forgets the time limit that came with a ping once any other message follows it."""
UNSENT_MS = 25_000
"""A peer that leaves data unconfirmed for so long is gone; the system's own patience is a quarter of an hour."""
CONNECT_MS = 3000
"""A connection that is not there by then is tried afresh: the kernel alone waits longer and longer between its tries,
half a minute in a partition of one, so that work would begin again long after the line has healed."""
ZAP_DOMAIN = b"kbrl"
VIEWERS_DOMAIN = b"kbrl-viewers"
WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - what a broker is bound to, not what we bind

Socket = zmq.Socket[bytes]


class ServerKeys(msgspec.Struct, frozen=True):
    """The broker's key pair, as Z85."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ServerKeys({self.public.decode()})"


class ClientKeys(msgspec.Struct, frozen=True):
    """A peer's key pair and the broker's public key, as Z85; a broker with another key is not talked to."""

    public: bytes
    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return f"ClientKeys({self.public.decode()})"


MAKE_KEYS = "Make them with 'kbrl keys new' and name their folder: broker.keys=FOLDER, or --keys FOLDER for a worker"


class AddressError(ValueError):
    """An address can't be used; `cause` says why and `cure` what to do."""

    def __init__(self, cause: str, cure: str) -> None:
        self.cause = cause
        self.cure = cure
        super().__init__(f"{cause}. {cure}")


class BoundRouter:
    """A bound ROUTER together with the lock on its address; close it to release both."""

    def __init__(
        self, context: zmq.Context[Socket], address: str, *, keys: ServerKeys | None = None, domain: bytes = ZAP_DOMAIN
    ) -> None:
        self.address = address
        self._lock = _lock_path(_ipc_path(address)) if address.startswith("ipc://") else None
        if self._lock is None:
            _check_tcp(address, keys is not None)
        self.keyed = keys is not None and not address.startswith("ipc://")
        """Every message has the public key of its sender."""
        self.socket = _make(context, zmq.ROUTER)
        if keys is not None and self.keyed:
            _serve_curve(self.socket, keys, domain)
        # libzmq aborts the process when its own heartbeat falls due on a connection that broke while its queue was
        # full (zeromq/libzmq#4364): one peer could kill the broker. Peers beat, and say how long they are believed.
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
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


def connect_dealer(context: zmq.Context[Socket], address: str, route: bytes, keys: ClientKeys | None = None) -> Socket:
    """A DEALER on its way to `address`; `route` is random and belongs to one incarnation of one process."""
    if address.startswith("ipc://"):
        _ipc_path(address)
    if keys is None and needs_keys(address):
        raise AddressError(f"{address} is another host, and there are no keys for it", MAKE_KEYS)
    socket = _make(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, route)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is not None and not address.startswith("ipc://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    try:
        socket.connect(_reachable(address))
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
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    idle_s, again_s, questions = KEEPALIVE_S
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, again_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, questions)
    socket.setsockopt(zmq.TCP_MAXRT, UNSENT_MS)
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


def needs_keys(address: str) -> bool:
    """True for what other hosts can reach: neither a socket file nor loopback."""
    return not address.startswith("ipc://") and not _is_loopback(_host(address))


def _serve_curve(socket: Socket, keys: ServerKeys, domain: bytes) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REMOTE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


def _reachable(address: str) -> str:
    """Where to connect to for what is bound to `address`: this host, where it is bound to all addresses."""
    for wildcard in WILDCARDS:
        if address.startswith(f"tcp://{wildcard}:"):
            return address.replace(wildcard, "127.0.0.1", 1)
    return address


def _host(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


def _check_tcp(address: str, has_keys: bool) -> None:
    host = _host(address)
    if not address.startswith("tcp://") or not host:
        raise AddressError(f"{address} is no address", "Use ipc:///path or tcp://host:port")
    if not has_keys and not _is_loopback(host):
        raise AddressError(f"{address} is open to other hosts, and there are no keys", MAKE_KEYS)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
