"""Which harvested rows an index keeps: no row twice, and of one reference only its best kernels.

The AI-CUDA-Engineer-Archive holds over a hundred kernels for each of its problems: kept whole, they would fill every
search with one reference.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from kbrl_async.rollouts.retrieval.entries import Entry


class Choice(msgspec.Struct, frozen=True):
    """`kept`: positions in the order of harvesting. `dropped`: counted reasons by source."""

    kept: frozenset[int]
    dropped: dict[int, Counter[str]]


def choose(harvests: Iterable[tuple[int, Sequence[Entry]]], per_reference: int) -> Choice:
    """Goes once through the harvests: (source, its items in order)."""
    dropped: dict[int, Counter[str]] = defaultdict(Counter)
    uids: set[bytes] = set()
    contents: set[bytes] = set()
    rivals: dict[tuple[bytes, str], list[tuple[tuple[bool, float], int, int]]] = defaultdict(list)
    position = -1
    for source, items in harvests:
        for entry in items:
            position += 1
            uid, reference = _digest(entry.uid), _digest(entry.reference.strip())
            content = _digest(f"{reference.hex()}{entry.kernel}")
            if uid in uids or content in contents:
                dropped[source]["uid seen before" if uid in uids else "same example seen before"] += 1
                continue
            uids.add(uid)
            contents.add(content)
            # later rows lose ties, so that adding a source never pushes out equals of an earlier one
            rivals[reference, entry.backend].append((worth(entry), -position, source))
    kept: set[int] = set()
    for group in rivals.values():
        ranked = sorted(group, reverse=True)
        kept.update(-position for _, position, _ in ranked[:per_reference])
        for _, _, source in ranked[per_reference:]:
            dropped[source]["better kernels of the same reference"] += 1
    return Choice(frozenset(kept), dict(dropped))


def worth(entry: Entry) -> tuple[bool, float]:
    """Verified before unverified, then by speedup."""
    return entry.verified, entry.speedup or 0.0


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
