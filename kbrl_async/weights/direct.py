"""Weights from the learner straight into samplers, by torch.distributed: NCCL between GPUs, gloo between CPUs.

::

    learner: Sender ─ TCPStore(host, port), its address in policies/meeting.json
        newest ─────────────────▶ a sampler polls it                                      Line.newest
        joined: n, join/n ◀────── one link a sampler: rank 0 and the workers of its engine Line, Group
        want/n/k ◀─────────────── the k-th transfer of this link                          Line.ask
        offer/n/k ──────────────▶ manifest, and name, dtype, shape of every tensor
        broadcasts, at most `BUCKET_BYTES` each ═══════════════════════════════════▶ Group.tensors

Each sampler has a group of its own with the learner, so that one that dies or is late costs only itself: after
`weights.stalled_s` without progress its link is given up, and it goes by the files, which are written anyway.

Invariants
* The learner waits for no sampler but through `idle`, which ends that long after the last bucket that moved.
* A transfer is of one version: its weights are held until the last reader is done (`idle`).
* Who does not know the meeting's token finds nothing in the store. The weights themselves travel unencrypted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed

from kbrl_async.errors import InfraError
from kbrl_async.weights.tensors import DTYPES, NAMES, raw
from protocols.records import PolicyVersion

dist: Any = torch.distributed  # its process groups and stores are written in C++, and untyped
Store = Any
BUCKET_BYTES = 256 << 20
LOOK_S = 0.05
ASK_S = 0.005
_ALIGN = 16
_LOST = (RuntimeError, dist.DistError)
"""What torch.distributed raises where the other side has gone, or does not answer in time."""


class Meeting(msgspec.Struct, frozen=True):
    """Where a learner sends from."""

    host: str
    port: int
    token: str

    def store(self, patience_s: float) -> Store:
        """A connection of one's own: a store serves one caller at a time. InfraError where nobody is there."""
        try:
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=datetime.timedelta(seconds=patience_s))
        except _LOST as error:
            raise _gone(error) from error
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


def _gone(error: Exception) -> InfraError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InfraError(f"weights can't be had directly: {first[:160]}", "Samplers go on by the files of the versions")


# ── the group of one link ───────────────────────────────────────────────────────────────────────────────────────


