"""Fresh inputs for timed calls: new each time, outside of what few draws span, within what a problem promises."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kbrl_async.kernels.verify import fresh
from kbrl_async.kernels.verify.fresh import Pool, structure_of

Make = Callable[[], torch.Tensor]


def pool_of(make: Make, draws: int = 4) -> tuple[Pool, torch.Tensor]:
    made = [make() for _ in range(draws)]
    return Pool([[one.flatten()] for one in made], [made[0]], random.Random(0)), made[0]


def mixed(pool: Pool, example: torch.Tensor, rng: random.Random) -> torch.Tensor:
    outs = [[torch.empty_like(example).flatten()] for _ in range(2)]
    pool.mix(outs, rng)
    assert torch.equal(outs[0][0], outs[1][0]), "both sides get the same"
    return outs[0][0].view(example.shape)


def sets_of(make: Make, count: int = 40) -> torch.Tensor:
    pool, example = pool_of(make)
    rng = random.Random(1)
    return torch.stack([mixed(pool, example, rng) for _ in range(count)])


def test_timed_inputs_are_not_in_the_span_of_the_draws() -> None:
    """Else a linear answer is a mixture of answers that were known before."""
    found = sets_of(lambda: torch.randn(300))
    assert int(torch.linalg.matrix_rank(found.double())) == 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randint(0, 9, (30,)),
        lambda: torch.rand(6, 7) < 0.5,
        lambda: (torch.rand(6, 7) < 0.5).float(),
        lambda: torch.randperm(50),
        lambda: torch.eye(8)[torch.randint(0, 8, (16,))],
    ],
    ids=["integers", "mask", "mask of floats", "permutation", "one-hot"],
)
def test_integers_and_masks_are_new_in_every_call(make: Make) -> None:
    found = sets_of(make, 20).flatten(1)
    assert len({tuple(one.tolist()) for one in found}) >= 19


PROMISES: dict[str, tuple[Make, Callable[[torch.Tensor], bool]]] = {
    "in 0 … 1": (lambda: torch.rand(40), lambda x: bool((x >= 0).all() and (x <= 1).all())),
    "class labels": (lambda: torch.randint(0, 9, (40,)), lambda x: bool((x >= 0).all() and (x < 9).all())),
    "triangular": (lambda: torch.randn(8, 8).tril(), lambda x: torch.equal(x, x.tril())),
    "symmetric": (lambda: (lambda a: a + a.T)(torch.randn(8, 8)), lambda x: torch.equal(x, x.T)),
    "rows sum to one": (lambda: torch.randn(8, 9).softmax(-1), lambda x: bool(((x.sum(-1) - 1).abs() < 1e-5).all())),
    "one-hot": (
        lambda: torch.eye(8)[torch.randint(0, 8, (16,))],
        lambda x: bool((x.sum(-1) == 1).all() and ((x == 0) | (x == 1)).all()),
    ),
    "a permutation": (lambda: torch.randperm(50), lambda x: sorted(x.tolist()) == list(range(50))),
    "distinct": (lambda: torch.randperm(90)[:9], lambda x: len(set(x.tolist())) == 9),
    "sorted": (lambda: torch.rand(40).sort().values, lambda x: torch.equal(x, x.sort().values)),
    "sorted integers": (lambda: torch.randint(0, 99, (40,)).sort().values, lambda x: torch.equal(x, x.sort().values)),
    "always the same": (lambda: torch.arange(9), lambda x: torch.equal(x, torch.arange(9))),
}


@pytest.mark.parametrize("chunk", [1, 48, 1 << 22])
def test_large_matrices_are_compared_with_their_transposes_by_parts(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "CHUNK", chunk)
    whole = torch.randn(3, 8, 8)
    whole = whole + whole.mT
    other = whole.clone()
    other[2, 7, 6] += 1
    assert structure_of([whole, whole + 1]) == "turned"
    assert structure_of([whole, other]) == "each"


@pytest.mark.parametrize("name", PROMISES)
def test_what_all_draws_have_in_common_stays(name: str) -> None:
    make, holds = PROMISES[name]
    assert all(map(holds, sets_of(make, 20)))


def test_an_input_that_is_fresh_only_as_a_whole_draw_asks_for_new_ones() -> None:
    pool, _ = pool_of(lambda: torch.rand(40).sort().values)
    assert pool.needs_draws
    new = torch.arange(40.0)
    for _ in range(40):
        pool.replace(0, lambda seed: [new], random.Random())
    pool.mix(outs := [[torch.empty(40)]], random.Random(0))
    assert torch.allclose(outs[0][0], new)
    assert not pool_of(lambda: torch.randn(40))[0].needs_draws


def test_more_than_one_chunk_has_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbrl_async.kernels.verify.fresh.CHUNK", 64)
    found = sets_of(lambda: torch.rand(300) + 1, 3)
    assert bool(((found >= 1) & (found <= 2)).all())


def test_half_precision_is_mixed_too() -> None:
    assert structure_of([torch.randn(9).half(), torch.randn(9).half()]) == "each"
    assert sets_of(lambda: torch.randn(30).bfloat16(), 3).dtype is torch.bfloat16
