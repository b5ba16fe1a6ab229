"""Re-ranking: similarity first, then backend, verified speed and diversity."""

from __future__ import annotations

import numpy as np
import pytest

from kbrl_async.rollouts.retrieval.ranking import Rankable, RankOptions, rank, speed_part

APART = np.eye(4, dtype=np.float32)


def candidate(reference: int, similarity: float = 0.5, **changes: object) -> Rankable:
    facts = {"backend": "c", "verified": True, "speedup": 1.0, **changes}
    return Rankable(similarity, reference=reference, **facts)  # type: ignore[arg-type]


def order(candidates: list[Rankable], vectors: np.ndarray = APART, k: int = 3, backend: str = "c") -> list[int]:
    return [ranked.position for ranked in rank(candidates, vectors[: len(candidates)], k, backend)]


def test_the_more_similar_one_is_first() -> None:
    assert order([candidate(1, 0.3), candidate(2, 0.6)]) == [1, 0]


def test_the_backend_that_was_asked_for_beats_its_family_and_that_beats_others() -> None:
    rows = [candidate(1, backend="triton"), candidate(2, backend="cuda-nvrtc"), candidate(3, backend="cuda")]
    assert order(rows, backend="cuda") == [2, 1, 0]


def test_a_faster_verified_kernel_is_preferred() -> None:
    assert order([candidate(1, speedup=0.5), candidate(2, speedup=4.0)]) == [1, 0]


def test_an_unverified_speedup_counts_for_nothing() -> None:
    assert order([candidate(1, speedup=100.0, verified=False), candidate(2, speedup=1.5)]) == [1, 0]


def test_of_two_alike_the_second_gives_way_to_something_different() -> None:
    alike = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    assert order([candidate(1, 0.6), candidate(2, 0.6), candidate(3, 0.5)], alike, k=2) == [0, 2]


def test_one_example_per_reference() -> None:
    assert order([candidate(1, 0.9), candidate(1, 0.9), candidate(2, 0.1)]) == [0, 2]


def test_the_parts_add_up_to_the_score() -> None:
    for ranked in rank([candidate(n, n / 10) for n in range(4)], np.ones((4, 2), np.float32), 4, "c"):
        assert sum(ranked.parts.values()) == pytest.approx(ranked.score)


def test_ties_go_to_the_earlier_one() -> None:
    assert order([candidate(1), candidate(2), candidate(3)]) == [0, 1, 2]


def test_weights_can_be_switched_off() -> None:
    rows = [candidate(1, 0.4, backend="c", speedup=8.0), candidate(2, 0.5, backend="triton", verified=False)]
    bare = RankOptions(backend=0, verified=0, speed=0, diversity=0)
    assert [r.position for r in rank(rows, APART[:2], 2, "c", bare)] == [1, 0]


@pytest.mark.parametrize(
    ("speedup", "part"), [(1.0, 0), (8.0, 1), (80.0, 1), (0.125, -1), (0.01, -1), (None, 0), (0.0, 0)]
)
def test_speed_is_logarithmic_and_bounded(speedup: float | None, part: float) -> None:
    assert speed_part(speedup) == pytest.approx(part)
