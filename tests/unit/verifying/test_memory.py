"""Memory of the trusted side: what a bench has freed is the system's again, however long it runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from kbrl_async.verifying import memory
from kbrl_async.verifying import reference as module
from kbrl_async.verifying.options import BenchOptions
from kbrl_async.verifying.reference import References
from protocols.records import Problem

PIECE, PIECES = 100_000, 500
"""Below the size from which glibc maps memory for each piece alone."""


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not hasattr(memory._libc, "malloc_trim"), reason="another C library gives back by its own rules")
def test_what_was_freed_between_what_is_in_use_is_given_back() -> None:
    kept = [bytearray(PIECE) for _ in range(PIECES)]
    del kept[::2]
    before = own_bytes()
    memory.give_back()
    assert before - own_bytes() > PIECE * PIECES // 4
    assert len(kept) == PIECES // 2


class Idle:
    """A reference without a child."""

    uses = 0
    host_bytes = 0

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_each_reference_that_goes_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(module, "Reference", Idle)
    monkeypatch.setattr(module, "give_back", lambda: given.append(len(references)))
    references = References(cast(Any, None), BenchOptions(references=2), random.Random(0))
    for name in "abca":
        references.get(Problem(name, 1, name, name))
    assert given == [2, 2]
