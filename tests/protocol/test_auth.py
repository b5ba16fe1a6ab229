"""Who may say what: every rule of the guard, as a refusal that an honest peer never meets."""

from __future__ import annotations

import pytest

from protocols import messages as msg
from protocols.auth import RIGHTS, Guard, Peer, PeerLimits, Role, Seal, TokenBucket
from protocols.events import FromProducer, FromWorker
from protocols.ledger import Ledger

LEASE = "1.1:bench:t1"


def guard(**limits: float) -> Guard:
    """One key per role, each named like the role's first letter."""
    return Guard({role: Peer(role, "host7", role) for role in Role}, PeerLimits(**limits))  # type: ignore[arg-type]


def said(role: Role, message: msg.Message, frames: int = 0, route: bytes = b"r") -> str:
    return guard().admit(role, route, message, frames, 0.0)


HONEST: list[tuple[Role, msg.Message, int]] = [
    (Role.SAMPLER, msg.Hello("host7.1", "a", ["generate"], 32), 0),
    (Role.SAMPLER, msg.Result("t1", "1.1:generate:t1", "compile", 3), 1),
    (Role.COMPILE, msg.Result("t1", "1.1:compile:t1", "bench"), 1),
    (Role.BENCH, msg.Hello("host7", "a", ["bench"], 2, [LEASE], {"backends": "c"}), 0),
    (Role.BENCH, msg.Result("t1", LEASE, "score"), 1),
    (Role.BENCH, msg.Beat(1, [LEASE]), 0),
    (Role.BENCH, msg.QuietRequest("q", "host/gpu0", 1.0), 0),
    (Role.LEARNER, msg.Hello("host7.1", "a", ["train"], 1, policy_version=4), 0),
    (Role.LEARNER, msg.Result("b1", "1.1:train:b1", "trained", 5), 1),
    (Role.AGGREGATOR, msg.Submit("t1", "generate"), 1),
    (Role.AGGREGATOR, msg.Retire("g1"), 0),
    (Role.AGGREGATOR, msg.Result("t1", "1.1:score:t1"), 0),
]
HOSTILE: list[tuple[Role, msg.Message, int, str]] = [
    (Role.BENCH, msg.Submit("t1", "generate"), 1, "says no Submit"),
    (Role.BENCH, msg.Retire("g1"), 0, "says no Retire"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["train"], 1), 0, "does not work on"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench", "generate"], 1), 0, "does not work on"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench"] * 1000, 1), 0, "does not work on"),
    (Role.BENCH, msg.Hello("host8.1", "a", ["bench"], 1), 0, "begin with 'host7.'"),
    (Role.BENCH, msg.Hello("host77", "a", ["bench"], 1), 0, "begin with 'host7.'"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench"], 10**9), 0, "out of range"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench"], 1, [LEASE] * 100_000), 0, "out of range"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench"], 1, [], {"backends": "c" * 1000}), 0, "too long"),
    (Role.BENCH, msg.Hello("host7.1", "a", ["bench"], 1, policy_version=9), 0, "makes no policy versions"),
    (Role.SAMPLER, msg.Hello("host7.1", "a", ["generate"], 1, policy_version=9), 0, "makes no policy versions"),
    (Role.BENCH, msg.Result("t1", LEASE, "score", 9), 1, "tells no policy version"),
    (Role.BENCH, msg.Result("b1", "1.1:train:b1", "trained", 9), 1, "has no result of stage"),
    (Role.BENCH, msg.Result("t1", "nonsense", "score"), 1, "has no result of stage"),
    (Role.BENCH, msg.Result("t1", LEASE, "train"), 1, "hands nothing to"),
    (Role.BENCH, msg.Result("t1", LEASE, ""), 1, "hands nothing to"),
    (Role.BENCH, msg.Result("t1", LEASE, "score"), 2, "payload frames"),
    (Role.COMPILE, msg.Result("t1", LEASE, "score"), 1, "has no result of stage"),
    (Role.LEARNER, msg.Result("b1", "1.1:train:b1", "trained", 2**63), 1, "out of range"),
    (Role.AGGREGATOR, msg.Result("t1", "1.1:score:t1"), 1, "payload frames"),
    (Role.BENCH, msg.Beat(10**9), 0, "out of range"),
    (Role.BENCH, msg.Beat(1, [], msg.Load(facts={str(n): 1.0 for n in range(1000)})), 0, "too many facts"),
    (Role.BENCH, msg.Nack(LEASE, "x" * 10_000), 0, "too long"),
    (Role.BENCH, msg.Beat(1), 3, "payload frames"),
    (Role.OBSERVER, msg.Hello("host7.1", "a", [], 1), 0, "says no Hello"),
    (Role.BENCH, msg.Welcome(1, 1.0, 1.0, 1), 0, "says no Welcome"),
]


