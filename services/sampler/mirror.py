"""The newest policy version for a sampler that shares no disk with the learner: fetched through the broker, or from
`policy_url`, into a `policies` folder of its own, which it then follows like any other.

::

    Want(POLICY) ─▶ listing: files by hash ─▶ Want(hash, offset) … ─▶ policies/.HASH.part ─ all right ─▶ policy-v17/

Invariants
* A version appears whole or not at all, and each of its files has the hash of the listing.
* A file goes on where it stopped, after a restart of either side too; of a large one nothing but `WINDOW` pieces is
  held in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from pathlib import Path, PurePosixPath

import msgspec

from kbrl_async.durable import write_bytes, write_folder
from kbrl_async.errors import InfraError
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.remote import RemotePolicies, open_remote
from kbrl_async.weights import MEETING
from protocols.messages import Chunk, Message, Want
from protocols.transfer import CHUNK_BYTES, POLICY, Download, PolicyFile, PolicyListing
from services.runtime.channel import Channel
from services.runtime.service import Service

LOOK_S = 0.25
TICK_S = 0.01
ANSWER_S = 10.0
STALLED_S = 60.0
"""Without a piece; then all begins with a new listing."""
WINDOW = 32
MAX_BYTES = 1 << 40
KEPT = 2


def has_own(policies: Path) -> bool:
    """The folder is this sampler's, not a link to the learner's on a shared disk."""
    return not policies.is_symlink()


class Mirror:
    """`run` until it is cancelled."""

    def __init__(self, service: Service) -> None:
        self._service, self._policies = service, service.policies
        self._remote: RemotePolicies | None = open_remote(service.config.policy_url)
        self._channel: Channel | None = None
        self._download: Download | None = None
        self._listing: asyncio.Future[bytes] | None = None
        self._heard_at = 0.0
        self._version = -1

    async def run(self) -> None:
        self._policies.mkdir(parents=True, exist_ok=True)
        route = secrets.token_hex(8).encode()
        self._channel = Channel(self._service.addresses.work, route, self._received, self._service.keys)
        try:
            while True:
                try:
                    await (self._from_broker() if self._remote is None else self._from_url(self._remote))
                except InfraError as error:
                    self._service.log.warning("policy not fetched", reason=str(error))
                    await asyncio.sleep(ANSWER_S)
                await asyncio.sleep(LOOK_S)
        finally:
            self._channel.close()

    async def _from_url(self, remote: RemotePolicies) -> None:
        found = await asyncio.to_thread(remote.versions)
        if found and found[-1] > self._version:
            await asyncio.to_thread(remote.fetch, found[-1], self._policies)
            self._appeared(found[-1])

    async def _from_broker(self) -> None:
        listing = await self._ask()
        if listing is None:
            return
        meeting, told = self._policies / MEETING, bytes(listing.meeting)
        if told != b"null" and (not meeting.is_file() or meeting.read_bytes() != told):
            write_bytes(meeting, told)
        if listing.version <= self._version:
            return
        for file in listing.files:
            await self._fetch(file)
        target = versions.version_folder(self._policies, listing.version)
        await asyncio.to_thread(write_folder, target, lambda folder: self._fill(folder, listing.files))
        self._appeared(listing.version)

    def _appeared(self, version: int) -> None:
        self._version = version
        versions.collect_garbage(self._policies, KEPT)
        for part in self._policies.glob(".*.part"):
            part.unlink()
        self._service.log.info("fetched", policy_version=version)

    def _fill(self, folder: Path, files: list[PolicyFile]) -> None:
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self._part(file), path)

    def _part(self, file: PolicyFile) -> Path:
        return self._policies / f".{file.sha256}.part"

    async def _ask(self) -> PolicyListing | None:
        """None while there is no version."""
        self._listing = asyncio.get_running_loop().create_future()
        self._say(Want(POLICY, 0, CHUNK_BYTES))
        try:
            async with asyncio.timeout(ANSWER_S):
                text = await self._listing
        except TimeoutError:
            return None  # the broker is away: its workers know what to do
        if not text:
            return None
        try:
            listing = msgspec.json.decode(text, type=PolicyListing)
        except msgspec.DecodeError as error:
            raise InfraError(f"the broker's listing of the policy can't be read: {error}", "Use one version") from error
        if any(not is_inside(file.path) for file in listing.files):
            raise InfraError("the broker's listing of the policy names files outside of it", "Look at the broker")
        return listing

    async def _fetch(self, file: PolicyFile) -> None:
        path, digest, begun = self._part(file), hashlib.sha256(), 0
        if path.is_file():
            with path.open("rb") as kept:
                digest = await asyncio.to_thread(hashlib.file_digest, kept, "sha256")
            begun = path.stat().st_size
        if begun == file.size and digest.hexdigest() == file.sha256:
            return
        if begun >= file.size:
            path.unlink(missing_ok=True)
            digest, begun = hashlib.sha256(), 0
        with path.open("ab", buffering=0) as out:
            await self._until_there(Download(file.sha256, MAX_BYTES, out.write, (begun, digest), WINDOW))

    async def _until_there(self, download: Download) -> None:
        self._download, self._heard_at = download, time.monotonic()
        try:
            while not download.ended:
                self._tick()
                await asyncio.sleep(TICK_S)
                if time.monotonic() - self._heard_at > STALLED_S:
                    raise InfraError("the broker sends no piece of the policy", "Is it there? It is tried again")
        finally:
            self._download = None
        if download.failure:
            (self._policies / f".{download.address}.part").unlink(missing_ok=True)
            raise InfraError(f"a file of the policy can't be had: {download.failure}", "It is tried again")

    def _tick(self) -> None:
        if self._download is not None:
            for want in self._download.tick(time.monotonic()):
                self._say(want)

    def _say(self, want: Want) -> None:
        assert self._channel is not None
        self._channel.poll()
        self._channel.send(want, [])

    def _received(self, message: Message, payload: list[bytes]) -> None:
        if not isinstance(message, Chunk):
            return
        if message.address == POLICY:
            if self._listing is not None and not self._listing.done():
                self._listing.set_result(b"".join(payload))
        elif self._download is not None:
            self._heard_at = time.monotonic()
            self._download.handle(message, b"".join(payload))
            self._tick()


def is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")
