"""Products of fp8, int8 and four bits: right where the problem gives leave, wrong elsewhere, and no leave for less."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options, taken_apart
from kbrl_async.kernels.verify.compare import difference
from kbrl_async.kernels.verify.input_set import InputSet
from kbrl_async.kernels.verify.lowering import lowered, number
from protocols.records import Candidate, Fault, Verdict

M, K, N = 64, 512, 96
PRODUCT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, w):
        return x @ w

def get_inputs():
    return [torch.randn(64, 512), torch.randn(512, 96)]

def get_init_inputs():
    return []
"""
HALF = PRODUCT.replace("512)", "512).bfloat16()").replace("96)", "96).bfloat16()")
Operand = Callable[[torch.Tensor, int], torch.Tensor]
Kernel = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def sets_of(zygote: Zygote) -> Iterator[Callable[[str], list[InputSet]]]:
    """One draw for all."""
    options = bench_options(TimingBench(), limits=Limits(memory_bytes=1 << 30, scratch_bytes=4 << 20))
    with contextlib.closing(Bench(zygote, options, random.Random(3))) as bench:
        yield lambda problem: bench.references.get(parse_problem(problem, "L1/01_product")).references[0].sets


def wrong_on(sets: list[InputSet], kernel: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> set[str]:
    shapes = shapes or ((M, K), (K, N))
    found = set()
    for one in sets:
        got = kernel(*(block.view(shape) for block, shape in zip(one.blocks, shapes, strict=True)))
        if difference(got.to(one.expected[0].dtype), one.expected[0], one.tolerances[0]).wrong:
            found.add(one.name)
    return found


# Honest kernels' own ways to round: written apart from the simulation.


def with_scale(x: torch.Tensor, most: float, over: tuple[int, ...]) -> torch.Tensor:
    return x.abs().amax(over, keepdim=True).clamp_min(1e-12) / most


def fp8(x: torch.Tensor, dim: int, kind: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    scale = with_scale(x, torch.finfo(kind).max, (dim,))
    return (x / scale).to(kind).float() * scale


def e5m2(x: torch.Tensor, dim: int) -> torch.Tensor:
    return fp8(x, dim, torch.float8_e5m2)


def fp8_whole(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One scale for all, as `torch._scaled_mm` takes it."""
    scale = with_scale(x, 448.0, tuple(range(x.dim())))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def int8(x: torch.Tensor, dim: int) -> torch.Tensor:
    scale = with_scale(x, 127.0, (dim,))
    return (x / scale).round().clamp(-128, 127) * scale


def int4(x: torch.Tensor, dim: int) -> torch.Tensor:
    scale = with_scale(x, 7.0, (dim,))
    return (x / scale).round().clamp(-8, 7) * scale


def grouped(x: torch.Tensor, dim: int, size: int, narrow: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    parts = x.movedim(dim, -1)
    return narrow(parts.reshape(*parts.shape[:-1], -1, size)).flatten(-2).movedim(-1, dim)


def int4_grouped(x: torch.Tensor, dim: int) -> torch.Tensor:
    return grouped(x, dim, 32, lambda part: int4(part, -1))


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: torch.Tensor) -> torch.Tensor:
    return E2M1[(x.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)].copysign(x)


def nvfp4(x: torch.Tensor, dim: int) -> torch.Tensor:
    def narrow(part: torch.Tensor) -> torch.Tensor:
        whole = float(x.abs().max()) / 6 / 448 or 1.0
        scale = (part.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float().clamp_min(2**-9) * whole
        return nearest(part / scale) * scale

    return grouped(x, dim, 16, narrow)


def mxfp4(x: torch.Tensor, dim: int) -> torch.Tensor:
    def narrow(part: torch.Tensor) -> torch.Tensor:
        scale = 2.0 ** (part.abs().amax(-1, keepdim=True).clamp_min(1e-12).log2().floor() - 2)
        return nearest(part / scale) * scale

    return grouped(x, dim, 32, narrow)


def product(of_x: Operand | None, of_w: Operand | None) -> Kernel:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w = x.float(), w.float()
        return (of_x(x, 1) if of_x else x) @ (of_w(w, 0) if of_w else w)

    return run


HONEST: dict[str, tuple[str, Kernel]] = {
    "bfloat16": ("bfloat16", lambda x, w: x.bfloat16().float() @ w.bfloat16().float()),
    "tf32, where its operands are cut": ("tf32", lambda x, w: cut(x) @ cut(w)),
    "fp8": ("float8_e4m3fn", product(fp8, fp8)),
    "fp8, one scale for all": ("float8_e4m3fn", product(fp8_whole, fp8_whole)),
    "fp8, weights alone": ("float8_e4m3fn", product(None, fp8)),
    "fp8 with an output in bfloat16": ("float8_e4m3fn", lambda x, w: product(fp8, fp8)(x, w).bfloat16()),
    "e5m2": ("float8_e5m2", product(e5m2, e5m2)),
    "e4m3 and e5m2": ("float8_e5m2", product(fp8, e5m2)),
    "int8": ("int8", product(int8, int8)),
    "int8, one scale for all of x": ("int8", product(lambda x, _: int8(x.flatten(), 0).view(x.shape), int8)),
    "int4": ("int4", product(int4, int4)),
    "int4 weights by groups": ("int4", product(None, int4_grouped)),
    "int4 weights, int8 inputs": ("int4", product(int8, int4_grouped)),
    "nvfp4": ("nvfp4", product(nvfp4, nvfp4)),
    "mxfp4": ("mxfp4", product(mxfp4, mxfp4)),
    "fp8 where four bits are allowed": ("nvfp4", product(fp8, fp8)),
    "fp32 where fp8 is allowed": ("float8_e4m3fn", product(None, None)),
}


def cut(x: torch.Tensor) -> torch.Tensor:
    """As tensor cores read fp32."""
    return (x.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def declared(problem: str, precision: str) -> str:
    return f'{problem}\nPRECISION = "{precision}"\n'


@pytest.mark.parametrize("problem", [PRODUCT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_pass_with_leave(sets_of: Callable[[str], list[InputSet]], name: str, problem: str) -> None:
    precision, kernel = HONEST[name]
    assert wrong_on(sets_of(declared(problem, precision)), kernel) == set()


@pytest.mark.parametrize("problem", [PRODUCT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", [fp8, fp8_whole, e5m2, int8, int4, int4_grouped, nvfp4, mxfp4])
def test_the_same_is_wrong_without_leave(sets_of: Callable[[str], list[InputSet]], way: Operand, problem: str) -> None:
    assert {"nominal", "mixed"} <= wrong_on(sets_of(problem), product(way, way))


LOWER: dict[str, tuple[str, Kernel]] = {
    "e4m3 for bfloat16": ("bfloat16", product(fp8, fp8)),
    "int8 for bfloat16": ("bfloat16", product(int8, int8)),
    "e5m2 for e4m3": ("float8_e4m3fn", product(e5m2, e5m2)),
    "int4 for e4m3": ("float8_e4m3fn", product(int4, int4)),
    "int4 weights for e4m3": ("float8_e4m3fn", product(None, int4_grouped)),
    "nvfp4 for e4m3": ("float8_e4m3fn", product(nvfp4, nvfp4)),
    "nvfp4 weights for e4m3": ("float8_e4m3fn", product(None, nvfp4)),
    "int4 for e5m2": ("float8_e5m2", product(int4, int4)),
    "nvfp4 for e5m2": ("float8_e5m2", product(nvfp4, nvfp4)),
    "e4m3 for int8": ("int8", product(fp8, fp8)),
    "int4 for int8": ("int8", product(int4, int4)),
    "nvfp4 for int8": ("int8", product(nvfp4, nvfp4)),
    "mxfp4 weights for int8": ("int8", product(None, mxfp4)),
    "three bits for four": ("int4", product(lambda x, dim: bits(x, dim, 3), lambda x, dim: bits(x, dim, 3))),
    "three bits for nvfp4": ("nvfp4", product(lambda x, dim: bits(x, dim, 3), lambda x, dim: bits(x, dim, 3))),
}


def bits(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    scale = with_scale(x, 2.0 ** (count - 1) - 1, (dim,))
    return (x / scale).round() * scale


@pytest.mark.parametrize("problem", [PRODUCT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LOWER)
def test_less_than_what_is_allowed_is_wrong(sets_of: Callable[[str], list[InputSet]], name: str, problem: str) -> None:
    precision, kernel = LOWER[name]
    assert "nominal" in wrong_on(sets_of(declared(problem, precision)), kernel)


LOW = ("float8_e4m3fn", "float8_e5m2", "int8", "int4", "nvfp4", "mxfp4")
OF = {"float8_e4m3fn": fp8, "float8_e5m2": e5m2, "int8": int8, "int4": int4, "nvfp4": nvfp4, "mxfp4": mxfp4}
CHEATS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x, w: torch.zeros(M, N),
    "half of the products": lambda x, w: x[:, : K // 2] @ w[: K // 2],
    "half of the products, doubled": lambda x, w: 2 * (x[:, : K // 2] @ w[: K // 2]),
    "an eighth of the products left out": lambda x, w: x[:, : K * 7 // 8] @ w[: K * 7 // 8],
    "the last product left out": lambda x, w: x[:, :-1] @ w[:-1],
    "a scale that is twice too large": lambda x, w: 2 * (x @ w),
    "one scale for another's": lambda x, w: x @ w * 1.5,
    "a sign": lambda x, w: -(x @ w),
    "the last row left out": lambda x, w: torch.cat([(x @ w)[:-1], torch.zeros(1, N)]),
    "the last columns left out": lambda x, w: torch.cat([(x @ w)[:, :-4], torch.zeros(M, 4)], 1),
    "rows in place of others": lambda x, w: (x @ w).roll(1, 0),
    "every other row": lambda x, w: (x @ w)[::2].repeat_interleave(2, 0),
    "signs of x alone": lambda x, w: x.sign() * x.abs().mean() @ w,
    "the mean": lambda x, w: (x @ w).mean().expand(M, N),
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", CHEATS)
def test_partial_work_is_wrong_whatever_is_allowed(
    sets_of: Callable[[str], list[InputSet]], name: str, precision: str
) -> None:
    """As is what is left over: narrow products, too."""
    cheat, way = CHEATS[name], OF[precision]
    sets = sets_of(declared(PRODUCT, precision))
    assert wrong_on(sets, cheat)
    assert wrong_on(sets, lambda x, w: cheat(way(x, 1), way(w, 0)))


def without_the_whole(sets: list[InputSet]) -> list[InputSet]:
    """As it would be if each element alone were looked at."""
    return [msgspec.structs.replace(one, tolerances=[two.of_each() for two in one.tolerances]) for one in sets]


def without_bands(sets: list[InputSet]) -> list[InputSet]:
    return [
        msgspec.structs.replace(one, tolerances=[msgspec.structs.replace(two, by_band=()) for two in one.tolerances])
        for one in sets
    ]


CAUSAL = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def get_inputs():
    return [torch.randn(1, 2, 512, 32) for _ in range(3)]

def get_init_inputs():
    return []
"""


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, until: int = 512, way: Operand = fp8) -> torch.Tensor:
    scores = way(q, -1) @ way(k, -1).mT / 32**0.5
    shares = scores.masked_fill(~torch.ones(512, 512, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    found = way(shares, -1) @ way(v, -2)
    found[..., until:, :] = 0
    return found


@pytest.mark.parametrize("precision", ["float8_e4m3fn", "mxfp4"])
def test_rows_that_are_small_beside_others_are_looked_at_too(
    sets_of: Callable[[str], list[InputSet]], precision: str
) -> None:
    """The first rows of a causal attention are of few values, and as large; the last ones are means of many."""
    sets, way = sets_of(declared(CAUSAL, precision)), OF[precision]
    shapes = [(1, 2, 512, 32)] * 3

    def kernel(until: int) -> Kernel:
        return lambda q, k, v: causal(q, k, v, until, way)

    assert wrong_on(sets, kernel(512), *shapes) == set()
    for until in (256, 480):
        assert "nominal" in wrong_on(sets, kernel(until), *shapes), until
    if precision == "mxfp4":
        assert "nominal" not in wrong_on(without_the_whole(sets), kernel(480), *shapes)


UNEVEN = PRODUCT.replace("torch.randn(64, 512)", "torch.randn(64, 512) * torch.logspace(0, -3, 64).unsqueeze(1)")


@pytest.mark.parametrize("precision", ["float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp4", "bfloat16"])
def test_rows_a_hundredth_as_large_as_others_may_not_be_left_out(
    sets_of: Callable[[str], list[InputSet]], precision: str
) -> None:
    sets, way = sets_of(declared(UNEVEN, precision)), OF.get(precision, lambda x, _: x.bfloat16().float())

    def kernel(x: torch.Tensor, w: torch.Tensor, until: int) -> torch.Tensor:
        return torch.cat([(way(x, 1) @ way(w, 0))[:until], torch.zeros(M - until, N)])

    assert wrong_on(sets, lambda x, w: kernel(x, w, M)) == set()
    assert "nominal" in wrong_on(sets, lambda x, w: kernel(x, w, 48))
    assert precision == "bfloat16" or "nominal" not in wrong_on(without_bands(sets), lambda x, w: kernel(x, w, 48))


MODULE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
{layers}

    def forward(self, {arguments}):
        return {answer}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


def module(layers: str, answer: str, inputs: str, arguments: str = "x") -> str:
    return MODULE.format(layers=f"        {layers}", answer=answer, inputs=inputs, arguments=arguments)


TWO = "self.a, self.b = nn.Linear(128, 256), nn.Linear(256, 64)"
LAYERS = module(TWO, "self.b(torch.relu(self.a(x)))", "torch.randn(96, 128)")
LOSS = module(TWO, "(self.b(torch.relu(self.a(x))) ** 2).mean()", "torch.randn(96, 128)")
FILTER = module("self.a = nn.Conv2d(16, 32, 3)", "self.a(x)", "torch.randn(2, 16, 14, 14)")
HEADS = "torch.randn(2, 4, 64, 32)"
ATTENTION = module("pass", "F.scaled_dot_product_attention(q, k, v)", ", ".join([HEADS] * 3), "q, k, v")
_NARROW = """
def narrowed(x, dims, most={most}):
    scale = x.abs().amax(dims, keepdim=True).clamp_min(1e-12) / most
    return {few} * scale

def product(x, w, bias):
    return narrowed(x, (-1,)) @ narrowed(w, (-1,)).T + bias

class ModelNew(Model):
    def forward(self, {arguments}):
        {body}
"""
_TWO = "self.b.weight, self.b.bias)"
_INSIDE = f"product(torch.relu(product(x, self.a.weight, self.a.bias)), {_TWO}"
_ATTENTION = """p = torch.softmax(narrowed(q, (-1,)) @ narrowed(k, (-1,)).mT / 32**0.5, -1)
        return narrowed(p, (-1,)) @ narrowed(v, (-2,))"""
FEW = {"float8_e4m3fn": (448.0, "(x / scale).to(torch.float8_e4m3fn).float()"), "int8": (127.0, "(x / scale).round()")}
MODULES = {
    "two layers": (LAYERS, "x", f"return {_INSIDE}"),
    "a loss of them": (LOSS, "x", f"return ({_INSIDE} ** 2).mean()"),
    "a filter": (
        FILTER,
        "x",
        "return F.conv2d(narrowed(x, (1, 2, 3)), narrowed(self.a.weight, (1, 2, 3)), self.a.bias)",
    ),
    "attention": (ATTENTION, "q, k, v", _ATTENTION),
}


def judged(watching: Bench, problem: str, candidate: str) -> Fault:
    """A candidate of torch's code, in a process of its own."""
    given = parse_problem(problem, "L1/01_module")
    return watching.evaluate(given, Candidate(given.source + candidate, "torch"), {}, timing=False).verdict.fault


@pytest.mark.parametrize("precision", FEW)
@pytest.mark.parametrize("name", MODULES)
def test_weights_and_what_lies_in_between_may_be_narrow_with_leave(watching: Bench, name: str, precision: str) -> None:
    problem, arguments, body = MODULES[name]
    most, few = FEW[precision]
    candidate = _NARROW.format(arguments=arguments, body=body, most=most, few=few)
    assert judged(watching, declared(problem, precision), candidate) is Fault.OK
    assert judged(watching, problem, candidate) is Fault.INCORRECT


RECURRENT = """h, c = torch.zeros(8, 96), torch.zeros(8, 96)
        for step in x:
            gates = {first} + {second}
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h"""
GRU = """h, rows = torch.zeros(8, 96), []
        for step in x:
            a = product(step, self.a.weight_ih_l0, self.a.bias_ih_l0).chunk(3, -1)
            b = product(h, self.a.weight_hh_l0, self.a.bias_hh_l0).chunk(3, -1)
            r, z = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
            h = (1 - z) * (a[2] + r * b[2]).tanh() + z * h
            rows.append(h)
        return torch.stack(rows)"""
PLAIN = """h = torch.zeros(8, 96)
        for step in x:
            first = product(step, self.a.weight_ih_l0, self.a.bias_ih_l0)
            h = (first + product(h, self.a.weight_hh_l0, self.a.bias_hh_l0)).tanh()
        return h"""
DISTANCES = """most = (x**2).sum(-1)[:, None] + (y**2).sum(-1)[None]
        return (most - 2 * narrowed(x, (-1,)) @ narrowed(y, (-1,)).T).clamp_min(0).sqrt()"""
BILINEAR = """t = narrowed(x, (-1,)) @ narrowed(self.a.weight.transpose(0, 1).reshape(48, -1), (0,))
        return (t.view(-1, 32, 40) * y[:, None]).sum(-1) + self.a.bias"""
BILINEAR_TWICE = """t = narrowed(x, (-1,)) @ narrowed(self.a.weight.transpose(0, 1).reshape(48, -1), (0,))
        return (narrowed(t.view(-1, 32, 40), (-1,)) * narrowed(y, (-1,))[:, None]).sum(-1) + self.a.bias"""
_GROUPS = ", ".join(("torch.randn(128, 64).bfloat16()", "torch.randn(2, 64, 48).bfloat16()"))
_OFFSETS = "torch.tensor([48, 128], dtype=torch.int32)"
GROUPED = """one, two = (narrowed(a.float(), (-1,)) @ narrowed(b.float(), (0,)) for a, b in zip((x[:48], x[48:]), w))
        return torch.cat([one, two]).bfloat16()"""
_STEPS = "torch.randn(12, 8, 64)"
LATE = {
    "an LSTM": (
        module("self.a = nn.LSTM(64, 96)", "self.a(x)[1][0][0]", _STEPS),
        "x",
        RECURRENT.format(
            first="product(step, self.a.weight_ih_l0, self.a.bias_ih_l0)",
            second="product(h, self.a.weight_hh_l0, self.a.bias_hh_l0)",
        ),
    ),
    "an LSTM's inputs alone": (
        module("self.a = nn.LSTM(64, 96)", "self.a(x)[1][0][0]", _STEPS),
        "x",
        RECURRENT.format(
            first="product(step, self.a.weight_ih_l0, self.a.bias_ih_l0)",
            second="F.linear(h, self.a.weight_hh_l0, self.a.bias_hh_l0)",
        ),
    ),
    "a GRU": (module("self.a = nn.GRU(64, 96)", "self.a(x)[0]", _STEPS), "x", GRU),
    "an RNN": (module("self.a = nn.RNN(64, 96)", "self.a(x)[1][0]", _STEPS), "x", PLAIN),
    "distances": (
        module("pass", "torch.cdist(x, y)", "torch.randn(64, 128), torch.randn(96, 128)", "x, y"), "x, y", DISTANCES
    ),
    "a bilinear layer": (
        module("self.a = nn.Bilinear(48, 40, 32)", "self.a(x, y)", "torch.randn(64, 48), torch.randn(64, 40)", "x, y"),
        "x, y",
        BILINEAR,
    ),
    "both products of it": (
        module("self.a = nn.Bilinear(48, 40, 32)", "self.a(x, y)", "torch.randn(64, 48), torch.randn(64, 40)", "x, y"),
        "x, y",
        BILINEAR_TWICE,
    ),
    "grouped products": (
        module("pass", f"torch._grouped_mm(x, w, offs={_OFFSETS})", _GROUPS, "x, w"), "x, w", GROUPED
    ),
}  # fmt: skip


@pytest.mark.parametrize("precision", FEW)
@pytest.mark.parametrize("name", LATE)
def test_what_the_library_does_in_one_operator_may_be_narrow_with_leave(
    watching: Bench, name: str, precision: str
) -> None:
    problem, arguments, body = LATE[name]
    most, few = FEW[precision]
    candidate = _NARROW.format(arguments=arguments, body=body, most=most, few=few)
    assert judged(watching, declared(problem, precision), candidate) is Fault.OK
    assert judged(watching, problem, candidate) is Fault.INCORRECT
    fewer = _NARROW.format(arguments=arguments, body=body, most=7.0, few=FEW["int8"][1])
    assert judged(watching, declared(problem, precision), fewer) is Fault.INCORRECT


PARTIAL = {
    "the first layer of half of the inputs": ("x", "return self.b(torch.relu(self.a(x * (torch.arange(128) < 64))))"),
    "no second layer's bias": ("x", "return self.b(torch.relu(self.a(x))) - self.b.bias"),
    "no relu": ("x", "return self.b(self.a(x))"),
    "zeros": ("x", "return self.b(torch.relu(self.a(x))) * 0"),
}


@pytest.mark.parametrize("precision", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", PARTIAL)
def test_layers_left_out_are_wrong_with_leave(watching: Bench, name: str, precision: str) -> None:
    arguments, body = PARTIAL[name]
    candidate = f"\nclass ModelNew(Model):\n    def forward(self, {arguments}):\n        {body}\n"
    assert judged(watching, declared(LAYERS, precision), candidate) is Fault.INCORRECT


IN_C = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r'''
#include <math.h>
static float narrow(const float *x, long step, long n, signed char *out) {
    float most = 1e-12f;
    for (long i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i * step]));
    for (long i = 0; i < n; i++) out[i] = (signed char)rintf(x[i * step] * MOST / most);
    return most / MOST;
}
void product(const float *x, const float *w, float *out, long m, long k, long n) {
    static signed char left[512], right[96][512];
    float scales[96];
    for (long j = 0; j < n; j++) scales[j] = narrow(w + j, n, k, right[j]);
    for (long i = 0; i < m; i++) {
        float scale = narrow(x + i * k, 1, k, left);
        for (long j = 0; j < n; j++) {
            int sum = 0;
            for (long l = 0; l < UNTIL; l++) sum += left[l] * right[j][l];
            out[i * n + j] = sum * scale * scales[j];
        }
    }
}
'''

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "product")

    def forward(self, x, w):
        out = torch.empty(x.shape[0], w.shape[1])
        self.kernel(x, w, out, x.shape[0], x.shape[1], w.shape[1])
        return out
"""


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    ("precision", "most", "until", "fault"),
    [
        ("int8", "127.0f", "k", Fault.OK),
        ("int4", "7.0f", "k", Fault.OK),
        ("", "127.0f", "k", Fault.INCORRECT),
        ("tf32", "127.0f", "k", Fault.INCORRECT),
        ("int8", "7.0f", "k", Fault.INCORRECT),
        ("int4", "7.0f", "k / 2", Fault.INCORRECT),
    ],
)
def test_a_kernel_in_c_is_held_to_what_the_problem_allows(
    built_and_judged: Callable[..., Verdict], precision: str, most: str, until: str, fault: Fault, replay: bool
) -> None:
    problem = declared(PRODUCT, precision) if precision else PRODUCT
    verdict = built_and_judged(IN_C.replace("MOST", most).replace("UNTIL", until), problem, replay)
    assert verdict.fault is fault, verdict
    assert ("root mean square" in verdict.tolerance_note) is bool(precision)


LARGE = PRODUCT.replace("torch.randn(64, 512)", "torch.randn(64, 512) * 100")


def test_where_products_overflow_in_fp16_a_milder_set_is_taken(sets_of: Callable[[str], list[InputSet]]) -> None:
    """Ten times as large as usual they are no numbers in fp16, which the problem gives leave for."""

    def kept_in_half(x: torch.Tensor, w: torch.Tensor, until: int = K) -> torch.Tensor:
        return (x.half()[:, :until].float() @ w.half()[:until].float()).half()

    sets = sets_of(declared(LARGE, "float16"))
    assert wrong_on(sets, kept_in_half) == set()
    assert "nominal" in wrong_on(sets, lambda x, w: kept_in_half(x, w, K - 1))
    assert "nominal" in wrong_on(sets, product(fp8, fp8))
    assert "large" in wrong_on(sets_of(LARGE), kept_in_half)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return (x * 30).round().clamp(-127, 127).char()


BYTES = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, w):
        few = [(one * 30).round().clamp(-127, 127).to(torch.int8) for one in (x, w)]
        return torch._int_mm(*few).float() / 900

def get_inputs():
    return [torch.randn(64, 512), torch.randn(512, 96)]

def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("precision", ["int4", "float8_e4m3fn", "nvfp4"])
def test_whole_numbers_of_a_byte_may_be_narrow_with_leave(
    sets_of: Callable[[str], list[InputSet]], precision: str
) -> None:
    way = OF[precision]

    def kernel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return way(bytes_of(x).float(), 1) @ way(bytes_of(w).float(), 0) / 900

    assert wrong_on(sets_of(declared(BYTES, precision)), kernel) == set()
    for less in (declared(BYTES, "int8"), BYTES):
        assert "nominal" in wrong_on(sets_of(less), kernel)


def without_autograd(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            return call()

    return run


_QUERY, _KEY, _MASK = torch.randn(2, 4, 48, 16), torch.randn(2, 2, 64, 16), torch.randn(4, 48, 64)
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": _MASK > 0},
    "with a bias": {"attn_mask": _MASK, "scale": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
def test_large_attention_is_simulated_in_blocks(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """As a whole it found no memory, and an honest kernel was given no room."""

    def attention() -> torch.Tensor:
        query, key = _QUERY.to(dtype), _KEY.to(dtype)
        return torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, **BLOCKS[name])

    scores, product_of = list[int](), torch.softmax

    def watched(x: torch.Tensor, dim: int) -> torch.Tensor:
        scores.append(x.numel())
        return product_of(x, dim)

    with torch.no_grad():
        whole = lowered(attention, number("int8"))
        monkeypatch.setattr(taken_apart, "SCORES", 700)
        monkeypatch.setattr(torch, "softmax", watched)
        found = lowered(attention, number("int8"))
        plain = attention()
    assert max(scores) <= 700
    torch.testing.assert_close(found, whole, rtol=1e-2, atol=4e-2 if dtype is torch.bfloat16 else 1e-5)
    assert float((found - plain).abs().max()) > 1e-3


X, W = torch.randn(2, 32, 64), torch.randn(64, 48)
_HEADS = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
_LAYER = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).eval()
WHOLE: dict[str, Callable[[], torch.Tensor]] = {
    "heads of attention": lambda: _HEADS(X, X, X, need_weights=False)[0],
    "a layer of an encoder": lambda: _LAYER(X),
    "a product without autograd": without_autograd(lambda: X @ W),
    "a layer without autograd": without_autograd(lambda: torch.nn.functional.linear(X, W.T)),
    "attention without autograd": without_autograd(lambda: torch.nn.functional.scaled_dot_product_attention(X, X, X)),
    "an expert that nobody asks": lambda: X[0] @ W + (X[0, :0] @ W).sum(),
}


@pytest.mark.parametrize("precision", ["float8_e4m3fn", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", WHOLE)
def test_products_are_narrow_wherever_the_library_has_them(name: str, precision: str) -> None:
    """In one operator of its own for a whole layer, untouched by autograd, of no rows."""
    with torch.no_grad():
        expected = WHOLE[name]()
        other = lowered(WHOLE[name], number(precision))
        assert torch.equal(WHOLE[name](), expected), "nothing is left behind"
    assert 1e-3 < float((other - expected).std() / expected.std()) < 0.5