class TransferGroup:
    """Rank 0 (the learner) and the workers of one sampler's engine, on their devices."""

    def __init__(
        self, meeting: Meeting, link: int, rank: int, size: int, device: torch.device, patience_s: float
    ) -> None:
        self._device, self.patience_s, self._rank = device, patience_s, rank
        store = dist.PrefixStore(f"group/{link}", meeting.store(patience_s))
        try:
            self._group = (
                _nccl(store, rank, size, device)
                if device.type == "cuda"
                else _gloo(store, rank, size, meeting, patience_s)
            )
        except _LOST as error:
            raise _gone(error) from error
        self._stage = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, tensors: Mapping[str, torch.Tensor], index: Sequence[TensorEntry]) -> None:
        """InfraError where a worker has gone or makes no progress."""
        with self._at_work():
            for bucket in buckets(index):
                stage = self._room(bucket)
                for entry, place in bucket:
                    stage[place : place + entry.nbytes].copy_(raw(tensors[entry.name]), non_blocking=True)
                self._broadcast(stage)

    def tensors(self, index: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same at the other end: each tensor is there until the next one is asked for. InfraError as in `send`."""
        with self._at_work():
            for bucket in buckets(index):
                stage = self._room(bucket)
                self._broadcast(stage)
                for entry, place in bucket:
                    part = stage[place : place + entry.nbytes]
                    yield entry.name, part.view(DTYPES[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Whatever is under way fails, on both sides."""
        with contextlib.suppress(*_LOST):
            self._group.abort()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """On a stream beside that of training or sampling."""
        if self._device.type != "cuda":
            yield
            return
        make: Any = torch.cuda.Stream
        stream = make(self._device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _room(self, bucket: Sequence[tuple[TensorEntry, int]]) -> torch.Tensor:
        last, place = bucket[-1]
        needed = place + last.nbytes
        if len(self._stage) < needed:
            self._stage = torch.empty(0, dtype=torch.uint8, device=self._device)  # freed first
            self._stage = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return self._stage[:needed]

    def _broadcast(self, stage: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = True
        options.timeout = datetime.timedelta(seconds=self.patience_s)
        until = time.monotonic() + self.patience_s
        try:
            for piece in torch.split(stage, BUCKET_BYTES):
                work = self._group.broadcast([piece], options)
                if self._device.type != "cuda":
                    work.wait()
                    continue
                while not work.is_completed():
                    if time.monotonic() > until:
                        raise RuntimeError(f"no progress for {self.patience_s:g} s")
                    time.sleep(0.0002)
                work.wait()
        except _LOST as error:
            self.close()
            raise _gone(error) from error


def buckets(index: Sequence[TensorEntry], most: int = BUCKET_BYTES) -> Iterator[list[tuple[TensorEntry, int]]]:
    """Tensors that go together, each with its place; both sides cut alike. One above `most` goes alone."""
    bucket: list[tuple[TensorEntry, int]] = []
    end = 0
    for entry in index:
        if bucket and end + entry.nbytes > most:
            yield bucket
            bucket, end = [], 0
        bucket.append((entry, end))
        end += entry.nbytes + -entry.nbytes % _ALIGN
    if bucket:
        yield bucket


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


# ── the learner's side ──────────────────────────────────────────────────────────────────────────────────────────


def _listening(host: str, patience_s: float) -> Store:
    """A store that can be reached at this address only: by itself it would listen everywhere."""
    try:
        server = socket.create_server((host, 0))
        port, patience = server.getsockname()[1], datetime.timedelta(seconds=patience_s)
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=server.detach()
        )
    except (OSError, *_LOST) as error:
        raise _gone(error) from error


class Sender:
    """The newest version's weights, for every sampler that asks.

    sender = Sender("127.0.0.1", torch.device("cuda"), patience_s=30.0, told=log.warning)
    sender.offer(manifest, tensors)     # at once; samplers fetch it
    sender.idle()                       # before `tensors` are overwritten
    """

    def __init__(self, host: str, device: torch.device, patience_s: float, told: Callable[[str], object]) -> None:
        """`told` hears of samplers that are given up. InfraError where `host` is not one of this machine."""
        self._device, self._told, self.patience_s = device, told, patience_s
        """Of a transfer that makes no progress; what is set here holds from the next one on."""
        server = _listening(host, patience_s)
        self._server: Store | None = server
        self.meeting = Meeting(host, server.port, secrets.token_hex(16))
        self._changed = threading.Condition()
        self._offer: tuple[TransferOffer, Mapping[str, torch.Tensor]] | None = None
        self.readers = 0
        self._links: dict[str, int] = {}
        self._closed = False
        self._store = self.meeting.store(patience_s)
        self._store.set("newest", "-1")
        self._threads = [threading.Thread(target=self._accept, name="weights", daemon=True)]
        self._threads[0].start()

    def offer(self, manifest: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Contiguous tensors on the host or on the sender's device; what was offered before is no longer."""
        index = [TensorEntry(name, NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]
        with self._changed:
            self._offer = TransferOffer(manifest, index), tensors
            self._changed.notify_all()
        self._store.set("newest", str(manifest.version))

    def idle(self) -> None:
        """Takes the offer back, and waits until nobody reads it."""
        with self._changed:
            self._offer = None
            self._changed.wait_for(lambda: not self.readers)

    def close(self) -> None:
        """Ends the threads: one that is inside torch when the process ends would abort it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in list(self._threads):
            thread.join(self.patience_s)
        self._server = None

    def _accept(self) -> None:
        with contextlib.suppress(InfraError, *_LOST):  # the store ends with this process
            store, seen = self.meeting.store(self.patience_s), 0
            while not self._closed:
                time.sleep(LOOK_S)
                for link in range(seen + 1, store.add("joined", 0) + 1):
                    seen = link
                    self._threads = [thread for thread in self._threads if thread.is_alive()]
                    self._threads.append(threading.Thread(target=self._serve, args=(link,), daemon=True))
                    self._threads[-1].start()

    def _serve(self, link: int) -> None:
        name, group = f"link {link}", None
        try:
            store = self.meeting.store(self.patience_s)
            name, workers = msgspec.json.decode(store.get(f"join/{link}"), type=tuple[str, int])
            self._links[name] = link
            group = TransferGroup(self.meeting, link, 0, 1 + workers, self._device, self.patience_s)
            for count in range(1 << 62):
                if not self._wanted(store, name, link, count) or not self._transfer(store, group, link, count):
                    return
        except (InfraError, msgspec.DecodeError, *_LOST) as error:
            self._told(f"{name} gets its weights by files: {(str(error).splitlines() or [''])[0]}")
        finally:
            if group is not None:
                group.close()

    def _wanted(self, store: Store, name: str, link: int, count: int) -> bool:
        """Waits until the sampler asks; False where it has come back by another link, or all is over."""
        while not self._closed and self._links[name] == link:
            if store.check([f"want/{link}/{count}"]):
                return True
            time.sleep(ASK_S)
        return False

    def _transfer(self, store: Store, group: TransferGroup, link: int, count: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._offer is not None)
            if self._offer is None:
                return False
            offer, tensors = self._offer
            self.readers += 1
        group.patience_s = self.patience_s
        try:
            store.set(f"offer/{link}/{count}", msgspec.msgpack.encode(offer))
            group.send(tensors, offer.index)
            store.delete_key(f"offer/{link}/{count}")
            store.delete_key(f"want/{link}/{count}")
        finally:
            with self._changed:
                self.readers -= 1
                self._changed.notify_all()
        return True


# ── the sampler's side ──────────────────────────────────────────────────────────────────────────────────────────


class Line:
    """A sampler's line to the learner: what is new, and the next transfer. All methods may block; one thread at a time.
    Each raises InfraError where the learner has gone or does not answer in time."""

    def __init__(self, meeting: Meeting, name: str, workers: int, patience_s: float) -> None:
        """`workers` of the engine join the group as ranks 1 … `workers`; `name` stands for this sampler."""
        self.meeting, self.size, self._count = meeting, 1 + workers, 0
        self.patience_s = patience_s
        """For a transfer to begin."""
        self._store = meeting.store(patience_s)
        with _asking():
            self.link = int(self._store.add("joined", 1))
            self._store.set(f"join/{self.link}", msgspec.json.encode((name, workers)).decode())

    def newest(self) -> int:
        """The version that is offered; −1 before the first."""
        with _asking():
            return int(self._store.get("newest"))

    def ask(self) -> TransferOffer:
        """Begins a transfer: the workers have to take its tensors now."""
        with _asking():
            place = f"{self.link}/{self._count}"
            self._store.set(f"want/{place}", "")
            patience = datetime.timedelta(seconds=self.patience_s)
            self._store.wait([f"offer/{place}"], patience)  # the learner may be between two versions
            self._count += 1
            return msgspec.msgpack.decode(self._store.get(f"offer/{place}"), type=TransferOffer)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, ValueError, *_LOST) as error:
        raise _gone(error) from error
