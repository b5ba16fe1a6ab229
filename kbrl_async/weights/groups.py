"""What a learner and the workers of one sampler's engine send tensors by: a store to meet in, and process groups.

::

    part 0 ─ rows [0, n/R) of every tensor ──▶ group/LINK/0 ─┐
    part 1 ─ rows [n/R, 2n/R) ───────────────▶ group/LINK/1 ─┴▶ a worker: whole tensors, a bucket after the other

A learner whose ranks share the weights out (FSDP2) has as many parts as ranks: each sends its own rows, and nobody
holds more of a version than its share and one bucket. A learner that has them whole is its only part.

Invariants
* Both sides cut the same index alike, into buckets and these into parts: nothing but bytes is sent.
* Each part has a group of its own with the workers, of which it is rank 0.
* Who waits looks every `LOOK_S` whether it waits for somebody: the store ends with the learner, and whoever gives a
  link up says so in it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed

from kbrl_async.errors import InfraError
from kbrl_async.weights.tensors import DTYPES, raw
from protocols.records import PolicyVersion

dist: Any = torch.distributed  # its process groups and stores are written in C++, and untyped
Store = Any
BUCKET_BYTES = 256 << 20
LOOK_S = 1.0
"""How often who waits for the other side asks whether it will come."""
DRAINED_S = 10.0
"""A kernel of a group that was aborted has ended by then."""
_ALIGN = 16
_ENDED = "ended"
"""In the store, of one part and link: one side has given it up."""
LOST = (RuntimeError, dist.DistError)
"""What torch.distributed raises where the other side has gone, or does not answer in time."""


class Meeting(msgspec.Struct, frozen=True):
    """Where a learner sends from."""

    host: str
    port: int
    token: str
    parts: int = 1
    """Ranks that send, each its rows of every tensor."""

    def store(self, patience_s: float) -> Store:
        """A connection of one's own: a store serves one caller at a time. InfraError where nobody is there."""
        try:
            # By itself a store tries the address of a learner that has gone until its patience is over.
            socket.create_connection((self.host, self.port), patience_s).close()
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=datetime.timedelta(seconds=patience_s))
        except (OSError, *LOST) as error:
            raise gone(error) from error
        return dist.PrefixStore(self.token, store)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a transfer."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


class TransferOffer(msgspec.Struct, frozen=True):
    """One transfer. The manifest has no hash: the file may not be written yet; canaries prove what was received."""

    manifest: PolicyVersion
    index: list[TensorEntry]


def gone(error: Exception) -> InfraError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InfraError(f"weights can't be had directly: {first[:160]}", "Samplers go on by the files of the versions")


# ── who sends what ──────────────────────────────────────────────────────────────────────────────────────────────

Placed = list[tuple[TensorEntry, int]]
"""Tensors that go together, each with its place in bytes."""


def buckets(index: Sequence[TensorEntry], most: int = BUCKET_BYTES) -> Iterator[Placed]:
    """Tensors that go together, each with its place; both sides cut alike. One above `most` goes alone."""
    bucket: list[TensorEntry] = []
    end = 0
    for entry in index:
        if bucket and end + entry.nbytes > most:
            yield placed(bucket)
            bucket, end = [], 0
        bucket.append(entry)
        end += _aligned(entry.nbytes)
    if bucket:
        yield placed(bucket)


def placed(entries: Iterable[TensorEntry]) -> Placed:
    """One behind the other."""
    out, end = [], 0
    for entry in entries:
        out.append((entry, end))
        end += _aligned(entry.nbytes)
    return out


def _aligned(size: int) -> int:
    return size + -size % _ALIGN


def share(entry: TensorEntry, part: int, parts: int) -> TensorEntry:
    """The rows of one part, as `torch.chunk` and FSDP2 share them out; a scalar is the first part's."""
    if parts == 1:
        return entry
    first, last = _rows(entry, part, parts)
    if not entry.shape:
        return entry if last > first else TensorEntry(entry.name, entry.dtype, [0])
    return TensorEntry(entry.name, entry.dtype, [last - first, *entry.shape[1:]])