@pytest.mark.parametrize(("role", "message", "frames"), HONEST)
def test_honest_words_pass(role: Role, message: msg.Message, frames: int) -> None:
    assert said(role, message, frames) == ""


@pytest.mark.parametrize(("role", "message", "frames", "reason"), HOSTILE)
def test_words_beyond_a_role_are_refused(role: Role, message: msg.Message, frames: int, reason: str) -> None:
    assert reason in said(role, message, frames)


def test_only_the_aggregator_opens_and_ends_groups() -> None:
    assert [role for role in Role if msg.Submit in RIGHTS[role].kinds] == [Role.AGGREGATOR]
    assert [role for role in Role if msg.Retire in RIGHTS[role].kinds] == [Role.AGGREGATOR]


def test_only_the_learner_makes_policy_versions() -> None:
    assert [role for role in Role if RIGHTS[role].tells_version] == [Role.LEARNER]


def test_a_route_belongs_to_the_key_that_used_it_first() -> None:
    ours = guard()
    assert ours.admit(Role.BENCH, b"r", msg.Beat(1), 0, 0.0) == ""
    assert "another key" in ours.admit(Role.COMPILE, b"r", msg.Beat(1), 0, 0.0)
    ours.forget_silent(1e6)
    assert ours.admit(Role.COMPILE, b"r", msg.Beat(1), 0, 1e6) == ""


def test_one_key_has_a_bounded_number_of_processes() -> None:
    ours = guard(routes=2)
    routes = (b"a", b"b", b"c")
    assert [bool(ours.admit(Role.BENCH, route, msg.Beat(1), 0, 0.0)) for route in routes] == [False, False, True]
    assert ours.admit(Role.COMPILE, b"d", msg.Beat(1), 0, 0.0) == ""


def test_one_key_asks_for_a_bounded_number_of_resources() -> None:
    ours = guard(resources=1)
    assert ours.admit(Role.BENCH, b"r", msg.QuietRequest("q", "gpu0", 1.0), 0, 0.0) == ""
    assert "resources" in ours.admit(Role.BENCH, b"r", msg.QuietRequest("q", "gpu1", 1.0), 0, 0.0)
    assert ours.admit(Role.BENCH, b"r", msg.QuietRequest("q2", "gpu0", 1.0), 0, 0.0) == ""


def test_a_key_that_sends_too_much_harms_only_itself() -> None:
    ours = guard(messages_burst=3.0, messages_per_s=1.0)
    assert [bool(ours.charge(Role.BENCH, 1, 0.0)) for _ in range(5)] == [False] * 3 + [True] * 2
    assert ours.charge(Role.COMPILE, 1, 0.0) == ""
    assert ours.charge(Role.BENCH, 1, 1.0) == ""


def test_bytes_are_limited_too() -> None:
    ours = guard(bytes_burst=100.0, bytes_per_s=1.0)
    assert ours.charge(Role.BENCH, 100, 0.0) == ""
    assert "bytes" in ours.charge(Role.BENCH, 2, 0.1)


