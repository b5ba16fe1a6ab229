"""Who may say what: roles, and the check that every message of a keyed peer passes before the ledger sees it.

::

    frames of a key ─▶ charge: rate, size ─▶ decode ─▶ admit: key, route, kind, stages, names ─▶ ledger
                          └ dropped, counted ──────────────┘

A peer *is* its public key: CURVE proves it for the connection, the socket stamps it on every message, and the
allow-list says which role and name it stands for. What a message says about itself never widens that.

Invariants
* A role works on its own stages only, hands on to the stages that follow them, and says only what its part needs.
* A worker id begins with its key's name, so no key can pose as a worker of another, living or not yet started.
* A route belongs to the key that used it first, until it has been silent for long.
* What a revoked key says is dropped from the next message on.
Leases are bound to keys as well, by the ledger (`Seal`): a key can neither finish, hold nor refuse another's work.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec

from protocols import messages as msg
from protocols.leases import parse_lease_id
from protocols.messages import Stage

MAX_VERSION = 2**53
"""Policy versions beyond are refused: the journal keeps 64 bits with a sign."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
"""Of a key: one word without dots, so that it ends where a worker id's own part begins."""


class Role(enum.StrEnum):
    SAMPLER = "sampler"
    COMPILE = "compile"
    VERIFIER = "verifier"
    BENCH = "bench"
    LEARNER = "learner"
    AGGREGATOR = "aggregator"
    OBSERVER = "observer"


class Rights(msgspec.Struct, frozen=True):
    """What one role may do."""

    stages: frozenset[str] = frozenset()
    next_stages: frozenset[str] = frozenset()
    kinds: frozenset[type] = frozenset()
    frames: int = 0
    """Payload frames that a result may add to a record."""
    tells_version: bool = False
    """It may make a policy version."""


_WORK = frozenset({msg.Hello, msg.Beat, msg.Result, msg.Nack, msg.Bye, msg.Paused})
_AFTER_COMPILE = frozenset({Stage.VERIFY, Stage.BENCH, Stage.SCORE})

RIGHTS: Mapping[Role, Rights] = {
    Role.SAMPLER: Rights(frozenset({Stage.GENERATE}), frozenset({Stage.COMPILE, Stage.SCORE}), _WORK | {msg.Want}, 1),
    Role.COMPILE: Rights(frozenset({Stage.COMPILE}), _AFTER_COMPILE, _WORK | {msg.Offer}, 1),
    Role.VERIFIER: Rights(frozenset({Stage.VERIFY}), frozenset({Stage.BENCH, Stage.SCORE}), _WORK | {msg.Want}, 1),
    Role.BENCH: Rights(
        frozenset({Stage.BENCH}), frozenset({Stage.SCORE}), _WORK | {msg.QuietRequest, msg.QuietDone, msg.Want}, 1
    ),
    Role.LEARNER: Rights(frozenset({Stage.TRAIN}), frozenset({Stage.TRAINED}), _WORK, 1, tells_version=True),
    Role.AGGREGATOR: Rights(frozenset({Stage.SCORE, Stage.TRAINED}), frozenset({""}), _WORK | {msg.Submit, msg.Retire}),
    Role.OBSERVER: Rights(),
}


class Peer(msgspec.Struct, frozen=True):
    """Whom a public key stands for."""

    role: Role
    name: str
    public: str
    """The key as Z85 text."""

    @property
    def owner(self) -> str:
        """What leases and suspicion are bound to; it outlives the change of a key."""
        return f"{self.role}/{self.name}"

    def may_be(self, worker_id: str) -> bool:
        return worker_id == self.name or worker_id.startswith(f"{self.name}.")


class PeerLimits(msgspec.Struct, frozen=True):
    """What one key may use of the broker; many times what honest work needs."""

    messages_per_s: float = 2000.0
    messages_burst: float = 4000.0
    bytes_per_s: float = 128.0 * 2**20
    bytes_burst: float = 256.0 * 2**20
    routes: int = 64
    """Processes at once."""
    slots: int = 4096
    """Leases that one worker may ask for."""
    text: int = 512
    """Characters of one name or reason."""
    caps: int = 64
    resources: int = 8
    """Different resources that one key may ask quiet windows for."""
    silent_s: float = 120.0
    """A route that has said nothing for so long is forgotten."""


