"""The worker's and the producer's side of the protocol, without a network."""

from __future__ import annotations

import itertools
import random

import pytest

from protocols import messages as msg
from protocols.session import Abandon, Drained, Emit, ProducerSession, Retired, Start, Submitted, WorkerSession

LEASE = "1.1:bench:t1"
TASK = msg.Task("t1", LEASE, "bench", 1, 30.0, 0)
RESULT = msg.Result("t1", LEASE, "score")


@pytest.fixture
def session() -> WorkerSession:
    return WorkerSession("bench-0", "a", ["bench"], 2, random.Random(0))


def welcomed(
    session: WorkerSession, epoch: int = 1, adopted: list[str] | None = None, now: float = 0.0
) -> list[object]:
    return list(session.handle(msg.Welcome(epoch, 1.0, 30.0, 0, adopted or []), [], now))


def sent(effects: object) -> list[msg.Message]:
    assert isinstance(effects, list)
    return [effect.message for effect in effects if isinstance(effect, Emit)]


def test_hello_is_repeated_with_growing_waits_up_to_eight_seconds(session: WorkerSession) -> None:
    hellos = [step / 100 for step in range(6000) if session.tick(step / 100)]
    waits = [later - earlier for earlier, later in itertools.pairwise(hellos)]
    assert waits[0] < 0.3
    assert 4.0 <= waits[-1] <= 8.1
    assert 8 < len(hellos) < 20


def test_two_workers_do_not_say_hello_at_the_same_moments() -> None:
    waits = []
    for seed in (1, 2):
        session = WorkerSession("w", "a", ["bench"], 1, random.Random(seed))
        waits.append([step for step in range(1000) if session.tick(step / 100)])
    assert waits[0][1:] != waits[1][1:]


def test_a_welcomed_worker_beats_once_a_heartbeat(session: WorkerSession) -> None:
    welcomed(session)
    beats = []
    for step in range(20):
        session.handle(msg.Beat(0, epoch=1), [], step / 10)
        beats += sent(session.tick(step / 10))
    assert beats == [msg.Beat(2, epoch=1)] * 2


def test_a_wedged_worker_does_not_beat(session: WorkerSession) -> None:
    welcomed(session)
    assert session.tick(0.5, alive=False) == []


def test_a_beat_names_running_work_and_unacknowledged_results(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    session.handle(msg.Task("t2", "1.2:bench:t2", "bench", 1, 30.0, 0), [], 0.0)
    session.finish(RESULT, [], 0.0)
    assert sent(session.tick(1.0))[0] == msg.Beat(2, ["1.2:bench:t2", LEASE], epoch=1)


def test_a_task_is_started_once(session: WorkerSession) -> None:
    welcomed(session)
    assert session.handle(TASK, [b"x"], 0.0) == [Start(TASK, [b"x"])]
    assert session.handle(TASK, [b"x"], 0.0) == []


def test_a_result_is_sent_again_until_its_ack(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    assert sent(session.finish(RESULT, [b"r"], 0.0)) == [RESULT]
    session.handle(msg.Beat(0, epoch=1), [], 2.9)
    assert RESULT in sent(session.tick(3.1))
    session.handle(msg.Ack("t1", LEASE), [], 3.2)
    assert session.held == []


def test_a_result_that_is_refused_leaves_the_outbox_too(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    session.finish(RESULT, [], 0.0)
    session.handle(msg.Ack("t1", LEASE, accepted=False, reason="duplicate"), [], 0.1)
    assert session.unacked == 0


def test_silence_of_three_heartbeats_leads_to_hello_with_what_is_held(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    (hello,) = sent(session.tick(3.5))
    assert isinstance(hello, msg.Hello)
    assert hello.held == [LEASE]


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_broker_that_does_not_know_us_hears_hello_at_once(session: WorkerSession, epoch: int) -> None:
    welcomed(session)
    assert isinstance(sent(session.handle(msg.Beat(0, epoch=epoch), [], 0.5))[0], msg.Hello)


def test_results_are_sent_again_after_a_restart_of_the_broker(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    session.finish(RESULT, [], 0.0)
    session.tick(4.0)
    assert sent(welcomed(session, epoch=2, adopted=[LEASE], now=4.1)) == [RESULT]


def test_a_result_made_while_the_broker_is_away_waits_for_the_welcome(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    session.tick(4.0)
    assert session.finish(RESULT, [], 4.0) == []
    assert sent(welcomed(session, epoch=2, now=4.1)) == [RESULT]


def test_work_that_is_not_adopted_is_abandoned(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    session.tick(4.0)
    assert Abandon(LEASE, "not adopted") in welcomed(session, epoch=2, now=4.1)
    assert session.held == []


def test_work_that_came_after_the_hello_is_kept(session: WorkerSession) -> None:
    session.tick(0.0)
    session.handle(TASK, [], 0.1)
    assert welcomed(session, now=0.2) == []
    assert session.held == [LEASE]


def test_a_revoked_lease_is_abandoned_and_its_result_dropped(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    assert session.handle(msg.Revoke(LEASE, "superseded"), [], 0.1) == [Abandon(LEASE, "superseded")]
    assert session.finish(RESULT, [], 0.2) == []


def test_refused_work_is_held_no_more(session: WorkerSession) -> None:
    welcomed(session)
    session.handle(TASK, [], 0.0)
    assert sent(session.refuse(LEASE, "gpu gone")) == [msg.Nack(LEASE, "gpu gone")]
    assert session.held == []


def test_a_draining_worker_offers_no_credit_and_starts_nothing(session: WorkerSession) -> None:
    welcomed(session)
    assert sent(session.drain()) == [msg.Beat(0, epoch=1)]
    assert session.handle(TASK, [], 0.1) == []


def test_the_broker_can_ask_for_a_drain(session: WorkerSession) -> None:
    welcomed(session)
    assert Drained("stop") in session.handle(msg.Drain("stop"), [], 0.1)
    assert session.draining


SUBMIT = msg.Submit("t1", "generate", "g")


@pytest.fixture
def producer() -> ProducerSession:
    return ProducerSession(random.Random(0))


def test_a_submission_is_repeated_until_it_is_acknowledged(producer: ProducerSession) -> None:
    assert sent(producer.submit(SUBMIT, [b"x"], 0.0)) == [SUBMIT]
    assert producer.tick(0.9) == []
    assert producer.tick(1.3) == [Emit(SUBMIT, [b"x"])]
    assert producer.handle(msg.SubmitAck("t1"), 1.4) == [Submitted("t1", duplicate=False)]
    assert producer.tick(100.0) == []


def test_busy_delays_a_submission_as_long_as_the_broker_asks(producer: ProducerSession) -> None:
    producer.submit(SUBMIT, [], 0.0)
    producer.handle(msg.Busy("t1", 5.0), 0.1)
    assert producer.tick(5.0) == []
    assert sent(producer.tick(7.7)) == [SUBMIT]


def test_an_ack_that_comes_twice_counts_once(producer: ProducerSession) -> None:
    producer.submit(SUBMIT, [], 0.0)
    producer.handle(msg.SubmitAck("t1"), 0.1)
    assert producer.handle(msg.SubmitAck("t1"), 0.2) == []


def test_retiring_is_repeated_and_stops_submissions_of_the_group(producer: ProducerSession) -> None:
    producer.submit(SUBMIT, [], 0.0)
    assert Submitted("t1", duplicate=False) in producer.retire("g", 0.1)
    assert sent(producer.tick(2.0)) == [msg.Retire("g")]
    assert producer.handle(msg.SubmitAck("", group_id="g"), 2.1) == [Retired("g")]
    assert producer.pending == 0
