"""One pass over memory says what torch's operators say; and references that follow each other in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options, compare, fused
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.kernels.verify.cuda.passes import Passes
from kbrl_async.kernels.verify.device import device_of
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.references import References
from kbrl_async.kernels.verify.tolerance import Tolerance
from protocols.records import Problem
from tests.gpu.recorded_candidates import LINEAR, TWICE

pytestmark = pytest.mark.gpu
WHERE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def passes() -> Iterator[Passes]:
    kept = fused.known.pop(WHERE, None)  # `compare` does it by torch's operators here
    yield Passes(WHERE)
    if kept is not None:
        fused.use(WHERE, kept)


def pair(dtype: torch.dtype, count: int, spoil: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(WHERE).manual_seed(count)
    expected = torch.randn(count, generator=generator, device=WHERE).to(dtype)
    got = expected + 1e-6
    places = torch.randint(0, count, (spoil,), generator=generator, device=WHERE)
    got[places] = got[places] * 3 + 1
    return got, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 31, 4097, 3_000_001])
@pytest.mark.parametrize("spoil", [0, 1, 100])
def test_a_comparison(passes: Passes, dtype: torch.dtype, count: int, spoil: int) -> None:
    allowed = Tolerance(1e-3, 1e-4, 2e-4)
    got, expected = pair(dtype, count, spoil)
    if spoil > 1 and count > 100:
        got[7], got[8], expected[8], got[9], expected[9] = torch.nan, torch.nan, torch.nan, torch.inf, torch.inf
    plain, found = compare.difference(got, expected, allowed), passes.difference(got, expected, allowed)
    assert found is not None
    told = compare.difference_of(found, got, expected, allowed)
    assert (told.wrong, told.total, told.where) == (plain.wrong, plain.total, plain.where)
    assert told.nans == plain.nans or not plain.wrong
    assert told.allowed == pytest.approx(plain.allowed, rel=1e-4)
    if plain.wrong:
        assert (told.got, told.expected) == pytest.approx((plain.got, plain.expected), nan_ok=True)


def test_what_is_no_number_or_infinite(passes: Passes) -> None:
    nothing, endless = torch.full((65,), torch.nan, device=WHERE), torch.full((65,), torch.inf, device=WHERE)
    allowed = Tolerance(1e-3, 1e-4, 2e-4)
    cases = (
        (nothing, nothing, 0),
        (endless, endless, 0),
        (-endless, endless, 65),
        (torch.zeros_like(endless), endless, 65),
    )
    for got, expected, wrong in cases:
        found = passes.difference(got, expected, allowed)
        assert found is not None
        assert found.wrong == compare.difference(got, expected, allowed).wrong == wrong
        assert compare.difference_of(found, got, expected, allowed).wrong == wrong


def test_equality_and_one_byte_everywhere(passes: Passes) -> None:
    block = torch.full((1 << 22,), 0x7F, dtype=torch.uint8, device=WHERE)
    other = block.clone()
    assert passes.is_all(block, 0x7F)
    assert passes.same(block, other)
    other[-1] = 1
    assert not passes.is_all(other, 0x7F)
    assert not passes.same(block, other)
    assert passes.same(block[:7], block[:7].clone()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_furthest_pair(passes: Passes, dtype: torch.dtype) -> None:
    one = torch.zeros(100_001, device=WHERE)
    other = torch.zeros(100_001, device=WHERE, dtype=dtype)
    other[5], other[77], other[99] = 0.5, torch.nan, torch.inf
    assert passes.furthest(one, other) == 0.5


@pytest.mark.alone  # where others wait for memory, the first one ends before the second is made
def test_references_follow_each_other_in_one_process() -> None:
    device = device_of("cuda:0")
    options = device.fitted(bench_options(TimingBench(), device="cuda:0", references=1))
    problems = [
        Problem(f"L1/0{i}_x", 1, "x", source) for i, source in enumerate([TWICE, LINEAR, TWICE + "\n# once more"])
    ]
    setting = Problem("L1/09_x", 1, "x", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True\n" + LINEAR)
    with zygote_for("cuda:0") as zygote:
        device.open(options.memory_share)
        device.enter()
        references = References(zygote, options, random.Random(1), device)
        with contextlib.closing(references):

            def of(problem: Problem) -> Reference:
                (reference,) = references.get(problem).references
                return reference

            pids = [of(problem).session.host_pid for problem in problems]
            assert pids[2] == pids[0] != pids[1]
            of_settings = of(setting).session.host_pid
            assert of_settings == pids[1], "that one waits"
            later = [of(Problem(f"L1/1{i}_x", 1, "x", f"{TWICE}\n# {i}")) for i in range(3)]
            assert of_settings not in [reference.session.host_pid for reference in later]
            assert len(later[-1].sets) >= 7