def test_a_revoked_key_is_nobody_and_its_routes_are_lost() -> None:
    ours = guard()
    ours.admit(Role.BENCH, b"r", msg.Beat(1), 0, 0.0)
    assert ours.replace({key: peer for key, peer in ours.peers.items() if key != Role.BENCH}) == [b"r"]
    assert "allow-list" in ours.charge(Role.BENCH, 1, 0.0)
    assert "allow-list" in ours.admit(Role.BENCH, b"r", msg.Beat(1), 0, 0.0)


def test_a_key_that_changes_its_role_begins_anew() -> None:
    ours = guard()
    ours.admit(Role.BENCH, b"r", msg.Beat(1), 0, 0.0)
    assert ours.replace({**ours.peers, Role.BENCH: Peer(Role.COMPILE, "host7", Role.BENCH)}) == [b"r"]


def test_a_bucket_fills_up_to_its_burst_and_no_further() -> None:
    bucket = TokenBucket(rate=2.0, burst=3.0)
    assert [bucket.take(1.0, 0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take(1.0, 0.5)
    assert not bucket.take(3.5, 1e9)
    assert bucket.take(3.0, 1e9)
    assert not bucket.take(1.0, 0.0), "a clock that steps back gives nothing"


class Keyed:
    """A ledger with two benches of different keys and one task."""

    def __init__(self) -> None:
        self.ledger = Ledger(seal=Seal(b"secret"))
        self.ledger.handle(FromProducer(b"p", msg.Submit("t1", "bench", "g1")), 0.0)

    def hears(self, owner: str, message: msg.Message, now: float = 0.0) -> list[object]:
        return list(self.ledger.handle(FromWorker(owner.encode(), message, owner), now))

    def joins(self, owner: str) -> list[object]:
        return self.hears(owner, msg.Hello(f"{owner}.1", "a", ["bench"], 1))

    def lease(self) -> str:
        lease = self.ledger.tasks.live["t1"].lease
        assert lease is not None
        return lease.lease_id


def test_a_result_counts_only_from_whom_the_lease_was_granted_to() -> None:
    keyed = Keyed()
    keyed.joins("a")
    keyed.joins("b")
    stolen = msg.Result("t1", keyed.lease(), "score")
    keyed.hears("b", stolen)
    assert keyed.ledger.counters["results"] == 0
    keyed.hears("a", stolen)
    assert keyed.ledger.counters["results"] == 1


@pytest.mark.parametrize("forged", ["1.1:bench:t1", "1.1.00:bench:t1", "1.1.:bench:t1", ":bench:t1"])
def test_a_lease_can_not_be_made_up(forged: str) -> None:
    keyed = Keyed()
    keyed.hears("b", msg.Hello("b.1", "a", ["bench"], 0))
    keyed.hears("b", msg.Result("t1", forged, "score"))
    assert keyed.ledger.counters["results"] == 0


def test_a_waiting_task_can_not_be_claimed_by_a_beat() -> None:
    keyed = Keyed()
    keyed.hears("b", msg.Hello("b.1", "a", ["bench"], 1, ["1.1:bench:t1"]), 0.0)
    lease = keyed.lease()
    assert lease.startswith("1.")
    assert lease != "1.1:bench:t1"


def test_a_lease_survives_a_restart_of_the_broker_for_its_owner_only() -> None:
    before = Keyed()
    before.joins("a")
    held = before.lease()
    for owner in ("a", "b"):
        after = Ledger(epoch=2, seal=Seal(b"secret"))
        after.handle(FromProducer(b"p", msg.Submit("t1", "bench", "g1")), 0.0)
        hello = msg.Hello(f"{owner}.1", "a", ["bench"], 1, [held])
        after.handle(FromWorker(b"r", hello, owner), 0.0)
        lease = after.tasks.live["t1"].lease
        assert lease is not None
        assert (lease.lease_id == held) is (owner == "a")


def test_words_on_another_keys_route_change_nothing() -> None:
    keyed = Keyed()
    keyed.joins("a")
    keyed.ledger.handle(FromWorker(b"a", msg.Bye(), "b"), 0.0)
    assert list(keyed.ledger.pool.by_id) == ["a.1"]
