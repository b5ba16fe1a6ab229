"""Artifacts of hosts that share no disk with the broker: kept in, and served from, the run's own artifact store.

::

    Offer + piece ─▶ work/in-OWNER-ADDRESS ─ all there and hashes to its address ─▶ objects/ab/abcd….so ─▶ Chunk + piece

The layout is that of `kbrl_async.kernels.backends.building.store`, so that local farms and benches meet remote ones
there; that module itself would load a compiler's worth of imports into the broker.

Invariants
* An object appears whole and right or not at all. Owners can't touch each other's uploads.
* An upload goes on after a restart; what nobody goes on with is gone after `IDLE_S`.
* Policy versions are served from where the learner has written them, to who has asked for the listing before.
* Bounded: artifact size, uploads at once per owner and in all, pieces a message, and the store (oldest objects go).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.durable import numbered
from kbrl_async.errors import DiskFull
from kbrl_async.weights import LISTED, MEETING, POLICY_PREFIX
from protocols.messages import Chunk, Kept, Offer, Want
from protocols.transfer import CHUNK_BYTES, MAX_BYTES, POLICY, PolicyFile, PolicyListing, is_address

MAX_UPLOADS = 32
MAX_UPLOADS_EACH = 4
IDLE_S = 120.0
MAX_POLICY_FILES = 64
_KEEP = 0.9


class _Upload:
    def __init__(self, path: Path, total: int, now: float) -> None:
        self.path, self.total, self.seen_at = path, total, now
        self.digest = hashlib.sha256()
        self.size = 0
        self._go_on()

    def _go_on(self) -> None:
        """With what a broker before us has kept of it; the hash of the whole is checked at the end as always."""
        try:
            if self.path.stat().st_size >= self.total:
                self.path.unlink()
                return
            with self.path.open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    self.digest.update(piece)
                    self.size += len(piece)
        except FileNotFoundError:
            return

    def add(self, piece: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(piece)
        self.digest.update(piece)
        self.size += len(piece)


class ArtifactExchange:
    """`want` and `offer` answer one message each; they raise `DiskFull`, and nothing else, for the host's fault."""

    def __init__(
        self, root: Path, max_bytes: int, clock: Callable[[], float] = time.monotonic, policies: Path | None = None
    ) -> None:
        """`policies`: the folder of versions, of which the newest is served."""
        self.root, self._max_bytes, self._clock, self._policies = root, max_bytes, clock, policies
        self._policy_files: OrderedDict[str, Path] = OrderedDict()
        """By address, those of the last listings."""
        self._uploads: dict[tuple[str, str], _Upload] = {}
        for name in ("objects", "work"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self.served = self.taken = 0
        """Bytes."""
        self._bytes = sum(size for _, size, _ in self._objects())
        self._sweep()

    def want(self, want: Want) -> tuple[Chunk, list[bytes]]:
        absent = Chunk(want.address, want.offset, -1)
        if want.address == POLICY and (listing := self._listing()):
            return Chunk(POLICY, 0, len(listing)), [listing]
        if not is_address(want.address) or want.offset < 0 or not 0 <= want.length <= CHUNK_BYTES:
            return absent, []
        try:
            with (self._policy_files.get(want.address) or self._object(want.address)).open("rb") as file:
                total = os.fstat(file.fileno()).st_size
                if want.offset > total:
                    return absent, []
                piece = os.pread(file.fileno(), want.length, want.offset)
        except OSError:
            return absent, []
        self.served += len(piece)
        return Chunk(want.address, want.offset, total), [piece]

    def _listing(self) -> bytes:
        """Of the newest version; empty where there is none that can be served."""
        found = numbered(self._policies, POLICY_PREFIX) if self._policies is not None else []
        if not found:
            return b""
        version, folder = found[-1]
        try:
            files = msgspec.json.decode((folder / LISTED).read_bytes(), type=list[PolicyFile])
        except (OSError, msgspec.DecodeError):
            return b""
        for file in files:
            self._policy_files[file.sha256] = folder / file.path
            self._policy_files.move_to_end(file.sha256)
        while len(self._policy_files) > MAX_POLICY_FILES:
            self._policy_files.popitem(last=False)
        meeting = folder.parent / MEETING
        with contextlib.suppress(OSError):
            return msgspec.json.encode(PolicyListing(version, files, msgspec.Raw(meeting.read_bytes())))
        return msgspec.json.encode(PolicyListing(version, files))

    def offer(self, owner: str, offer: Offer, payload: list[bytes]) -> Kept:
        if not is_address(offer.address) or not 0 <= offer.total <= MAX_BYTES or not 0 <= offer.offset <= offer.total:
            return Kept(offer.address[:64], 0, reason="no such artifact can be")
        if offer.total > self._max_bytes:
            return Kept(offer.address, 0, reason="it is larger than the store; raise compile_farm.store_max_bytes")
        if self._object(offer.address).exists():
            self._drop((owner, offer.address))
            return Kept(offer.address, offer.total, complete=True)
        upload = self._upload(owner, offer)
        if upload is None:
            return Kept(offer.address, 0)
        try:
            return self._add(owner, upload, offer, payload)
        except OSError as error:
            self._drop((owner, offer.address))
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"no space is left on the disk of {self.root}", "Free some: nothing is lost") from error
            return Kept(offer.address, 0)

    def _add(self, owner: str, upload: _Upload, offer: Offer, payload: list[bytes]) -> Kept:
        piece = b"".join(payload)
        fits = offer.offset == upload.size and len(piece) <= min(CHUNK_BYTES, upload.total - upload.size)
        if fits and (piece or not upload.total):
            upload.add(piece)
            self.taken += len(piece)
        if upload.size < upload.total or not fits:
            return Kept(offer.address, upload.size)
        del self._uploads[owner, offer.address]
        if upload.digest.hexdigest() != offer.address:
            upload.path.unlink(missing_ok=True)
            return Kept(offer.address, 0, reason="the content does not hash to its address")
        self._publish(upload, offer.address)
        return Kept(offer.address, upload.total, complete=True)

    def _publish(self, upload: _Upload, address: str) -> None:
        target = self._object(address)
        target.parent.mkdir(exist_ok=True)
        if not upload.path.exists():
            upload.path.touch()
        os.replace(upload.path, target)
        self._bytes += upload.total
        if self._bytes > self._max_bytes:
            self._evict(keep=target)

    def _upload(self, owner: str, offer: Offer) -> _Upload | None:
        """The upload that this piece belongs to; None where there are too many at once: ask again later."""
        now, key = self._clock(), (owner, offer.address)
        known = self._uploads.get(key)
        if known is not None and known.total == offer.total:
            known.seen_at = now
            return known
        for idle in [k for k, upload in self._uploads.items() if now - upload.seen_at > IDLE_S]:
            self._drop(idle)
        self._sweep()
        mine = sum(who == owner for who, _ in self._uploads)
        if mine >= MAX_UPLOADS_EACH or len(self._uploads) >= MAX_UPLOADS:
            return None
        name = hashlib.sha256(f"{owner}\0{offer.address}".encode()).hexdigest()
        self._uploads[key] = _Upload(self.root / "work" / f"in-{name}", offer.total, now)
        return self._uploads[key]

    def _sweep(self) -> None:
        """Uploads that began with a broker before us and that nobody goes on with."""
        ours = {upload.path for upload in self._uploads.values()}
        for path in (self.root / "work").glob("in-*"):
            with contextlib.suppress(FileNotFoundError):
                if path not in ours and time.time() - path.stat().st_mtime > IDLE_S:
                    path.unlink()

    def _drop(self, key: tuple[str, str]) -> None:
        upload = self._uploads.pop(key, None)
        if upload is not None:
            upload.path.unlink(missing_ok=True)

    def _object(self, address: str) -> Path:
        return self.root / "objects" / address[:2] / f"{address}.so"

    def _objects(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in (self.root / "objects").glob("*/[!.]*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def _evict(self, keep: Path) -> None:
        objects = sorted(self._objects())
        self._bytes = sum(size for _, size, _ in objects)
        for _, size, path in objects:
            if self._bytes <= self._max_bytes * _KEEP:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                self._bytes -= size
