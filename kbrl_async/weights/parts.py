"""A version whose rows lie on several ranks of a learner: each sends its own to samplers, and to rank 0 for the file.

::

    rank 0   Sender: the head of every transfer, and its rows ─┐
    rank r   PartSender: its rows ────────────────────────────┴─▶ samplers           group/n/r, offer/n/k ─▶ sent/n/k
    rank r   PartSender: its rows, once more ─▶ rank 0, Collector: a bucket at a time ─▶ the version's file

Invariants
* A rank sends rows of the version that is asked for, or none: it waits until it holds that one, and gives the transfer
  up where it holds a later one.
* No rank holds more of a version than its own rows and one bucket.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.weights.direct import ASK_S, BROKEN, LOOK_S, SENT
from kbrl_async.weights.groups import (
    LOST,
    BucketMemory,
    Meeting,
    Placed,
    Store,
    TensorEntry,
    TransferGroup,
    TransferOffer,
    buckets,
    filled,
    gone,
    whole,
)

HOST = torch.device("cpu")
FILES = "files"
"""The link of rank 0's own writer."""


class FileRequest(msgspec.Struct, frozen=True):
    """What rank 0 writes now."""

    version: int
    index: list[TensorEntry]


class PartSender:
    """One rank's rows of the newest version, for whoever rank 0 has told of it.

    part = PartSender(meeting, 1, torch.device("cuda:1"), patience_s=30.0)
    part.idle()                  # before what it holds is overwritten
    part.hold(17, rows)          # contiguous, on the host or its device
    """

    def __init__(
        self,
        meeting: Meeting,
        part: int,
        device: torch.device,
        patience_s: float,
        told: Callable[[str], object] = lambda _: None,
    ) -> None:
        """InfraError where the meeting can't be reached from here. `told` hears of samplers that are given up."""
        self._meeting, self._part, self._device, self._told = meeting, part, device, told
        self.patience_s = patience_s
        self._changed = threading.Condition()
        self._held: dict[int, Mapping[str, torch.Tensor]] = {}
        self._readers = Counter[int]()
        self._links: dict[str, int] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=work, args=(meeting.store(patience_s),), name=f"weights-{part}", daemon=True)
            for work in (self._accept, self._give_to_files)
        ]
        for thread in self._threads:
            thread.start()

    def hold(self, version: int, rows: Mapping[str, torch.Tensor]) -> None:
        with self._changed:
            self._held[version] = rows
            self._changed.notify_all()

    def idle(self, keep: Collection[int] = ()) -> None:
        """Holds only versions to `keep` any more, and waits until nobody reads another."""
        with self._changed:
            self._held = {version: rows for version, rows in self._held.items() if version in keep}
            self._changed.wait_for(lambda: not [version for version in +self._readers if version not in keep])

    def close(self) -> None:
        """Ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in list(self._threads):
            thread.join(self.patience_s)

    @contextlib.contextmanager
    def _reading(self, version: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """What is held of that version; InfraError where it is another's, or does not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or max(self._held, default=-1) >= version, self.patience_s
            )  # fmt: skip
            if version not in self._held:
                raise InfraError(f"version {version} is not held by rank {self._part}", "The sampler asks again")
            self._readers[version] += 1
            held = self._held[version]
        try:
            yield held
        finally:
            with self._changed:
                self._readers[version] -= 1
                self._changed.notify_all()

    # ── to samplers ──────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, store: Store) -> None:
        with contextlib.suppress(InfraError, *LOST):  # the store ends with rank 0
            seen = 0
            while not self._closed:
                time.sleep(LOOK_S)
                for link in range(seen + 1, store.add("joined", 0) + 1):
                    seen = link
                    thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
                    self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                    thread.start()

    def _serve(self, link: int) -> None:
        name, group = f"link {link}", None
        try:
            store = self._meeting.store(self.patience_s)
            name, workers = msgspec.json.decode(store.get(f"join/{link}"), type=tuple[str, int])
            self._links[name] = link
            group = TransferGroup(
                self._meeting, link, 0, 1 + workers, self._device, self.patience_s, self._part
            )  # fmt: skip
            for count in itertools.count():
                if not self._is_due(store, f"offer/{link}/{count}", lambda: self._links[name] == link):
                    return
                self._send(store, group, f"{link}/{count}")
        except (InfraError, msgspec.DecodeError, *LOST) as error:
            self._told(f"{name} gets no part from rank {self._part}: {(str(error).splitlines() or [''])[0]}")
        finally:
            if group is not None:
                group.close()

    def _is_due(self, store: Store, key: str, is_wanted: Callable[[], bool]) -> bool:
        while not self._closed and is_wanted():
            if store.check([key]):
                return True
            time.sleep(ASK_S)
        return False

    def _send(self, store: Store, group: TransferGroup, place: str) -> None:
        sent = BROKEN
        try:
            offer = msgspec.msgpack.decode(store.get(f"offer/{place}"), type=TransferOffer)
            group.patience_s = self.patience_s
            with self._reading(offer.manifest.version) as rows:
                group.send(rows, offer.index)
            sent = SENT
        finally:
            store.add(f"sent/{place}", sent)

    # ── to the file ──────────────────────────────────────────────────────────────────────────────────────────────

    def _give_to_files(self, store: Store) -> None:
        group = None
        try:
            for count in itertools.count():
                if not self._is_due(store, f"file/{count}", lambda: True):
                    return
                wanted = msgspec.msgpack.decode(store.get(f"file/{count}"), type=FileRequest)
                group = group or TransferGroup(self._meeting, FILES, 0, 2, HOST, self.patience_s, self._part)
                with self._reading(wanted.version) as rows:
                    group.send({name: tensor.cpu() for name, tensor in rows.items()}, wanted.index)
        except (InfraError, msgspec.DecodeError, *LOST) as error:
            self._told(f"rank {self._part} gives nothing to the file: {(str(error).splitlines() or [''])[0]}")
        finally:
            if group is not None:
                group.close()


class Collector:
    """Rank 0's side of the file: whole tensors of a version out of all ranks' rows."""

    def __init__(self, meeting: Meeting, patience_s: float) -> None:
        self._meeting, self._patience_s, self._count = meeting, patience_s, 0
        self._groups: list[TransferGroup] = []
        self._store: Store | None = None

    def tensors(
        self, version: int, index: Sequence[TensorEntry], mine: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """On the host, each there until the next one is asked for. `mine`: this rank's rows. InfraError where another
        rank has gone, or does not hold that version any more."""
        store = self._asked(version, index)
        own, memory = BucketMemory(HOST), BucketMemory(HOST)

        def from_here(pieces: Placed) -> torch.Tensor:
            return filled(pieces, mine, own.room(pieces))

        sources = [from_here, *(group.receive for group in self._groups)]
        for bucket in buckets(index):
            yield from whole(bucket, sources, memory)
        store.delete_key(f"file/{self._count}")
        self._count += 1

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _asked(self, version: int, index: Sequence[TensorEntry]) -> Store:
        try:
            if self._store is None:
                self._store = self._meeting.store(self._patience_s)
            self._store.set(f"file/{self._count}", msgspec.msgpack.encode(FileRequest(version, list(index))))
        except LOST as error:
            raise gone(error) from error
        for part in range(1 + len(self._groups), self._meeting.parts):
            self._groups.append(TransferGroup(self._meeting, FILES, 1, 2, HOST, self._patience_s, part))
        return self._store
