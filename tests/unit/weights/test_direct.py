"""Weights from the learner to samplers without a file: whole, of one version, and nobody hangs on who has gone."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.weights.direct import Line, Sender, index_of
from kbrl_async.weights.groups import (
    Incoming,
    Meeting,
    TensorEntry,
    TransferGroup,
    TransferOffer,
    buckets,
    placed,
)
from protocols.records import PolicyVersion

CPU = torch.device("cpu")
PATIENCE_S = 60.0


def weights(version: int) -> dict[str, torch.Tensor]:
    shapes = {"embed": (64, 32), "norm": (7,), "scalar": ()}
    return {
        name: torch.full(shape, float(version), dtype=torch.bfloat16 if name == "norm" else torch.float32)
        for name, shape in shapes.items()
    }


def manifest(version: int) -> PolicyVersion:
    return PolicyVersion(version, None, version, "full", "", [1, 2], [-1.0])


class Told(list[str]):
    """What the sender said of samplers that it gave up."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def sender(told: Told) -> Iterator[Sender]:
    made = Sender("127.0.0.1", CPU, PATIENCE_S, told.append)
    yield made
    made.close()


class Sampler:
    """One with `workers` processes, here threads."""

    def __init__(self, meeting: Meeting, name: str = "sampler.1", workers: int = 1, wait_s: float = PATIENCE_S) -> None:
        self.line = Line(meeting, name, workers, wait_s)
        self._pool = ThreadPoolExecutor(workers)
        link, size = self.line.link, 1 + workers
        self.groups = list(self._pool.map(lambda r: Incoming(meeting, link, r, size, CPU, wait_s), range(1, size)))

    def take(self) -> list[tuple[TransferOffer, dict[str, torch.Tensor]]]:
        """What each worker got."""
        offer = self.line.ask()

        def of(group: Incoming) -> tuple[TransferOffer, dict[str, torch.Tensor]]:
            return offer, {name: tensor.clone() for name, tensor in group.tensors(offer.index)}

        return list(self._pool.map(of, self.groups))


def assert_is(taken: tuple[TransferOffer, dict[str, torch.Tensor]], version: int) -> None:
    offer, found = taken
    assert offer.manifest.version == version
    expected = weights(version)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_worker_of_every_sampler_gets_the_newest_version(sender: Sender) -> None:
    one, other = Sampler(sender.meeting, "sampler.1", workers=2), Sampler(sender.meeting, "sampler.2")
    assert one.line.newest() == -1
    for version in range(2):
        sender.idle()
        sender.offer(manifest(version), weights(version))
        assert one.line.newest() == version
        for taken in (*one.take(), *other.take()):
            assert_is(taken, version)


def test_a_sampler_that_joins_late_gets_what_is_offered_now(sender: Sender) -> None:
    for version in range(3):
        sender.offer(manifest(version), weights(version))
    (taken,) = Sampler(sender.meeting).take()
    assert_is(taken, 2)


def test_weights_are_held_until_their_last_reader_is_done(sender: Sender) -> None:
    sampler = Sampler(sender.meeting)
    mine = weights(1)
    sender.offer(manifest(1), mine)
    offer = sampler.line.ask()
    until(lambda: sender.readers == 1)
    freed = threading.Thread(target=sender.idle)
    freed.start()
    freed.join(0.1)
    assert freed.is_alive(), "somebody reads"
    found = {name: tensor.clone() for name, tensor in sampler.groups[0].tensors(offer.index)}
    freed.join(PATIENCE_S)
    assert not freed.is_alive()
    assert_is((offer, found), 1)


def test_a_sampler_that_does_not_go_on_costs_its_own_link_and_the_others_nothing(told: Told) -> None:
    sender = Sender("127.0.0.1", CPU, PATIENCE_S, told.append)
    stuck, other = Sampler(sender.meeting, "sampler.1"), Sampler(sender.meeting, "sampler.2")
    sender.offer(manifest(1), weights(1))
    sender.patience_s = 0.5  # of this transfer only: links are made, and all others move, as slowly as the host is
    stuck.line.ask()  # and takes nothing
    sender.patience_s = PATIENCE_S
    assert_is(other.take()[0], 1)
    begun = time.monotonic()
    until(lambda: len(told) == 1)
    sender.idle()
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert told[0].startswith("sampler.1 gets its weights by files")
    stuck.line.patience_s = 0.5
    with pytest.raises(InfraError, match="can't be had directly"):
        stuck.take()
    again = Sampler(sender.meeting, "sampler.1")
    sender.offer(manifest(2), weights(2))
    assert_is(again.take()[0], 2)
    sender.close()


