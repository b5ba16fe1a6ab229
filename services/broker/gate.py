"""The broker's gate for keyed sockets: who may connect, and whose words go on to the ledger.

::

    TCP ─▶ CURVE handshake ─▶ ZAP: is the key on the allow-list? ─▶ frames, each stamped with the key of its sender
                                     │ no                                   │ charge: rate, size
                                     ▼                                      ▼ decode, then admit: role, kind, names
                                   closed                             dropped, counted      ─▶ ledger

The ZAP handler is our own and runs on the broker's loop: no thread, and with `ZAP_ENFORCE_DOMAIN` nobody is let in
while it does not answer.

Invariants
* The allow-list is read again within `POLL_S` of a change, without a restart; what a revoked key says is dropped.
* A refusal is counted by kind and logged once a minute per kind at most; logs name roles and names, never a secret.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kbrl_async.keyring import Keyring
from protocols import framing
from protocols import messages as msg
from protocols.auth import Guard, PeerLimits, Role, Seal
from protocols.sockets import VIEWERS_DOMAIN, BoundRouter, Socket
from services.runtime.channel import BATCH

ZAP_ADDRESS = "inproc://zeromq.zap.01"
POLL_S = 0.5
UNKNOWN_POLL_S = 0.02
"""A stranger may be a key that was made a moment ago; not more often, so that strangers cost little."""
QUIET_S = 60.0
MAX_CONNECTIONS = 4096
_EVENTS = int(zmq.EVENT_ACCEPTED) | int(zmq.EVENT_DISCONNECTED)
_NOBLOCK = int(zmq.NOBLOCK)

log = structlog.get_logger()


class Gate:
    """Open it before the keyed sockets are bound. Raises `UserError` where the folder holds no broker's keys."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        folder: str,
        limits: PeerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._ring = Keyring(folder)
        self._clock = clock
        self.max_connections = max_connections
        self.keys = self._ring.server()
        self.seal = Seal(hashlib.sha256(b"kbrl lease seal\0" + self.keys.secret).digest())
        self._stamp = self._ring.stamp()
        self._polled_at = clock()
        peers, wrong = self._ring.peers()
        self.guard = Guard(peers, limits)
        self.handshakes_refused = 0
        self._said_at: dict[str, float] = {}
        self._connected: set[tuple[int, int]] = set()
        self._monitors: list[Socket] = []
        self._lost: list[bytes] = []
        self._warn(wrong)
        self.zap: Socket = context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(ZAP_ADDRESS)

    @property
    def connections(self) -> int:
        """Open ones, those included that have yet to prove a key, which takes them five seconds at most."""
        return len(self._connected)

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        self.zap.close()

    def watch(self, router: BoundRouter) -> None:
        """Count the connections of a keyed socket."""
        self._monitors.append(router.socket.get_monitor_socket(_EVENTS))

    def unwatch(self, router: BoundRouter) -> None:
        router.socket.disable_monitor()

    # ── who may connect ───────────────────────────────────────────────────────────────────────────────────────

    def serve(self) -> None:
        """Answer the handshakes that wait."""
        while True:
            try:
                request = self.zap.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            version, sequence = (*request, b"", b"")[:2]
            code, text, user = self._decide(request)
            self.zap.send_multipart([version, sequence, code, text, user, b""])

    def _decide(self, request: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
        if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE" or len(request[6]) != 32:
            return self._turn_away("no CURVE key")
        public = z85.encode(request[6]).decode()
        if public not in self.guard.peers:
            self.reload(UNKNOWN_POLL_S)
        peer = self.guard.peers.get(public)
        if peer is None:
            return self._turn_away("unknown key")
        is_viewer = request[2] == VIEWERS_DOMAIN
        if is_viewer != (peer.role is Role.OBSERVER):
            return self._turn_away(f"a {peer.role} has no business at this address")
        self._count_connections()
        if self.connections > self.max_connections:
            return self._turn_away("too many connections")
        return b"200", b"OK", public.encode()

    def _turn_away(self, reason: str) -> tuple[bytes, bytes, bytes]:
        self.handshakes_refused += 1
        self._say("handshake", "refused a connection", reason)
        # A peer that hears 400 never tries again; its key may be allowed in a minute.
        return b"300", b"", b""

    def _count_connections(self) -> None:
        for number, monitor in enumerate(self._monitors):
            while True:
                try:
                    event = parse_monitor_message(monitor.recv_multipart(_NOBLOCK))
                except zmq.Again:
                    break
                connection = (number, int(event["value"]))
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._connected.add(connection)
                else:
                    self._connected.discard(connection)

    # ── whose words go on ─────────────────────────────────────────────────────────────────────────────────────

    def take(self, socket: Socket, now: float, limit: int = BATCH) -> Iterator[tuple[str, list[bytes]]]:
        """What has arrived, with its sender's key; what a key may not send any more is left out."""
        for _ in range(limit):
            try:
                first = socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames = [first.bytes, *_rest(socket, first.more)]
            reason = self.guard.charge(_user(first), sum(map(len, frames)), now)
            if reason:
                self._say("rate", "dropped a message", reason)
            else:
                yield _user(first), frames

    def admit(self, public: str, route: bytes, message: msg.Message, payload: list[bytes], now: float) -> str:
        """Why this message is dropped; empty where it may go on."""
        reason = self.guard.admit(public, route, message, len(payload), now)
        if reason:
            self._say(type(message).__name__, "dropped a message", f"{self.guard.name(public)}: {reason}")
        return reason

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self, now: float) -> list[bytes]:
        """Once a heartbeat; returns the routes of keys that are allowed no longer."""
        self._count_connections()
        self.guard.forget_silent(now)
        self.reload()
        lost, self._lost = self._lost, []
        return lost

    def reload(self, at_most_every_s: float = POLL_S) -> None:
        """Read the allow-list again where it has changed."""
        now = self._clock()
        if now - self._polled_at < at_most_every_s:
            return
        self._polled_at = now
        stamp = self._ring.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        peers, wrong = self._ring.peers()
        self._warn(wrong)
        self._lost = [*self._lost, *self.guard.replace(peers)]
        log.info("allow-list read again", keys=len(peers))

    def stats(self) -> dict[str, object]:
        return {
            "connections": self.connections,
            "handshakes_refused": self.handshakes_refused,
            "refused": dict(self.guard.refused),
        }

    def _warn(self, wrong: Sequence[str]) -> None:
        for reason in wrong:
            log.warning("a file of the allow-list is no key", cause=reason)

    def _say(self, kind: str, event: str, reason: str) -> None:
        now = self._clock()
        if now - self._said_at.get(kind, -QUIET_S) >= QUIET_S and len(self._said_at) < 1000:
            self._said_at[kind] = now
            log.warning(event, cause=reason, note="further ones of this kind are only counted for a minute")


def _user(frame: zmq.Frame) -> str:
    """The key that CURVE has proven for the connection; the empty string where there is none, which nobody is."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _rest(socket: Socket, more: bool) -> Iterator[bytes]:
    """The other frames of a message; those beyond any valid message are read and thrown away."""
    count = 0
    while more:
        frame = socket.recv(_NOBLOCK)
        more = bool(socket.getsockopt(zmq.RCVMORE))
        count += 1
        if count <= framing.MAX_PAYLOAD_FRAMES + 3:
            yield frame
