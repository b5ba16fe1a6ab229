"""Inputs of fp8 and of packed integers: they stay what they are in every set, and sums as fp8 tensor cores make them
are right of fp8 alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options, sets
from kbrl_async.kernels.verify.compare import difference
from kbrl_async.kernels.verify.reference import Reference

ReferenceOf = Callable[[str], Reference]
_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, {arguments}):
{body}

def get_inputs():
{inputs}

def get_init_inputs():
    return []
"""
M, K, N, GROUP = 32, 256, 48, 32


def posed(arguments: str, body: str, inputs: str) -> str:
    indented = [
        "\n".join(f"{' ' * size}{line}" for line in text.split("\n")) for text, size in ((body, 8), (inputs, 4))
    ]
    return _PROBLEM.format(arguments=arguments, body=indented[0], inputs=indented[1])


INT4 = posed(
    "x, packed, scales",
    "whole = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).float() - 8\n"
    "return x @ (whole * scales.repeat_interleave(32, 0))",
    "packed = torch.randint(0, 256, (128, 48), dtype=torch.uint8)\n"
    "return [torch.randn(32, 256), packed, torch.rand(8, 48) * 0.02 + 0.005]",
)
INT8 = posed(
    "x, weight, scale",
    "return (x.float() @ weight.float() * scale).bfloat16()",
    "weight = torch.randint(-127, 128, (256, 48), dtype=torch.int8)\n"
    "return [torch.randn(32, 256).bfloat16(), weight, torch.rand(48) * 0.02 + 0.005]",
)
FP4 = posed(
    "x, packed, scales",
    "known = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])\n"
    "weight = known[torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).long()]\n"
    "return x @ (weight * scales.float().repeat_interleave(32, 0))",
    "packed = torch.randint(0, 256, (128, 48), dtype=torch.uint8)\n"
    "return [torch.randn(32, 256), packed, (torch.rand(8, 48) + 0.5).to(torch.float8_e4m3fn)]",
)
FP8 = posed(
    "x, w",
    "return x.float() @ w.float()",
    "return [torch.randn(32, 256).to(torch.float8_e4m3fn), torch.randn(256, 48).to(torch.float8_e4m3fn)]",
)
SCALED = posed(
    "x, w, scale",
    "return (x.float() @ w.float() * scale).bfloat16()",
    "x, w = torch.randn(32, 256), torch.randn(256, 48)\n"
    "return [x.to(torch.float8_e5m2), w.to(torch.float8_e4m3fn), torch.rand(()) + 0.5]",
)


@pytest.fixture(scope="module")
def reference_of(zygote: Zygote) -> Iterator[ReferenceOf]:
    options = bench_options(TimingBench(), limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20))
    with contextlib.closing(Bench(zygote, options, random.Random(5))) as bench:
        yield lambda problem: bench.references.get(parse_problem(problem, "L1/01_inputs")).references[0]


def wrong_on(reference: Reference, kernel: Callable[..., torch.Tensor]) -> set[str]:
    found = set()
    for one in reference.sets:
        given = [block.view(like.shape) for block, like in zip(one.blocks, reference.examples, strict=True)]
        got = kernel(*given).to(one.expected[0].dtype)
        if difference(got, one.expected[0], one.tolerances[0]).wrong:
            found.add(one.name)
    return found


