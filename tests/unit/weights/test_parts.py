"""Weights whose rows lie on several ranks: whole at every sampler and in the file, of one version."""

from __future__ import annotations

import functools
import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.weights import groups
from kbrl_async.weights import tensors as files
from kbrl_async.weights.direct import Line, Sender, index_of
from kbrl_async.weights.groups import Incoming, Meeting, Placed, TensorEntry, TransferGroup, share
from kbrl_async.weights.parts import Collector, PartSender
from protocols.records import PolicyVersion
from tests.unit.weights.test_direct import CPU, PATIENCE_S, Told, until

PARTS = 3


def weights(version: int) -> dict[str, torch.Tensor]:
    """Rows that don't divide, fewer rows than parts, and more than a bucket's alignment."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"embed": (65, 33), "bias": (7,), "norm": (2,), "last": (4, 5)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def rows(version: int, part: int) -> dict[str, torch.Tensor]:
    """As FSDP2 shares them out."""
    out = {}
    for name, tensor in weights(version).items():
        chunks = tensor.chunk(PARTS)
        out[name] = chunks[part].contiguous() if part < len(chunks) else tensor[:0]
    return out


def manifest(version: int) -> PolicyVersion:
    return PolicyVersion(version, None, version, "full", "", [1, 2], [-1.0])


class Ranks:
    """A learner of `PARTS` ranks, here threads of one process."""

    def __init__(self, told: Told, patience_s: float = PATIENCE_S) -> None:
        self.sender = Sender("127.0.0.1", CPU, patience_s, told.append, PARTS)
        self.meeting = self.sender.meeting
        self.others = [PartSender(self.meeting, part, CPU, patience_s, told.append) for part in range(1, PARTS)]

    def publish(self, version: int) -> None:
        self.sender.idle()
        for part, other in enumerate(self.others, 1):
            other.idle()
            other.hold(version, rows(version, part))
        self.sender.offer(manifest(version), rows(version, 0), index_of(weights(version)))

    def close(self) -> None:
        for other in (*self.others, self.sender):
            other.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def ranks(told: Told) -> Iterator[Ranks]:
    made = Ranks(told)
    yield made
    made.close()


class Sampler:
    def __init__(self, meeting: Meeting, name: str, workers: int = 1) -> None:
        self.line, size = Line(meeting, name, workers, PATIENCE_S), 1 + workers
        self._pool = ThreadPoolExecutor(workers)
        self.ends = list(
            self._pool.map(lambda rank: Incoming(meeting, self.line.link, rank, size, CPU, PATIENCE_S), range(1, size))
        )

    def take(self) -> tuple[int, list[dict[str, torch.Tensor]]]:
        """The version, and what each worker got."""
        offer = self.line.ask()
        taken = self._pool.map(
            lambda end: {name: tensor.clone() for name, tensor in end.tensors(offer.index)}, self.ends
        )
        return offer.manifest.version, list(taken)


def assert_whole(found: tuple[int, list[dict[str, torch.Tensor]]], version: int, workers: int = 1) -> None:
    assert found[0] == version
    assert len(found[1]) == workers
    for one in found[1]:
        assert one.keys() == weights(version).keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(65, 33), (7,), (2, 4), (16, 3)])
def test_a_part_has_the_rows_that_fsdp_gives_its_rank(shape: tuple[int, ...], parts: int) -> None:
    entry, tensor = TensorEntry("w", "BF16", list(shape)), torch.zeros(shape)
    chunks = [list(chunk.shape) for chunk in tensor.chunk(parts)]
    chunks += [[0, *shape[1:]]] * (parts - len(chunks))
    assert [share(entry, part, parts).shape for part in range(parts)] == chunks


def test_a_scalar_is_the_first_parts() -> None:
    sizes = [share(TensorEntry("s", "F32", []), part, PARTS).nbytes for part in range(PARTS)]
    assert sizes == [4, 0, 0]


def test_every_worker_of_every_sampler_gets_whole_tensors_of_the_newest_version(ranks: Ranks) -> None:
    ranks.publish(0)
    one, other = Sampler(ranks.meeting, "sampler.1", workers=2), Sampler(ranks.meeting, "sampler.2")
    for version in (1, 2):
        ranks.publish(version)
        assert_whole(one.take(), version, 2)
        assert_whole(other.take(), version)


def test_parts_that_leave_when_they_are_taken_arrive_whole(
    ranks: Ranks, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between GPUs, in several buckets, to two workers."""
    made = TransferGroup.__init__

    def paced(group: TransferGroup, *given: Any) -> None:
        made(group, *given)
        group.is_paced = True

    monkeypatch.setattr(TransferGroup, "__init__", paced)
    monkeypatch.setattr(groups, "buckets", functools.partial(groups.buckets, most=600))
    ranks.publish(0)
    sampler = Sampler(ranks.meeting, "sampler.1", workers=2)
    for version in (1, 2):
        ranks.publish(version)
        assert_whole(sampler.take(), version, 2)
    assert not told


