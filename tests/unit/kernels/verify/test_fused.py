"""What `compare` makes of a device's own way to go over tensors, with a way that is written in Python."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

from kbrl_async.kernels.verify import compare, fused
from kbrl_async.kernels.verify.cuda.passes import NAMES, SOURCE, unpacked
from kbrl_async.kernels.verify.fused import Counted
from kbrl_async.kernels.verify.tolerance import Tolerance, tolerance

CPU = torch.device("cpu")
ALLOWED = Tolerance(1e-3, 1e-4, 2e-4)
NAN, INF = math.nan, math.inf


class Way:
    """As the kernels of `cuda.passes` do it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def difference(self, got: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Counted | None:
        self.asked.append("difference")
        if got.dtype is not torch.float32:
            return None
        worst = worst_wrong = (-1.0, 0)
        wrong = nans = 0
        for place, (g, w) in enumerate(zip(got.flatten().tolist(), expected.flatten().tolist(), strict=True)):
            error, limit = abs(g - w), max(abs(w) * allowed.relative + allowed.absolute, allowed.honest)
            limit = min(limit, sys.float_info.max)
            nans += math.isnan(g)
            if not error <= limit and g != w and not (math.isnan(g) and math.isnan(w)):
                wrong, worst_wrong = wrong + 1, max(worst_wrong, (INF if math.isnan(error) else error, -place))
            if not math.isnan(error):
                worst = max(worst, (error, -place))
        return Counted(
            wrong, nans, (max(0.0, worst[0]), -worst[1]), (worst_wrong[0], -worst_wrong[1]) if wrong else None
        )

    def furthest(self, a: torch.Tensor, b: torch.Tensor) -> float | None:
        self.asked.append("furthest")
        return 0.25

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool | None:
        self.asked.append("same")
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    def is_all(self, block: torch.Tensor, byte: int) -> bool | None:
        self.asked.append("is_all")
        return None


@pytest.fixture
def way() -> Iterator[Way]:
    made = Way()
    fused.use(CPU, made)
    yield made
    del fused.known[CPU]


CASES = {
    "right": ([1.0, -2.0, 0.0], [1.0, -2.0, 0.0]),
    "nearly right": ([1.0005, -2.001, 1e-4], [1.0, -2.0, 0.0]),
    "one is wrong": ([1.0, 2.5, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
    "several, the first of the worst is named": ([1.5, 2.0, 3.5], [1.0, 2.0, 3.0]),
    "NaN": ([1.0, NAN, 9.0], [1.0, 2.0, 3.0]),
    "NaN at its place": ([1.0, NAN, 9.0], [1.0, NAN, 3.0]),
    "NaN everywhere": ([NAN, INF], [NAN, INF]),
    "not infinite": ([1.0, 3e38, 3.0], [1.0, INF, 3.0]),
    "infinite": ([INF, -INF, 3.0], [INF, 1.0, 3.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("allowed", [ALLOWED, Tolerance(0.0, 0.0, 0.0, exact=True)])
def test_a_devices_own_way_finds_what_torchs_operators_find(case: str, allowed: Tolerance) -> None:
    got, expected = (torch.tensor([values, values]) for values in CASES[case])
    plain = compare.difference(got, expected, allowed)
    agrees, kernelbench = compare.agrees(got, expected, allowed), compare.kernelbench(got, expected)
    fused.use(CPU, Way())
    try:
        found = compare.difference(got, expected, allowed)
        assert compare.kernelbench(got, expected) == kernelbench
        assert compare.agrees(got, expected, allowed) or not agrees
    finally:
        del fused.known[CPU]
    assert (found.wrong, found.total, found.nans if plain.wrong else 0, found.where) == (
        plain.wrong,
        plain.total,
        plain.nans,
        plain.where,
    )
    if plain.wrong:
        assert [found.got, found.expected] == pytest.approx([plain.got, plain.expected], nan_ok=True)
        assert found.allowed == pytest.approx(plain.allowed, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_what_is_to_be_infinite_must_be(dtype: torch.dtype) -> None:
    """A share of infinity is infinite: as much as that would be allowed."""
    expected = torch.tensor([1.0, -INF], dtype=dtype)
    assert compare.difference(torch.tensor([1.0, 0.0], dtype=dtype), expected, ALLOWED).wrong == 1
    assert compare.difference(expected.clone(), expected, ALLOWED).wrong == 0


def test_what_a_device_has_no_way_for_is_done_by_torch(way: Way) -> None:
    whole = torch.arange(4, dtype=torch.float64)
    assert compare.difference(whole, whole + 1, ALLOWED).wrong == 4
    assert not compare.is_all(torch.zeros(4, dtype=torch.uint8), 1)
    assert way.asked == ["difference", "is_all"]


def test_tolerances_and_equality_ask_the_device(way: Way) -> None:
    one = torch.ones(8)
    error = compare.largest_error(one, one.clone())
    assert tolerance(one, one.double(), 1.0, error=error).honest == pytest.approx(min(4 * 0.25, 1e-2))
    assert compare.same_values(one, one.clone())
    assert not compare.same_values(one, -one)
    assert way.asked.count("furthest") == 2


def test_an_error_and_its_place_come_out_of_one_number() -> None:
    assert unpacked((0x7F800000 << 32) | (0xFFFFFFFF - 7)) == (INF, 7)
    assert unpacked(0) == (0.0, 0), "NaN in every place, expected so: no element has a distance"


def test_the_kernels_compile() -> None:
    compiler = pytest.importorskip("kbrl_async.kernels.backends.nvrtc.compiler")
    try:
        built = compiler.compile_source(SOURCE, NAMES, "sm_90")
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    assert set(built.names) == set(NAMES)
