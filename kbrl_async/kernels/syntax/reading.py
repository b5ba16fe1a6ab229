"""One source, read once: its hashes for the leak rules, and its terms for the offline embedder.

Three groups of terms, each hashed to 32 bits: `operations` (what is computed: names, pairs and triples of the chain),
`grams` (runs of normalised tokens) and `nodes` (edges of the syntax tree).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence

import msgspec

from kbrl_async.kernels.syntax.normal import Normal
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope, Unreadable

__all__ = ["GROUPS", "ReferenceFacts", "Unreadable", "read"]

GROUPS = ("operations", "grams", "nodes")
SYNONYMS = {"mm": "matmul", "bmm": "matmul", "truedivide": "div", "multiply": "mul", "subtract": "sub", "plus": "add"}
"""Other names of an operation; for the terms only: the hashes keep them apart."""
MAX_TERMS = 4_000


class ReferenceFacts(msgspec.Struct, frozen=True):
    """What is known of a reference. The hashes are 63 bits; `chain_hash` is 0 where no operation was found."""

    code_hash: int
    chain_hash: int
    operations: bytes = b""
    grams: bytes = b""
    nodes: bytes = b""
    """Term groups: little-endian 32-bit hashes, repeated as often as they occur."""


def read(source: str, entry_point: str = "Model") -> ReferenceFacts:
    """Reads `source`. Raises `Unreadable` with a reason that can be counted."""
    try:
        scope = Scope(source, entry_point)
        normal = Normal(scope)
        chain = operations(scope)
    except RecursionError:
        raise Unreadable("nests too deeply") from None
    numbered = (
        f"{token}{number}" if number else token for token, number in zip(normal.tokens, normal.numbered, strict=True)
    )
    names = [SYNONYMS.get(name, name) for name in chain]
    return ReferenceFacts(
        _hash63(numbered),
        _hash63(chain) if chain else 0,
        _pack(_runs(names, (1, 2, 3))),
        _pack(_runs(normal.tokens, (3, 5))),
        _pack(normal.bigrams),
    )


def _hash63(words: Iterable[str]) -> int:
    digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _runs(words: Sequence[str], lengths: Sequence[int]) -> Iterable[str]:
    """Every run of so many neighbours; pairs of operations also without their order, because statements move."""
    for length in lengths:
        for start in range(len(words) - length + 1):
            yield " ".join(words[start : start + length])


def _pack(terms: Iterable[str]) -> bytes:
    hashes = [zlib.crc32(term.encode("utf-8", "surrogatepass")) for term in terms][:MAX_TERMS]
    return struct.pack(f"<{len(hashes)}I", *hashes)
