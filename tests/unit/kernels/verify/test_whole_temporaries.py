"""What is worked out of one large tensor takes memory for a part, whatever its layout and dtype."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.verify import compare, fresh, inputs, pieces
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.compare import Tolerance
from kbrl_async.kernels.verify.fresh import Pool, SecretWeights, blend, structure_of
from kbrl_async.kernels.verify.known import Redrawn, outlines
from kbrl_async.kernels.verify.session import CandidateFault
from kbrl_async.kernels.verify.sets import SetMaker

CHUNK = 1 << 12
SIDE = 600
PART = 16 * CHUNK
"""Bytes: a part in fp64, and as much again."""
CLOSE = Tolerance(1e-4, 1e-4)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, inputs, fresh, compare):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(inputs, "_SAMPLE", 1 << 10)
    monkeypatch.setattr(fresh, "_SLACK", 1 << 10)
    monkeypatch.setattr(fresh, "_SAMPLE", 4)
    monkeypatch.setattr(inputs, "_ROWS", 4)
    monkeypatch.setattr(inputs, "MANY_BYTES", 0)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch's
    """The bytes of the largest tensor that is made in here, views and what was given aside."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._known = {one.untyped_storage()._cdata for one in given}
        self.size, self.by = 0, ""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage.nbytes() > self.size:
                    self.size, self.by = storage.nbytes(), str(func)
        return made


