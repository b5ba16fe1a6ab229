"""The live index is bounded and versioned, and the leak rules hold for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kbrl_async.rollouts.retrieval import LiveIndex, Query, Retriever
from kbrl_async.rollouts.retrieval.leakage import SAME_PROBLEM
from tests.unit.rollouts.retrieval.making import build, entry, module


@pytest.fixture
def retriever(tmp_path: Path) -> Retriever:
    build(tmp_path, [entry(0, module("x = torch.sin(x)"), backend="triton")])
    return Retriever.open(tmp_path)


def learn(live: LiveIndex, retriever: Retriever, number: int, op: str = "relu", **changes: Any) -> bool:
    facts = {"problem_id": f"L1/{number}", "verified": True, "speedup": 1.0, **changes}
    made = entry(number, module(f"x = F.{op}(x)"), **facts)
    return live.add(made, *retriever.read(made.reference))


def test_a_verified_kernel_joins_and_is_found(retriever: Retriever) -> None:
    live = LiveIndex(4)
    learn(live, retriever, 1)
    found = retriever.retrieve(Query(module("x = F.gelu(x)"), "L1/9", "c", only_backend=True), live.snapshot())
    assert [hit.entry.uid for hit in found.hits] == ["test:1"]
    assert found.version == f"{retriever.build}+1"


def test_its_own_problem_never_sees_it(retriever: Retriever) -> None:
    live = LiveIndex(4)
    learn(live, retriever, 1)
    found = retriever.retrieve(Query(module("x = F.gelu(x)"), "L1/1"), live.snapshot())
    assert found.refused[SAME_PROBLEM] == 1
    assert [hit.entry.uid for hit in found.hits] == ["test:0"]


def test_a_snapshot_does_not_change_and_its_version_tells_it_apart(retriever: Retriever) -> None:
    live = LiveIndex(4)
    learn(live, retriever, 1)
    before = live.snapshot()
    learn(live, retriever, 2)
    assert [e.uid for e in before.entries] == ["test:1"]
    assert (before.version, live.snapshot().version) == (1, 2)


def test_a_better_kernel_of_the_same_problem_replaces_the_old_one(retriever: Retriever) -> None:
    live = LiveIndex(4)
    assert learn(live, retriever, 1, speedup=1.0)
    assert learn(live, retriever, 1, speedup=2.0)
    assert not learn(live, retriever, 1, speedup=1.5)
    assert (len(live), live.snapshot().entries[0].speedup) == (1, 2.0)


def test_the_problem_that_improved_longest_ago_leaves_a_full_index(retriever: Retriever) -> None:
    live = LiveIndex(2)
    for number, speedup in ((1, 1.0), (2, 1.0), (1, 2.0), (3, 1.0)):
        learn(live, retriever, number, speedup=speedup)
    assert {e.problem_id for e in live.snapshot().entries} == {"L1/1", "L1/3"}


@pytest.mark.parametrize(
    "changes", [{"verified": False}, {"problem_id": ""}, {"kernel": ""}, {"kernel": "x" * 200_000}]
)
def test_what_is_unverified_or_unfit_does_not_join(retriever: Retriever, changes: dict[str, Any]) -> None:
    live = LiveIndex(2)
    assert not learn(live, retriever, 1, **changes)
    assert live.snapshot().version == 0


def test_an_entry_can_be_taken_out_again(retriever: Retriever) -> None:
    live = LiveIndex(2)
    learn(live, retriever, 1)
    assert live.evict("L1/1")
    assert not live.evict("L1/1")
    assert (len(live), live.snapshot().version) == (0, 2)


def test_a_capacity_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LiveIndex(0)