class Seal:
    """Binds lease ids to whom they were granted, so that a restarted broker, which has no lease, still knows."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def tag(self, owner: str, lease: str) -> str:
        text = f"{owner}\0{lease}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()[:24]


class TokenBucket:
    """`rate` tokens a second, at most `burst` of them saved up; full at the start.

    Example::

        bucket = TokenBucket(rate=2.0, burst=3.0)
        [bucket.take(1.0, now=0.0) for _ in range(4)]   # True, True, True, False
        bucket.take(1.0, now=0.5)                       # True
    """

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"rate={rate} and burst={burst} must be above 0")
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at: float | None = None

    def take(self, amount: float, now: float) -> bool:
        """Take `amount`, or nothing where there is less. A clock that steps back gives nothing and costs nothing.

        More than a full bucket is never allowed.
        """
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._burst, self._tokens + passed * self._rate)
        if amount > self._tokens:
            return False
        self._tokens -= amount
        return True


class _Account:
    """What one key has used."""

    def __init__(self, limits: PeerLimits) -> None:
        self.messages = TokenBucket(limits.messages_per_s, limits.messages_burst)
        self.bytes = TokenBucket(limits.bytes_per_s, limits.bytes_burst)
        self.resources: set[str] = set()


class Guard:
    """See the module's docstring. `charge` and `admit` answer with a reason for refusal, empty where there is none.

    Example::

        guard = Guard({key: Peer(Role.BENCH, "host7", key)})
        guard.charge(key, 300, now=0.0)                                           # ""
        guard.admit(key, b"r", Hello("host7.1", "a", ["bench"], 1), 0, now=0.0)   # ""
        guard.admit(key, b"r", Submit("t", "generate"), 1, now=0.1)               # "a bench says no Submit"
    """

    def __init__(self, peers: Mapping[str, Peer], limits: PeerLimits | None = None) -> None:
        self.limits = limits or PeerLimits()
        self.peers: dict[str, Peer] = dict(peers)
        self.refused: Counter[str] = Counter()
        """By kind of refusal, for the metrics."""
        self._accounts: dict[str, _Account] = {}
        self._routes: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._routes_of: Counter[str] = Counter()

    def replace(self, peers: Mapping[str, Peer]) -> list[bytes]:
        """Take over a changed allow-list; returns the routes of keys that are on it no longer, or as somebody else."""
        gone = {public for public, peer in self.peers.items() if peers.get(public) != peer}
        self.peers = dict(peers)
        for public in gone:
            self._accounts.pop(public, None)
        lost = [route for route, (public, _) in self._routes.items() if public in gone]
        for route in lost:
            self._forget(route)
        return lost

    def owner(self, public: str) -> str:
        return self.peers[public].owner

    def name(self, public: str) -> str:
        """For logs."""
        peer = self.peers.get(public)
        return peer.owner if peer else "an unknown key"

    def charge(self, public: str, size: int, now: float) -> str:
        """Count one message of `size` bytes, whatever it is, against its key."""
        if public not in self.peers:
            return self._refuse("unknown key", "the key is not on the allow-list")
        account = self._accounts.setdefault(public, _Account(self.limits))
        if not account.messages.take(1.0, now) or not account.bytes.take(size, now):
            return self._refuse("rate", "more messages or bytes a second than one key may send")
        return ""

    def admit(self, public: str, route: bytes, message: msg.Message, frames: int, now: float) -> str:
        """May this key say this, on this route, with so many payload frames?"""
        peer = self.peers.get(public)
        if peer is None:
            return self._refuse("unknown key", "the key is not on the allow-list")
        rights = RIGHTS[peer.role]
        if type(message) not in rights.kinds:
            return self._refuse("kind", f"a {peer.role} says no {type(message).__name__}")
        reason = self._bad_route(public, route, now)
        if reason:
            return self._refuse("route", reason)
        reason = _misfit(peer, rights, message, frames, self.limits) or self._too_many_resources(public, message)
        return self._refuse("content", reason) if reason else ""

    def _too_many_resources(self, public: str, message: msg.Message) -> str:
        if not isinstance(message, msg.QuietRequest):
            return ""
        resources = self._accounts.setdefault(public, _Account(self.limits)).resources
        if message.resource not in resources and len(resources) >= self.limits.resources:
            return f"quiet windows on more than {self.limits.resources} resources"
        resources.add(message.resource)
        return ""

    def forget_silent(self, now: float) -> None:
        while self._routes:
            route, (_, seen) = next(iter(self._routes.items()))
            if now - seen < self.limits.silent_s:
                return
            self._forget(route)

    def _bad_route(self, public: str, route: bytes, now: float) -> str:
        known = self._routes.get(route)
        if known is not None and known[0] != public:
            return "the route belongs to another key"
        if known is None:
            if self._routes_of[public] >= self.limits.routes:
                return f"more than {self.limits.routes} processes with one key"
            self._routes_of[public] += 1
        self._routes[route] = (public, now)
        self._routes.move_to_end(route)
        return ""

    def _forget(self, route: bytes) -> None:
        public, _ = self._routes.pop(route)
        self._routes_of[public] -= 1
        if self._routes_of[public] <= 0:
            del self._routes_of[public]

    def _refuse(self, kind: str, reason: str) -> str:
        self.refused[kind] += 1
        return reason


def _misfit(peer: Peer, rights: Rights, message: msg.Message, frames: int, limits: PeerLimits) -> str:
    """Why the content of a message is not this peer's to say."""
    match message:
        case msg.Hello():
            return _misfit_hello(peer, rights, message, limits) or _no_frames(frames)
        case msg.Result():
            return _misfit_result(peer, rights, message, frames)
        case msg.Beat(credit_total=credit, leases=leases, load=load):
            if not 0 <= credit <= limits.slots or len(leases) > 2 * limits.slots:
                return "credit or leases out of range"
            if len(load.facts) > limits.caps or any(len(name) > limits.text for name in load.facts):
                return "too many facts"
            return _no_frames(frames)
        case msg.Nack(reason=reason) | msg.Bye(reason=reason):
            return "a reason too long" if len(reason) > limits.text else _no_frames(frames)
        case msg.QuietRequest(request_id=request_id, resource=resource):
            too_long = max(len(request_id), len(resource)) > limits.text
            return "names too long" if too_long else _no_frames(frames)
        case msg.Submit():
            return ""
        case msg.Offer():
            return "more than one payload frame" if frames > 1 else ""
        case _:
            return _no_frames(frames)