def largest(work: Callable[[], object], *given: torch.Tensor) -> tuple[bool, str]:
    with Largest(*given) as seen:
        work()
    return seen.size <= PART, f"{seen.by}: {seen.size:,} bytes"


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "one dimension": lambda: torch.randn(SIDE * SIDE),
    "one dimension of half precision": lambda: torch.rand(SIDE * SIDE).half(),
    "never positive": lambda: -torch.rand(SIDE * SIDE),
    "turned": lambda: torch.rand(SIDE, SIDE).T,
    "turned, of half precision": lambda: torch.rand(SIDE, SIDE).half().T,
    "turned, of both signs": lambda: torch.randn(SIDE, SIDE).T,
    "channels last": lambda: torch.rand(4, 9, 100, 100).to(memory_format=torch.channels_last),
    "channels last, never positive": lambda: -torch.rand(4, 9, 100, 100).to(memory_format=torch.channels_last),
    "symmetric": lambda: (lambda x: x + x.mT)(torch.rand(SIDE, SIDE)),
    "probabilities": lambda: torch.rand(SIDE, SIDE).softmax(-1),
    "integers": lambda: torch.randint(0, 9, (SIDE * SIDE,)),
    "a permutation": lambda: torch.randperm(SIDE * SIDE),
    "a permutation of int32": lambda: torch.randperm(SIDE * SIDE).int(),
    "a mask": lambda: torch.rand(SIDE * SIDE) < 0.5,
    "a mask of floats": lambda: (torch.rand(SIDE * SIDE) < 0.5).float(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_what_draws_have_in_common_is_seen_by_parts(name: str) -> None:
    torch.manual_seed(3)
    two = [INPUTS[name](), INPUTS[name]()]
    is_small, words = largest(lambda: structure_of(two), *two)
    assert is_small, words


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_varied_and_moved_where_they_are(name: str) -> None:
    torch.manual_seed(3)
    for kind in inputs.kinds_for([INPUTS[name]()]):
        given = INPUTS[name]()

        def vary(kind: inputs.Kind = kind, given: torch.Tensor = given) -> None:
            inputs.vary([given], kind, random.Random(5), is_ours=True)

        is_small, words = largest(vary, given)
        assert is_small, f"{kind.name}, {words}"
    given = INPUTS[name]()
    is_small, words = largest(lambda: inputs.move([given], random.Random(5), coarse=True), given)
    assert is_small, words


@pytest.mark.parametrize("name", INPUTS)
def test_draws_are_mixed_in_the_second_ones_memory(name: str) -> None:
    torch.manual_seed(3)
    one, other = INPUTS[name](), INPUTS[name]()
    structure, is_number = structure_of([one, other]), all(map(inputs.is_continuous, (one, other)))
    weights = SecretWeights(one.numel(), torch.device("cpu"), random.Random(1))
    given = (one, other, other), structure, is_number, weights, random.Random(2)
    is_small, words = largest(lambda: blend(*given), one, other, *weights.tensors)
    assert is_small, words


def test_of_lent_draws_nothing_is_copied_to_be_turned_round() -> None:
    """What waits for the second draw waits where the mixture goes."""
    torch.manual_seed(3)
    place, slot = torch.empty(SIDE * SIDE), torch.empty(SIDE * SIDE)

    def lent(seed: int) -> list[torch.Tensor]:
        one = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        for part, half in zip(place.view(SIDE, SIDE), (one + one.mT), strict=True):
            part.copy_(half)
        return [place]

    example = torch.empty(SIDE, SIDE, device="meta")
    kept = Pool([[lent(1)[0].clone()], [lent(2)[0].clone()]], [example], random.Random(7))
    pool = Pool(Redrawn([1, 2], lambda seed: [lent(seed)[0].clone()], lent), outlines([example]), random.Random(7))
    made: list[str] = []
    honest = torch.Tensor.roll

    def roll(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append("a part" if tensor.nbytes <= PART else "all of it")
        return honest(tensor, *rest)

    wanted = torch.empty(SIDE * SIDE)
    kept.mix([[wanted]], random.Random(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "roll", roll)
        pool.mix([[place], [slot]], random.Random(4))
    assert set(made) == {"a part"}
    assert torch.equal(slot, wanted)
    assert torch.equal(place, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool])
def test_domains_are_looked_at_by_parts(dtype: torch.dtype) -> None:
    maker = SetMaker.__new__(SetMaker)
    maker._domains, maker._problem_id = {0: (0.0, 3.0)}, "L1/1"
    given = (torch.arange(SIDE * SIDE) % 4).to(dtype)
    is_small, words = largest(lambda: maker._refuse_outside([given]), given)
    assert is_small, words
    given[-1] = 1
    maker._domains = {0: (0.0, 0.5)}
    with pytest.raises(ProblemError, match="gives 0"):
        maker._refuse_outside([given])


def test_who_has_a_nan_has_no_bounds() -> None:
    given = torch.rand(SIDE * SIDE).index_fill(0, torch.tensor([SIDE * SIDE - 7]), torch.nan)
    assert all(end != end for end in pieces.bounds(given))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    **{name: INPUTS[name] for name in ("one dimension", "turned", "channels last", "integers", "a mask")},
    "bytes": lambda: torch.randint(0, 9, (SIDE * SIDE,), dtype=torch.uint8),
    "turned bytes": lambda: torch.randint(0, 9, (SIDE, SIDE), dtype=torch.uint8).T,
    "turned, of half precision": INPUTS["turned, of half precision"],
    "blocks of rows": lambda: torch.rand(3, SIDE, 200).transpose(0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_alike", [True, False], ids=["alike", "contiguous"])
def test_outputs_are_compared_by_parts_however_they_lie(name: str, is_alike: bool) -> None:
    """A replayed candidate's outputs are read where they lie, in its layout."""
    torch.manual_seed(3)
    got = LAYOUTS[name]()
    expected = torch.empty_like(got).copy_(got) if is_alike else got.contiguous().clone()
    if got.dtype is torch.float32:
        expected += 1e-6

    def compared() -> None:
        assert compare.difference(got, expected, CLOSE).wrong == 0
        assert compare.kernelbench(got, expected)
        assert compare.agrees(got, expected, CLOSE)
        assert compare.is_roughly(got, expected)
        compare.same_values(got, expected)

    is_small, words = largest(compared, got, expected)
    assert is_small, words


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_wrong_is_found_where_it_is_however_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    got = LAYOUTS[name]()
    expected = got.contiguous().clone()
    place = tuple(size * 2 // 3 for size in got.shape)
    expected[place] = not expected[place] if got.dtype is torch.bool else expected[place] + 5
    found = compare.difference(got, expected, CLOSE)
    assert (found.wrong, found.where, found.total) == (1, place, got.numel())
    assert not compare.kernelbench(got, expected)
    assert not compare.same_values(got, expected)
    for module in (pieces, compare):
        monkeypatch.setattr(module, "CHUNK", 1 << 24)
    assert compare.difference(got, expected, CLOSE) == found, "as all at once"


def test_whether_all_is_poison_is_looked_at_by_parts() -> None:
    block = torch.full((SIDE * SIDE,), 0x7F, dtype=torch.uint8)
    is_small, words = largest(lambda: compare.is_all(block, 0x7F), block)
    assert is_small, words
    assert compare.is_all(block, 0x7F)
    block[-1] = 0
    assert not compare.is_all(block, 0x7F)


@pytest.mark.parametrize("size", [CHUNK // 2, 5 * CHUNK + 17])
@pytest.mark.parametrize("twice", [False, True])
def test_whether_many_integers_are_distinct_needs_no_sort_of_all(size: int, twice: bool) -> None:
    given = torch.randperm(size) * 977 - 5_000_000
    if twice:
        given[-1] = given[0]
    assert fresh._is_distinct(given) is not twice


@pytest.mark.parametrize("count", [1, 4, 7, 64])
@pytest.mark.parametrize("shape", [(30,), (5, 30), (3, 4, 30), (9, 2, 5, 30), (0, 4, 30), (2, 0, 30)])
def test_the_first_rows_are_those_of_the_whole(shape: tuple[int, ...], count: int) -> None:
    given = torch.rand(shape).permute(*reversed(range(len(shape))))
    for tensor in (given, given.contiguous()):
        if tensor.shape[-1]:
            wanted = tensor.reshape(-1, tensor.shape[-1])[:count]
            assert torch.equal(pieces.first_rows(tensor, count), wanted)


@pytest.mark.parametrize("keeps_sets", [True, False])
@pytest.mark.parametrize("by", [0.0, 1e-7])
def test_an_answer_that_the_next_call_overwrites_is_kept_for_the_same_inputs(keeps_sets: bool, by: float) -> None:
    """A replayed candidate's outputs are read in place: compared with themselves they never differ."""
    checker = Checker.__new__(Checker)
    checker._first_answer = []
    checker.session, checker.reference = Mock(reads_in_place=True), Mock(keeps_sets=keeps_sets)
    place = torch.full((100,), 0.5)
    checker._refuse_other_bits([place])
    place.fill_(torch.nan)  # poisoned, and written once more
    place.fill_(0.5 + by)
    with pytest.raises(CandidateFault, match="differ in bits") if by else contextlib.nullcontext():
        checker._refuse_other_bits([place])
