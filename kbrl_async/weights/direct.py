"""Weights from the learner straight into samplers, by torch.distributed: NCCL between GPUs, gloo between CPUs.

::

    learner: Sender ─ TCPStore(host, port), its address in policies/meeting.json
        newest ─────────────────▶ a sampler polls it                                      Line.newest
        joined: n, join/n ◀────── one link a sampler: rank 0 and the workers of its engine Line, Incoming
        want/n/k ◀─────────────── the k-th transfer of this link                          Line.ask
        offer/n/k ──────────────▶ manifest, and name, dtype, shape of every tensor
        broadcasts, at most `BUCKET_BYTES` each ═══════════════════════════════════▶ Incoming.tensors
        sent/n/k ◀─────────────── by other ranks of a learner, each of which sends its part    `parts`

Each sampler has groups of its own with the learner, so that one that dies or is late costs only itself: after
`weights.stalled_s` without progress its link is given up, and it goes by the files, which are written anyway.

Invariants
* The learner waits for no sampler but through `idle`, which ends that long after the last bucket that moved.
* A transfer is of one version: its weights are held until the last reader is done (`idle`), at every rank.
* Who does not know the meeting's token finds nothing in the store. The weights themselves travel unencrypted.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch

from kbrl_async.errors import InfraError
from kbrl_async.weights.groups import (
    LOST,
    Meeting,
    Store,
    TensorEntry,
    TransferGroup,
    TransferOffer,
    dist,
    gone,
)
from kbrl_async.weights.tensors import NAMES
from protocols.records import PolicyVersion

LOOK_S = 0.05
ASK_S = 0.005
SENT, BROKEN = 1, -1_000_000
"""What a rank adds to `sent/n/k` when its part has gone out, or can't."""


# ── the learner's side ──────────────────────────────────────────────────────────────────────────────────────────


def _listening(host: str, patience_s: float) -> Store:
    """A store that can be reached at this address only: by itself it would listen everywhere."""
    try:
        server = socket.create_server((host, 0))
        port, patience = server.getsockname()[1], datetime.timedelta(seconds=patience_s)
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=server.detach()
        )
    except (OSError, *LOST) as error:
        raise gone(error) from error


class Sender:
    """The newest version's weights, for every sampler that asks.

    sender = Sender("127.0.0.1", torch.device("cuda"), patience_s=30.0, told=log.warning)
    sender.offer(manifest, tensors)     # at once; samplers fetch it
    sender.idle()                       # before `tensors` are overwritten
    """

    def __init__(
        self, host: str, device: torch.device, patience_s: float, told: Callable[[str], object], parts: int = 1
    ) -> None:
        """`told` hears of samplers that are given up. `parts`: ranks that send, this one included (`parts`). InfraError
        where `host` is not one of this machine."""
        self._device, self._told, self.patience_s = device, told, patience_s
        """Of a transfer that makes no progress; what is set here holds from the next one on."""
        server = _listening(host, patience_s)
        self._server: Store | None = server
        self.meeting = Meeting(host, server.port, secrets.token_hex(16), parts)
        self._changed = threading.Condition()
        self._offer: tuple[TransferOffer, Mapping[str, torch.Tensor]] | None = None
        self.readers = 0
        self._links: dict[str, int] = {}
        self._closed = False
        self._store = self.meeting.store(patience_s)
        self._store.set("newest", "-1")
        self._threads = [threading.Thread(target=self._accept, name="weights", daemon=True)]
        self._threads[0].start()

    def offer(
        self,
        manifest: PolicyVersion,
        tensors: Mapping[str, torch.Tensor],
        index: Sequence[TensorEntry] | None = None,
    ) -> None:
        """Contiguous tensors on the host or on the sender's device; what was offered before is no longer. `index`: of
        whole tensors, where these are one part's rows of them."""
        entries = index_of(tensors) if index is None else list(index)
        with self._changed:
            self._offer = TransferOffer(manifest, entries), tensors
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
        with contextlib.suppress(InfraError, *LOST):  # the store ends with this process
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
        except (InfraError, msgspec.DecodeError, *LOST) as error:
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
            self._wait_for_parts(store, f"sent/{link}/{count}")
            store.delete_key(f"offer/{link}/{count}")
            store.delete_key(f"want/{link}/{count}")
        finally:
            with self._changed:
                self.readers -= 1
                self._changed.notify_all()
        return True

    def _wait_for_parts(self, store: Store, key: str) -> None:
        """Until all other ranks have sent theirs: from then on none of them reads its weights for this link."""
        until = time.monotonic() + self.patience_s
        while self.meeting.parts > 1 and (sent := int(store.add(key, 0))) < SENT * (self.meeting.parts - 1):
            if sent < 0 or time.monotonic() > until:
                raise InfraError("a rank of the learner could not send its part", "See its log")
            time.sleep(ASK_S)
        if self.meeting.parts > 1:
            store.delete_key(key)


def index_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]


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
    except (msgspec.DecodeError, ValueError, *LOST) as error:
        raise gone(error) from error