def _rows(entry: TensorEntry, part: int, parts: int) -> tuple[int, int]:
    rows = entry.shape[0] if entry.shape else 1
    each = -(-rows // parts)
    return min(rows, part * each), min(rows, (part + 1) * each)


def shares(bucket: Placed, part: int, parts: int) -> Placed:
    """What one part sends of a bucket; nothing of a tensor that has fewer rows than there are parts."""
    if parts == 1:
        return bucket
    return placed(piece for entry, _ in bucket if (piece := share(entry, part, parts)).nbytes)


def filled(pieces: Placed, tensors: Mapping[str, torch.Tensor], stage: torch.Tensor) -> torch.Tensor:
    """`stage` [bytes] with these tensors at their places."""
    for entry, place in pieces:
        stage[place : place + entry.nbytes].copy_(raw(tensors[entry.name]), non_blocking=True)
    return stage


def whole(
    bucket: Placed, sources: Sequence[Callable[[Placed], torch.Tensor]], memory: BucketMemory
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket out of what each part gives of it; each is there until the next bucket's."""
    if len(sources) == 1:
        stage = sources[0](bucket)
    else:
        stage = memory.room(bucket)
        places = {entry.name: (entry, place) for entry, place in bucket}
        for part, source in enumerate(sources):
            if not (pieces := shares(bucket, part, len(sources))):
                continue
            given = source(pieces)
            for piece, at in pieces:
                entry, place = places[piece.name]
                first, _ = _rows(entry, part, len(sources))
                begin = place + first * (entry.nbytes // max(1, entry.shape[0] if entry.shape else 1))
                stage[begin : begin + piece.nbytes].copy_(given[at : at + piece.nbytes], non_blocking=True)
    for entry, place in bucket:
        yield entry.name, stage[place : place + entry.nbytes].view(DTYPES[entry.dtype]).view(entry.shape)


class BucketMemory:
    """Of one bucket at a time, as large as the largest so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stage = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, bucket: Placed) -> torch.Tensor:
        """uint8 [bytes]; what it held before is gone."""
        last, place = bucket[-1]
        needed = place + last.nbytes
        if len(self._stage) < needed:
            self._stage = torch.empty(0, dtype=torch.uint8, device=self._device)  # freed first
            self._stage = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._stage[:needed]


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a stream beside that of training or sampling."""
    if device.type != "cuda":
        yield
        return
    make: Any = torch.cuda.Stream
    stream = make(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def drained(device: torch.device, patience_s: float = DRAINED_S) -> bool:
    """Whether all that was begun on the current stream ends. A kernel of a group that was given up must: whoever waits
    for the device later would wait for it for ever."""
    if device.type != "cuda":
        return True
    make: Any = torch.cuda.Event
    event, until = make(), time.monotonic() + patience_s
    event.record()
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


# ── the groups of one link ──────────────────────────────────────────────────────────────────────────────────────


class TransferGroup:
    """Rank 0 (one part of the learner) and the workers of one sampler's engine, on their devices."""

    def __init__(
        self,
        meeting: Meeting,
        link: int | str,
        rank: int,
        size: int,
        device: torch.device,
        patience_s: float,
        part: int = 0,
    ) -> None:
        """InfraError where somebody of it does not come."""
        self._device, self.patience_s, self._part, self._parts = device, patience_s, part, meeting.parts
        self._memory = BucketMemory(device)
        store = dist.PrefixStore(f"group/{link}/{part}" if part else f"group/{link}", meeting.store(patience_s))
        self._pace = dist.PrefixStore(f"pace/{link}/{part}", meeting.store(patience_s))
        self._receivers, self._count = size - 1, 0
        self.is_paced = device.type == "cuda"
        """A bucket leaves when its receivers take it (`_await_receivers`)."""
        try:
            self._group = (
                _nccl(store, rank, size, device)
                if device.type == "cuda"
                else _gloo(store, rank, size, meeting, patience_s)
            )
        except LOST as error:
            raise gone(error) from error

    def send(self, tensors: Mapping[str, torch.Tensor], index: Sequence[TensorEntry]) -> None:
        """`tensors`: this part's rows of those in `index`. InfraError where a worker has gone or makes no progress."""
        with beside(self._device):
            for bucket in buckets(index):
                if pieces := shares(bucket, self._part, self._parts):
                    stage = filled(pieces, tensors, self._memory.room(pieces))
                    self._await_receivers()
                    self._broadcast(stage)

    def receive(self, pieces: Placed) -> torch.Tensor:
        """The same at the other end: uint8 [bytes], valid until the next call. InfraError as in `send`."""
        stage = self._memory.room(pieces)
        self._announce()
        self._broadcast(stage)
        return stage

    def close(self) -> None:
        """Whatever is under way fails, on both sides."""
        with contextlib.suppress(*LOST):
            self._pace.set(_ENDED, "")
        with contextlib.suppress(*LOST):
            self._group.abort()

    def _announce(self) -> None:
        """Tells the sender that this worker takes the next bucket."""
        if not self.is_paced:
            return
        try:
            if self._pace.add(f"takes/{self._count}", 1) == self._receivers:
                self._pace.set(f"ready/{self._count}", "")
        except LOST as error:
            raise gone(error) from error
        self._count += 1

    def _await_receivers(self) -> None:
        """Until all workers take the next bucket. A kernel of NCCL that waited on the sender's GPU for them would stop
        whatever synchronises that GPU, such as an allocation of the update beside; where other ranks wait for that
        update, and the workers for their parts, nobody would go on."""
        if not self.is_paced:
            return
        try:
            self._wait_for_ready(f"ready/{self._count}")
            self._pace.delete_key(f"ready/{self._count}")
            self._pace.delete_key(f"takes/{self._count}")
        except LOST as error:
            self.close()
            raise gone(error) from error
        self._count += 1

    def _wait_for_ready(self, key: str) -> None:
        """One of `LOST` where it does not come."""
        look, until = datetime.timedelta(seconds=min(LOOK_S, self.patience_s)), time.monotonic() + self.patience_s
        while True:
            try:
                self._pace.wait([key], look)
                return
            except dist.DistStoreError:
                if time.monotonic() > until:
                    raise
                self._check_link()

    def _check_link(self) -> None:
        """One of `LOST` where nobody is at its other end any more."""
        if self._pace.check([_ENDED]):
            raise RuntimeError("the other side has given this link up")

    def _broadcast(self, stage: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = datetime.timedelta(seconds=self.patience_s)
        until = time.monotonic() + self.patience_s
        try:
            for piece in torch.split(stage, BUCKET_BYTES):
                work = self._group.broadcast([piece], options)
                self._wait_for(work, until)
                work.wait()
        except LOST as error:
            self.close()
            raise gone(error) from error

    def _wait_for(self, work: Any, until: float) -> None:
        """Until it is done. One of `LOST` after `until`, or where the other side has gone: gloo sees the sockets of a
        process that died, and a kernel of NCCL would wait for it for ever."""
        look_at = time.monotonic() + LOOK_S
        while not work.is_completed():
            if (now := time.monotonic()) > until:
                raise RuntimeError(f"no progress for {self.patience_s:g} s")
            if now > look_at:
                look_at = now + LOOK_S
                self._check_link()
            time.sleep(0.0002)


class Incoming:
    """A worker's end of a link: a group with each part of the learner."""

    def __init__(
        self, meeting: Meeting, link: int, rank: int, size: int, device: torch.device, patience_s: float
    ) -> None:
        """InfraError where one of them does not come."""
        self._device, self._memory = device, BucketMemory(device)
        self._groups: list[TransferGroup] = []
        try:
            for part in range(meeting.parts):
                self._groups.append(TransferGroup(meeting, link, rank, size, device, patience_s, part))
        except InfraError:
            self.close()
            raise

    def tensors(self, index: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole ones, each there until the next one is asked for. InfraError where a part of the learner has gone or
        makes no progress; another error where this process can't go on on its device then."""
        with beside(self._device):
            try:
                for bucket in buckets(index):
                    yield from whole(bucket, [group.receive for group in self._groups], self._memory)
            except InfraError as error:
                self.close()  # one part's is all parts' end
                if not drained(self._device):
                    raise RuntimeError(f"a transfer was given up, and its kernel did not end: {error}") from error
                raise

    def close(self) -> None:
        """Whatever is under way fails, on both sides."""
        for group in self._groups:
            group.close()


def _gloo(store: Store, rank: int, size: int, meeting: Meeting, patience_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=patience_s)
    is_local = meeting.host == "localhost" or meeting.host.startswith("127.")
    create = dist.ProcessGroupGloo.create_device
    # On one host nobody else shall reach what gloo listens on.
    options._devices = [create(hostname="127.0.0.1") if is_local else dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=30)
    # A sampler that dies must not take this process along, as torch's watchdogs would: `_broadcast` sees it itself.
    mine = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
