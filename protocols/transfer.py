"""Artifacts between hosts that share no disk: by hash, in pieces, checked, and on from where they stopped.

::

    bench ─ Want(address, offset, length) ▶ broker ─ Chunk + piece ▶ bench         any order, each asked again when late
    farm ─ Offer(address, offset) + piece ▶ broker ─ Kept(offset) ──▶ farm         in order, back to what was kept

Both machines are pure: `handle` takes an answer, `tick` gives what to send now. A lost answer, a new connection or a
restarted broker cost a repetition of at most `WINDOW` pieces. What does not hash to its address is never handed out.

Invariants
* At most `WINDOW` pieces are on their way, and no content is longer than `MAX_BYTES`, unless its owner says otherwise.
* An answer that does not fit (another address, offset or length) is ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import msgspec

from protocols.messages import Chunk, Kept, Offer, Want

CHUNK_BYTES = 256 << 10
WINDOW = 4
RETRY_S = 3.0
MAX_BYTES = 256 << 20
POLICY = "policy"
"""In the place of an address: the listing of the newest policy version."""
_ADDRESS = re.compile(r"[0-9a-f]{64}")


def is_address(text: str) -> bool:
    """A sha256 in hex: also what makes it safe as the name of a file."""
    return _ADDRESS.fullmatch(text) is not None


class PolicyFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a policy version."""

    path: str
    """Relative to the version's folder."""
    sha256: str
    size: int


class PolicyListing(msgspec.Struct, frozen=True):
    """What `Want(POLICY)` is answered with, as JSON: the newest version, each file of which is an artifact."""

    version: int
    files: list[PolicyFile]
    meeting: msgspec.Raw = msgspec.Raw(b"null")
    """Where the learner sends weights from, if it does; see `kbrl_async.weights.direct`."""


class Download:
    """One artifact on its way to a bench, or a file of a policy to a sampler.

    Example::

        download = Download(address)
        download.tick(now=0.0)                              # [Want(address, 0, 262144)]
        download.handle(Chunk(address, 0, 5), b"hello", now=0.1)
        download.content                                    # b"hello", if that is what `address` names
    """

    def __init__(
        self,
        address: str,
        max_bytes: int = MAX_BYTES,
        sink: Callable[[bytes], object] | None = None,
        begun: tuple[int, hashlib._Hash] | None = None,
        window: int = WINDOW,
    ) -> None:
        """`sink` takes the pieces in their order as they come, and nothing is held here. It has the first bytes
        already: `begun` is their number and hash."""
        self.address = address
        self.content: bytes | None = None
        """All of it; empty where a `sink` has taken it."""
        self.failure = ""
        """Why it will never come."""
        self._max_bytes, self._window = max_bytes, window
        self._total = -1
        self._parts: list[bytes] = []
        self._sink = sink or self._parts.append
        self._end, self._digest = begun or (0, hashlib.sha256())
        """Of what has come without a gap."""
        self._next_offset = self._end
        self._early: dict[int, bytes] = {}
        self._asked: dict[int, float] = {}

    @property
    def ended(self) -> bool:
        return self.content is not None or bool(self.failure)

    def tick(self, now: float) -> list[Want]:
        if self.ended:
            return []
        wanted = [offset for offset, asked_at in self._asked.items() if now - asked_at >= RETRY_S]
        while len(self._asked) < self._window and self._may_ask():
            wanted.append(self._next_offset)
            self._asked[self._next_offset] = now
            self._next_offset += CHUNK_BYTES
        for offset in wanted:
            self._asked[offset] = now
        return [Want(self.address, offset, self._length(offset)) for offset in wanted]

    def _may_ask(self) -> bool:
        """Only the first piece while the length is unknown, and none far ahead of one that is late."""
        if self._total < 0:
            return not self._asked
        return self._next_offset < min(self._total, self._end + 2 * self._window * CHUNK_BYTES)

    def _length(self, offset: int) -> int:
        return CHUNK_BYTES if self._total < 0 else min(CHUNK_BYTES, self._total - offset)

    def handle(self, chunk: Chunk, piece: bytes) -> None:
        if self.ended or chunk.address != self.address:
            return
        if chunk.total < 0:
            self.failure = "the artifact is no longer in the store"
        elif chunk.total > self._max_bytes:
            self.failure = f"the artifact has {chunk.total} bytes, at most {self._max_bytes} are taken"
        elif self._total not in (-1, chunk.total):
            self.failure = "the artifact changed its length"
        elif chunk.offset in self._asked:
            self._total = chunk.total
            if len(piece) == self._length(chunk.offset):
                del self._asked[chunk.offset]
                self._early[chunk.offset] = piece
                self._take()

    def _take(self) -> None:
        while (piece := self._early.pop(self._end, None)) is not None:
            self._sink(piece)
            self._digest.update(piece)
            self._end += len(piece)
            if not piece:
                break  # of an empty artifact
        if self._end < self._total:
            return
        if self._digest.hexdigest() == self.address:
            self.content = b"".join(self._parts)
        else:
            self.failure = "the artifact that came is not the one that was asked for"


class Upload:
    """One artifact on its way from a farm; of a large one it first asks what is kept already."""

    def __init__(self, content: bytes) -> None:
        self.address = hashlib.sha256(content).hexdigest()
        self.ended = False
        self.failure = "" if len(content) <= MAX_BYTES else f"an artifact of {len(content)} bytes, at most {MAX_BYTES}"
        self._content = content
        self._kept = -1
        """The broker has so many bytes; −1: it was not asked yet."""
        self._sent = 0
        self._heard_at: float | None = None

    def tick(self, now: float) -> list[tuple[Offer, list[bytes]]]:
        if self.ended or self.failure:
            return []
        if self._heard_at is None and len(self._content) <= CHUNK_BYTES:
            # All of it at once: asking what is kept first would cost a round trip for each kernel.
            self._heard_at, self._kept, self._sent = now, 0, len(self._content)
            return [(Offer(self.address, 0, len(self._content)), [self._content])]
        if self._heard_at is None or now - self._heard_at >= RETRY_S:
            # Nothing was heard for long: ask what is kept, and go on there.
            self._heard_at = now
            self._kept = -1
            return [(Offer(self.address, 0, len(self._content)), [])]
        out: list[tuple[Offer, list[bytes]]] = []
        while self._kept >= 0 and self._sent < min(len(self._content), self._kept + WINDOW * CHUNK_BYTES):
            piece = self._content[self._sent : self._sent + CHUNK_BYTES]
            out.append((Offer(self.address, self._sent, len(self._content)), [piece]))
            self._sent += len(piece)
        return out

    def handle(self, kept: Kept, now: float) -> None:
        if kept.address != self.address or self.ended:
            return
        self._heard_at = now
        if kept.complete:
            self.ended = True
        elif kept.reason:
            self.failure = kept.reason
        elif 0 <= kept.offset <= len(self._content):
            if self._kept < 0 or kept.offset < self._kept:
                self._sent = kept.offset
            self._kept = kept.offset