def killed_in_transfer(meeting: Meeting, name: str = "sampler.1") -> None:
    """Between the first rank's rows and the second's."""
    received, given = TransferGroup.receive, itertools.count()

    def then_die(group: TransferGroup, pieces: Placed) -> torch.Tensor:
        if next(given):
            os.kill(os.getpid(), signal.SIGKILL)
        return received(group, pieces)

    TransferGroup.receive = then_die  # type: ignore[method-assign]
    line = Line(meeting, name, 1, PATIENCE_S)
    list(Incoming(meeting, line.link, 1, 2, CPU, PATIENCE_S).tensors(line.ask().index))


def test_a_sampler_that_is_killed_in_a_transfer_costs_no_rank_and_no_other_sampler_anything(
    ranks: Ranks, told: Told
) -> None:
    victim = mp.get_context("spawn").Process(target=killed_in_transfer, args=(ranks.meeting,))
    other = Sampler(ranks.meeting, "sampler.2")
    large = {"large": torch.zeros(PARTS * (16 << 20))}  # more than sockets hold
    for part, rank in enumerate(ranks.others, 1):
        rank.hold(1, {"large": large["large"].chunk(PARTS)[part]})
    ranks.sender.offer(manifest(1), {"large": large["large"].chunk(PARTS)[0]}, index_of(large))
    victim.start()
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    begun = time.monotonic()
    ranks.publish(2)
    assert time.monotonic() - begun < PATIENCE_S / 2
    until(lambda: any(line.startswith("sampler.1 gets its weights by files") for line in told))
    assert_whole(other.take(), 2)
    assert_whole(Sampler(ranks.meeting, "sampler.1").take(), 2)


def test_a_rank_that_holds_a_later_version_sends_nothing_and_the_transfer_ends_at_once(told: Told) -> None:
    patience_s = 10.0  # gloo waits so long for what was given up, once nobody has the group any more
    ranks = Ranks(told, patience_s)
    try:
        ranks.publish(1)
        sampler = Sampler(ranks.meeting, "sampler.1")
        ranks.others[0].idle()
        ranks.others[0].hold(2, rows(2, 1))
        begun = time.monotonic()
        with pytest.raises(InfraError, match="can't be had directly"):
            sampler.take()
        assert time.monotonic() - begun < patience_s / 2
        until(lambda: any("version 1 is not held by rank 1" in line for line in told))
    finally:
        ranks.close()


def test_a_rank_that_is_late_is_waited_for(ranks: Ranks) -> None:
    sampler = Sampler(ranks.meeting, "sampler.1")
    with ThreadPoolExecutor(2) as pool:
        ranks.others[0].hold(4, rows(4, 1))
        ranks.sender.offer(manifest(4), rows(4, 0), index_of(weights(4)))
        taken = pool.submit(sampler.take)
        until(lambda: ranks.sender.readers == 1)
        freed = pool.submit(ranks.sender.idle)
        time.sleep(0.3)
        assert not taken.done()
        assert not freed.done(), "nor is the next version made before all ranks have sent this one"
        ranks.others[1].hold(4, rows(4, 2))
        assert_whole(taken.result(), 4)
        freed.result(PATIENCE_S)


def test_the_file_is_that_of_a_learner_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    collector = Collector(ranks.meeting, PATIENCE_S)
    for version in (1, 2):
        ranks.publish(version)
        expected, given = weights(version), tmp_path / "whole"
        index = [
            TensorEntry(name, "BF16", list(expected[name].shape))
            for name in files.in_order((name, tensor.element_size()) for name, tensor in expected.items())
        ]
        came = collector.tensors(version, index, rows(version, 0))
        path = tmp_path / "parts"
        digest = files.write_as_they_come(path, [(e.name, e.dtype, e.shape) for e in index], came)
        assert digest == files.write(given, expected)
        assert path.read_bytes() == given.read_bytes()
    collector.close()


def test_a_file_whose_tensors_do_not_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did not come"):
        files.write_as_they_come(tmp_path / "x", [("a", "F32", [2])], [])
    with pytest.raises(ValueError, match="is not the tensor that comes next"):
        files.write_as_they_come(tmp_path / "x", [("a", "F32", [2])], [("b", torch.zeros(2))])
