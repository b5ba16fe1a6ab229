"""A learner that dies in the midst of a transfer: who receives gives it up within seconds, and meets the next one."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.weights.direct import Line, Sender, index_of
from kbrl_async.weights.groups import Incoming, Meeting, TransferGroup, placed
from tests.unit.weights.test_direct import CPU, PATIENCE_S, Sampler, assert_is, manifest, weights

SOON_S = 15.0
"""Far above a second, for a busy host; far below `PATIENCE_S`."""
LARGE = {"large": torch.zeros(16 << 20)}
"""More than sockets hold."""


def learn(pipe: Connection, device: str) -> None:
    """A learner's process that sends a link its first transfer, and of the second nothing but the offer."""
    send, count = TransferGroup.send, itertools.count()

    def halt(*given: Any) -> None:
        if next(count) == 0:
            send(*given)
        else:
            pipe.send("sending")
            time.sleep(3600)

    TransferGroup.send = halt  # type: ignore[method-assign]
    sender = Sender("127.0.0.1", torch.device(device), PATIENCE_S, lambda _: None)
    sender.offer(manifest(1), weights(1))
    pipe.send(sender.meeting)
    time.sleep(3600)


class Learner:
    def __init__(self, device: str = "cpu") -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=learn, args=(theirs, device), daemon=True)
        self.process.start()
        self.meeting: Meeting = self.heard()

    def heard(self) -> Any:
        assert self.pipe.poll(PATIENCE_S)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)


@pytest.fixture
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender("127.0.0.1", CPU, PATIENCE_S, lambda _: None)
    yield made
    made.close()


def assert_given_up(waiting: Future[object], begun: float) -> None:
    with pytest.raises(InfraError, match="can't be had directly"):
        waiting.result(PATIENCE_S)
    assert time.monotonic() - begun < SOON_S


def lose_learner(learner: Learner, device: torch.device, pool: ThreadPoolExecutor) -> None:
    """In the midst of a sampler's second transfer."""
    line = Line(learner.meeting, "sampler.1", 1, PATIENCE_S)
    incoming = Incoming(learner.meeting, line.link, 1, 2, device, PATIENCE_S)
    index = line.ask().index
    taken = {name: tensor.cpu() for name, tensor in incoming.tensors(index)}
    assert all(torch.equal(taken[name], tensor) for name, tensor in weights(1).items())
    line.ask()
    waiting: Future[object] = pool.submit(lambda: list(incoming.tensors(index)))
    assert learner.heard() == "sending"
    begun = time.monotonic()
    learner.kill()
    assert_given_up(waiting, begun)


def test_a_learner_that_is_killed_in_a_transfer_is_given_up_at_once_and_the_next_one_is_met(
    learner: Learner, sender: Sender, pool: ThreadPoolExecutor
) -> None:
    lose_learner(learner, CPU, pool)
    sender.offer(manifest(2), weights(2))
    (taken,) = Sampler(sender.meeting).take()
    assert_is(taken, 2)


def test_who_waits_in_a_collective_that_does_not_end_sees_that_the_learner_s_store_has_gone(
    learner: Learner, pool: ThreadPoolExecutor
) -> None:
    """As NCCL's would not: here another rank 0 stays, in this process."""
    both = pool.map(lambda rank: TransferGroup(learner.meeting, "t", rank, 2, CPU, PATIENCE_S), range(2))
    mine, other = both
    waiting: Future[object] = pool.submit(other.receive, placed(index_of(LARGE)))
    time.sleep(0.2)
    assert not waiting.done()
    begun = time.monotonic()
    learner.kill()
    assert_given_up(waiting, begun)
    mine.close()


@pytest.mark.parametrize("who", ["a worker", "the learner", "the learner, between GPUs"])
def test_a_link_that_one_side_gives_up_is_given_up_by_the_other(
    sender: Sender, pool: ThreadPoolExecutor, who: str
) -> None:
    """The learner has lost another worker, say, or a worker another rank."""
    mine, other = pool.map(lambda rank: TransferGroup(sender.meeting, "t", rank, 2, CPU, PATIENCE_S), range(2))
    mine.is_paced = "GPUs" in who
    mine.patience_s = other.patience_s = 10.0  # gloo ends what nobody waits for any more after that
    if who == "a worker":
        waiting: Future[object] = pool.submit(other.receive, placed(index_of(LARGE)))
    else:
        waiting = pool.submit(mine.send, LARGE, index_of(LARGE))
    time.sleep(0.2)
    assert not waiting.done()
    (mine if who == "a worker" else other).close()
    with pytest.raises(InfraError, match="the other side has given this link up"):
        waiting.result(PATIENCE_S)


def test_a_meeting_whose_learner_has_gone_is_left_at_once(learner: Learner) -> None:
    learner.kill()
    begun = time.monotonic()
    with pytest.raises(InfraError, match="can't be had directly"):
        Line(learner.meeting, "sampler.1", 1, PATIENCE_S)
    assert time.monotonic() - begun < SOON_S
