"""Copies of a policy's weights: whose memory each one takes."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch

from kbrl_async.learning.policies.snapshot import HostCopy, Snapshots

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


def places(copy: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in copy.values()]


def test_a_version_takes_the_memory_of_one_that_nobody_reads() -> None:
    memory = Snapshots(torch.bfloat16)
    first = places(memory.of(1, WEIGHTS.items()))
    assert places(memory.of(2, WEIGHTS.items())) == first
    second = memory.of(3, WEIGHTS.items(), keep={2})
    assert set(places(second)).isdisjoint(first)
    assert second["a"].dtype == torch.bfloat16


def test_a_second_copys_memory_is_there_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: SimpleQueue[HostCopy] = SimpleQueue()
    own = HostCopy.another

    def kept(copy: HostCopy) -> HostCopy:
        ready.put(made := own(copy))
        return made

    monkeypatch.setattr(HostCopy, "another", kept)
    memory = Snapshots(torch.bfloat16, ahead=True)
    first = memory.of(1, WEIGHTS.items())
    second = ready.get(timeout=30)
    copied = memory.of(2, WEIGHTS.items(), keep={1})
    assert copied["a"].equal(WEIGHTS["a"].bfloat16())
    assert set(places(copied)).isdisjoint(places(first))
    assert places(second.of(WEIGHTS.items())) == places(copied)
    assert ready.empty()