FEW: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "int4": (
        INT4.replace("(0, 256, (128, 48), dtype=torch.uint8)", "(0, 256, (128, 48), dtype=torch.uint8) & 0x77"),
        lambda packed: (packed & 0x88) == 0,
    ),
    "int8": (INT8.replace("(-127, 128,", "(1, 8,"), lambda weight: (weight >= 1) & (weight < 8)),
    "fp4": (
        FP4.replace("(0, 256, (128, 48), dtype=torch.uint8)", "(0, 256, (128, 48), dtype=torch.uint8) & 0x77"),
        lambda packed: (packed & 0x88) == 0,
    ),
    "fp8": (
        FP8.replace("torch.randn(256, 48)", "(torch.rand(256, 48) + 0.5)"),
        lambda w: (w.float() >= 0.5) & (w.float() <= 1.5),
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_what_is_packed_or_narrow_is_only_ever_as_drawn(reference_of: ReferenceOf, name: str) -> None:
    """Integers and fp8 are neither scaled nor turned round, and no scale becomes zero."""
    problem, is_drawn = FEW[name]
    made = reference_of(problem).sets
    assert {"nominal", "mixed"} <= {one.name for one in made}
    for one in made:
        assert bool(is_drawn(one.blocks[1]).all()), one.name
        assert all(bool((scale.float() > 0).all()) for scale in one.blocks[2:]), one.name


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed % 16, packed // 16], 1).flatten(0, 1)


def by_groups(x: torch.Tensor, whole: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A sum for each group, and its scale at the end of it."""
    parts = torch.einsum("mgk,gkn->gmn", x.view(len(x), -1, GROUP), whole.view(-1, GROUP, whole.shape[1]))
    return (parts * scales.unsqueeze(1)).sum(0)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    return E2M1[(codes % 8).long()] * torch.where(codes >= 8, -1.0, 1.0)


HONEST: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "int4": (INT4, lambda x, p, s: by_groups(x, unpacked(p).float() - 8, s)),
    "int8": (INT8, lambda x, w, s: (x.float() * 1.0) @ (w.float() * s)),
    "int8, dequantised to bfloat16": (INT8, lambda x, w, s: x.float() @ (w.float() * s).bfloat16().float()),
    "fp4": (FP4, lambda x, p, s: by_groups(x, e2m1(unpacked(p)), s.float())),
    "fp8 with a scale": (SCALED, lambda x, w, s: summed(x.float(), w.float(), 32) * s),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_of_them_are_right(reference_of: ReferenceOf, name: str) -> None:
    problem, kernel = HONEST[name]
    assert wrong_on(reference_of(problem), kernel) == set()


WRONG: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "low halves alone": (INT4, lambda x, p, s: by_groups(x, (p % 16).repeat_interleave(2, 0).float() - 8, s)),
    "halves in another order": (INT4, lambda x, p, s: by_groups(x, unpacked(p // 16 + p % 16 * 16).float() - 8, s)),
    "no zero point": (INT4, lambda x, p, s: by_groups(x, unpacked(p).float(), s)),
    "signed halves": (INT4, lambda x, p, s: by_groups(x, (unpacked(p).float() + 8) % 16 - 8, s)),
    "the scale of the next group": (INT4, lambda x, p, s: by_groups(x, unpacked(p).float() - 8, s.roll(1, 0))),
    "one scale for all": (INT4, lambda x, p, s: by_groups(x, unpacked(p).float() - 8, s.mean(0).expand_as(s))),
    "x of four bits": (INT4, lambda x, p, s: by_groups(narrowed(x, 7), unpacked(p).float() - 8, s)),
    "x of eight bits": (INT4, lambda x, p, s: by_groups(narrowed(x, 127), unpacked(p).float() - 8, s)),
    "int8 without its sign": (INT8, lambda x, w, s: x.float() @ w.view(torch.uint8).float() * s),
    "int8 as int4": (INT8, lambda x, w, s: x.float() @ ((w.float() / 16).round() * 16) * s),
    "half of the int8 products": (INT8, lambda x, w, s: x.float()[:, : K // 2] @ w.float()[: K // 2] * s),
    "four bits taken for int4": (FP4, lambda x, p, s: by_groups(x, unpacked(p).float() - 8, s.float())),
    "no sign in fp4": (FP4, lambda x, p, s: by_groups(x, e2m1(unpacked(p)).abs(), s.float())),
    "fp8 as int8": (FP8, lambda x, w: narrowed(x.float(), 127) @ narrowed(w.float().T, 127).T),
    "fp8 as four bits": (SCALED, lambda x, w, s: narrowed(x.float(), 7) @ narrowed(w.float().T, 7).T * s),
    "no scale": (SCALED, lambda x, w, s: x.float() @ w.float()),
    "zeros": (FP8, lambda x, w: torch.zeros(M, N)),
    "the last products of fp8 left out": (FP8, lambda x, w: x.float()[:, :-8] @ w.float()[:-8]),
}


def narrowed(x: torch.Tensor, most: int) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    return (x / step).round() * step


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_not(reference_of: ReferenceOf, name: str) -> None:
    problem, kernel = WRONG[name]
    assert "nominal" in wrong_on(reference_of(problem), kernel)


def fewer_bits(x: torch.Tensor, unit: torch.Tensor, is_cut: bool) -> torch.Tensor:
    return ((x / unit).trunc() if is_cut else (x / unit).round()) * unit


def unit_of(x: torch.Tensor) -> torch.Tensor:
    """Of 14 bits of the largest: its leading one and 13 behind."""
    return torch.exp2(x.clamp_min(1e-30).log2().floor() - 13)


def summed(x: torch.Tensor, w: torch.Tensor, promoted: int = 0, is_cut: bool = True) -> torch.Tensor:
    """As Hopper's tensor cores add up products of fp8: 32 at a time, all of them and the sum so far with the bits of
    the largest. `promoted`: after so many the sum is added to one in fp32; 0: never.
    """
    total, part = torch.zeros(x.shape[0], w.shape[1]), torch.zeros(x.shape[0], w.shape[1])
    for begin in range(0, x.shape[1], 32):
        products = x[:, begin : begin + 32, None] * w[None, begin : begin + 32]
        unit = unit_of(torch.maximum(products.abs().amax(1), part.abs()))
        part = fewer_bits(products, unit[:, None], is_cut).sum(1) + fewer_bits(part, unit, is_cut)
        part = fewer_bits(part, unit_of(part.abs()), is_cut)
        if promoted and (begin + 32) % promoted == 0:
            total, part = total + part, torch.zeros_like(part)
    return total + part


SUMS = {"promoted": (128, True), "never promoted": (0, True), "rounded": (0, False)}


def fp8_problem(inner: int, draw: str = "randn") -> str:
    return FP8.replace("256", str(inner)).replace("randn", draw)


@pytest.mark.parametrize("inner", [256, 4096])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_14_bits_are_right_of_fp8(reference_of: ReferenceOf, name: str, inner: int) -> None:
    reference = reference_of(fp8_problem(inner))
    assert wrong_on(reference, lambda x, w: summed(x.float(), w.float(), *SUMS[name])) == set()


@pytest.mark.parametrize("inner", [256, 4096])
def test_promoted_sums_of_one_sign_are_right_and_others_are_not(reference_of: ReferenceOf, inner: int) -> None:
    """Cut each time, a sum of 4,096 magnitudes is 7 % too small."""
    reference = reference_of(fp8_problem(inner, "rand"))
    assert wrong_on(reference, lambda x, w: summed(x.float(), w.float(), 128)) == set()
    assert wrong_on(reference, lambda x, w: summed(x.float(), w.float()))


def test_without_room_for_sums_they_would_be_wrong(reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "FP8_SUM", 0.0)
    reference = reference_of(fp8_problem(256) + "# with a reference of its own\n")
    assert wrong_on(reference, lambda x, w: summed(x.float(), w.float(), 128))


@pytest.mark.parametrize("cast", ["", ".bfloat16()"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_14_bits_are_wrong_of_wider_inputs(reference_of: ReferenceOf, name: str, cast: str) -> None:
    """Whose own values may be such as fp8 holds: that is how precision is lowered."""
    reference = reference_of(FP8.replace(".to(torch.float8_e4m3fn)", cast))
    assert wrong_on(reference, lambda x, w: summed(x.float(), w.float(), *SUMS[name]))