def killed_in_transfer(meeting: Meeting) -> None:
    line = Line(meeting, "sampler.1", 1, PATIENCE_S)
    group = Incoming(meeting, line.link, 1, 2, CPU, PATIENCE_S)  # dropped, it would close while it is greeted
    line.ask()
    assert group
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sampler_that_is_killed_in_a_transfer_is_given_up_at_once(sender: Sender, told: Told) -> None:
    victim = mp.get_context("spawn").Process(target=killed_in_transfer, args=(sender.meeting,))
    victim.start()
    sender.offer(manifest(1), {"large": torch.zeros(16 << 20)})  # more than sockets hold
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    begun = time.monotonic()
    sender.idle()
    assert time.monotonic() - begun < PATIENCE_S / 2
    until(lambda: len(told) == 1)
    sender.offer(manifest(2), weights(2))
    assert_is(Sampler(sender.meeting, "sampler.1").take()[0], 2)


def test_without_a_learner_or_with_another_token_there_is_nothing(sender: Sender) -> None:
    with pytest.raises(InfraError, match="can't be had directly"):
        Line(Meeting("127.0.0.1", 1, "x"), "sampler.1", 1, 0.2)
    strangers = list[Line]()

    def has_come() -> bool:
        with contextlib.suppress(InfraError):  # the host was slower than it would wait
            strangers.append(Line(Meeting("127.0.0.1", sender.meeting.port, "guessed"), "sampler.1", 1, 0.2))
        return bool(strangers)

    until(has_come)
    with pytest.raises(InfraError, match="can't be had directly"):
        strangers[0].newest()


def test_both_sides_cut_alike_and_nothing_is_left_out() -> None:
    index = [TensorEntry(f"t{i}", "BF16", [i, 3]) for i in range(40)] + [TensorEntry("large", "F32", [4096])]
    cut = list(buckets(index, most=300))
    assert [entry for bucket in cut for entry, _ in bucket] == index
    for bucket in cut:
        ends = [place + entry.nbytes for entry, place in bucket]
        assert all(place % 16 == 0 for _, place in bucket)
        assert all(end <= place for end, (_, place) in zip(ends, bucket[1:], strict=False))
        assert len(bucket) == 1 or ends[-1] <= 300


def test_a_sender_listens_at_its_address_only(sender: Sender) -> None:
    socket.create_connection(("127.0.0.1", sender.meeting.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", sender.meeting.port))


def test_between_gpus_a_bucket_leaves_when_its_receiver_takes_it(sender: Sender) -> None:
    groups: dict[int, TransferGroup] = {}

    def join(rank: int) -> None:
        groups[rank] = TransferGroup(sender.meeting, "paced", rank, 2, CPU, PATIENCE_S)
        groups[rank].is_paced = True

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
        tensors = {"a": torch.full((1000,), 3.0), "b": torch.full((10,), 4.0)}
        index = index_of(tensors)
        for _ in range(2):
            sending = pool.submit(groups[0].send, tensors, index)
            time.sleep(0.2)
            assert not sending.done()
            got = groups[1].receive(placed(index)).clone()
            sending.result(PATIENCE_S)
            assert got[:4000].view(torch.float32).eq(3.0).all()
    for group in groups.values():
        group.close()


def test_a_receiver_that_does_not_come_costs_the_sender_its_patience_and_no_more(sender: Sender) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda rank: TransferGroup(sender.meeting, "alone", rank, 2, CPU, PATIENCE_S), range(2))
        mine, other = made
    mine.is_paced, mine.patience_s = True, 0.3
    with pytest.raises(InfraError, match="can't be had directly"):
        mine.send({"a": torch.ones(3)}, index_of({"a": torch.ones(3)}))
    other.close()