def _no_frames(frames: int) -> str:
    return "payload frames where none belong" if frames else ""


def _misfit_hello(peer: Peer, rights: Rights, hello: msg.Hello, limits: PeerLimits) -> str:
    if not peer.may_be(hello.worker_id) or len(hello.worker_id) > limits.text:
        return f"worker ids of {peer.owner} begin with '{peer.name}.'"
    if len(hello.stages) > len(Stage) or not set(hello.stages) <= rights.stages:
        return f"a {peer.role} does not work on {hello.stages!a}"[:200]
    if not 0 <= hello.slots <= limits.slots or not -1 <= hello.credit <= limits.slots:
        return "slots or credit out of range"
    if len(hello.held) > 2 * limits.slots:
        return "held leases out of range"
    words = [hello.incarnation, *hello.caps, *hello.caps.values()]
    if len(hello.caps) > limits.caps or any(len(word) > limits.text for word in words):
        return "capabilities too long"
    if hello.policy_version != -1 and not rights.tells_version:
        return f"a {peer.role} makes no policy versions"
    return _no_version(hello.policy_version)


def _misfit_result(peer: Peer, rights: Rights, result: msg.Result, frames: int) -> str:
    stage, _ = parse_lease_id(result.lease_id) or ("", "")
    if stage not in rights.stages:
        return f"a {peer.role} has no result of stage {stage!a}"[:200]
    if result.next_stage not in rights.next_stages:
        return f"a {peer.role} hands nothing to stage {result.next_stage!a}"[:200]
    if frames > rights.frames:
        return f"{frames} payload frames, a {peer.role} adds {rights.frames}"
    if result.policy_version != -1 and not (rights.tells_version or peer.role is Role.SAMPLER):
        return f"a {peer.role} tells no policy version"
    return _no_version(result.policy_version)


def _no_version(version: int) -> str:
    return "" if -1 <= version < MAX_VERSION else "a policy version out of range"
