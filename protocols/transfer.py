"""Artifacts between hosts that share no disk: by hash, in pieces, checked, and on from where they stopped.

::

    bench ─ Want(address, offset, length) ▶ broker ─ Chunk + piece ▶ bench         any order, each asked again when late
    farm ─ Offer(address, offset) + piece ▶ broker ─ Kept(offset) ──▶ farm         in order, back to what was kept

Both machines are pure: `handle` takes an answer, `tick` gives what to send now. A lost answer, a new connection or a
restarted broker cost a repetition of at most `WINDOW` pieces. What does not hash to its address is never handed out.

Invariants
* At most `WINDOW` pieces are on their way, and no content is longer than `MAX_BYTES`.
* An answer that does not fit (another address, offset or length) is ignored.
"""

from __future__ import annotations

import hashlib
import re

from protocols.messages import Chunk, Kept, Offer, Want

CHUNK_BYTES = 256 << 10
WINDOW = 4
RETRY_S = 3.0
MAX_BYTES = 256 << 20
_ADDRESS = re.compile(r"[0-9a-f]{64}")


def is_address(text: str) -> bool:
    """A sha256 in hex: also what makes it safe as the name of a file."""
    return _ADDRESS.fullmatch(text) is not None


class Download:
    """One artifact on its way to a bench.

    Example::

        download = Download(address)
        download.tick(now=0.0)                              # [Want(address, 0, 262144)]
        download.handle(Chunk(address, 0, 5), b"hello", now=0.1)
        download.content                                    # b"hello", if that is what `address` names
    """

    def __init__(self, address: str, max_bytes: int = MAX_BYTES) -> None:
        self.address = address
        self.content: bytes | None = None
        self.failure = ""
        """Why it will never come."""
        self._max_bytes = max_bytes
        self._total = -1
        self._pieces: dict[int, bytes] = {}
        self._asked: dict[int, float] = {}

    @property
    def ended(self) -> bool:
        return self.content is not None or bool(self.failure)

    def tick(self, now: float) -> list[Want]:
        if self.ended:
            return []
        late = [offset for offset, asked_at in self._asked.items() if now - asked_at >= RETRY_S]
        wanted = late + self._next(WINDOW - len(self._asked))
        for offset in wanted:
            self._asked[offset] = now
        return [Want(self.address, offset, self._length(offset)) for offset in wanted]

    def _next(self, count: int) -> list[int]:
        """Offsets that nobody was asked for yet; only the first while the length is unknown."""
        end = self._total if self._total >= 0 else 1
        missing = (o for o in range(0, end, CHUNK_BYTES) if o not in self._pieces and o not in self._asked)
        return [offset for _, offset in zip(range(count), missing, strict=False)]

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
                self._pieces[chunk.offset] = piece
                self._finish()

    def _finish(self) -> None:
        if sum(map(len, self._pieces.values())) < self._total:
            return
        content = b"".join(self._pieces[offset] for offset in sorted(self._pieces))
        self._pieces.clear()
        if hashlib.sha256(content).hexdigest() == self.address:
            self.content = content
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
