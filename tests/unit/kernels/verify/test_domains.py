"""Secret sets stay where a problem's reference means something: one-sided, declared, well-conditioned."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.verify import Bench, sets
from kbrl_async.kernels.verify.compare import difference
from kbrl_async.kernels.verify.input_set import is_degenerate
from kbrl_async.kernels.verify.inputs import KINDS, Kind, moved, vary
from kbrl_async.kernels.verify.tolerance import Tolerance, is_noise, tolerance
from protocols.records import Candidate, Fault

SIDES = {
    "decays": -torch.rand(64, 8) - 0.01,
    "variances": torch.rand(64, 8) + 0.5,
    "probabilities": torch.rand(64, 8),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_has_one_side_keeps_it(name: str, kind: object) -> None:
    given = SIDES[name]
    made = vary([given], kind, random.Random(1))[0]  # type: ignore[arg-type]
    assert bool((made * given.sign().flatten()[0] >= 0).all())


def test_what_never_comes_near_zero_never_becomes_zero() -> None:
    for kind in KINDS:
        assert bool((vary([SIDES["variances"]], kind, random.Random(1))[0] != 0).all()), kind.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_distributions_and_their_logarithms_are_left_as_they_were_drawn(kind: Kind) -> None:
    given = [torch.randn(64, 8).softmax(-1), torch.randn(64, 8).log_softmax(-1)]
    made = vary(given, kind, random.Random(1))
    assert all(map(torch.equal, made, given))
    assert kind.name in ("nominal", "mixed", "repeated") or not torch.equal(
        vary([-given[0]], kind, random.Random(1))[0], -given[0]
    )


def test_a_declared_domain_is_kept_and_a_fixed_input_stays() -> None:
    given = [torch.rand(64, 8), torch.randn(64, 8)]
    for kind in KINDS:
        first, second = vary(given, kind, random.Random(1), {0: (0.0, 1.0)}, {1})
        assert float(first.min()) >= 0
        assert float(first.max()) <= 1
        assert torch.equal(second, given[1])


def test_half_precision_moves_where_that_is_asked_for() -> None:
    given = torch.randn(256).to(torch.bfloat16)
    assert torch.equal(moved([given], random.Random(1))[0], given)
    assert not torch.equal(moved([given], random.Random(1), coarse=True)[0], given)


def test_two_units_in_the_last_place_of_bfloat16_are_no_error() -> None:
    expected = torch.full((8,), 1000.0, dtype=torch.bfloat16)
    allowed = tolerance(expected, expected.double(), 1000.0)
    assert allowed.relative * 1000 + allowed.absolute >= 2 * 4.0
    assert tolerance(expected, None, 1000.0, declared=(1e-3, 0.0)).relative == 1e-3


ATTENTION = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def get_inputs():
    return [torch.randn(1, 8, 96, 64).half() for _ in range(3)]

def get_init_inputs():
    return []
"""


def by_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As kernels on tensor cores do it: scaled queries and weights are rounded to half precision."""
    scores = (q.float() * 0.125 * 1.44269504).half().float() @ k.float().transpose(-1, -2)
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (weights.half().float() @ v.float() / weights.sum(-1, keepdim=True)).half()


def test_attention_that_rounds_scaled_queries_is_right(bench: Bench) -> None:
    reference = bench.references.get(parse_problem(ATTENTION, "L0/attention")).references[0]
    for one in reference.sets:
        given = [block.view(like.shape) for block, like in zip(one.blocks, reference.examples, strict=True)]
        found = difference(by_blocks(*given), one.expected[0], one.tolerances[0])
        assert found.wrong == 0, (one.name, found)
        assert one.tolerances[0].honest <= 0.05 * float(one.expected[0].abs().max())


def by_rows_of_integers(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
    return (x / step).round() * step


GELU = (
    ATTENTION.replace("q, k, v):", "x):")
    .replace("return F.scaled_dot_product_attention(q, k, v, is_causal=True)", "return F.gelu(x)")
    .replace("torch.randn(1, 8, 96, 64).half() for _ in range(3)", "torch.randn(64, 512).bfloat16()")
)


def test_an_element_gets_no_room_for_what_others_of_its_size_move_by(bench: Bench) -> None:
    """Large elements move by more than small ones, each within what its own size allows: then int8 does not pass."""
    reference = bench.references.get(parse_problem(GELU, "L0/gelu")).references[0]
    wrong = set()
    for one in reference.sets:
        answer = F.gelu(one.blocks[0].view(64, 512).float())
        step = answer.abs().max() / 127
        if difference(((answer / step).round() * step).bfloat16(), one.expected[0], one.tolerances[0]).wrong:
            wrong.add(one.name)
    assert {"large", "graded"} <= wrong


LOWERED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "queries in bfloat16": (lambda x: x.bfloat16().float(), 0),
    "keys in bfloat16": (lambda x: x.bfloat16().float(), 1),
    "queries in int8": (by_rows_of_integers, 0),
}


@pytest.mark.parametrize("name", LOWERED)
def test_attention_whose_inputs_lose_bits_is_wrong(bench: Bench, name: str) -> None:
    """What an honest kernel rounds in between does not let inputs pass that are rounded further than they were."""
    lower, which = LOWERED[name]
    reference = bench.references.get(parse_problem(ATTENTION, "L0/attention")).references[0]
    wrong = set()
    for one in reference.sets:
        given = [block.view(like.shape).float() for block, like in zip(one.blocks, reference.examples, strict=True)]
        given[which] = lower(given[which])
        found = F.scaled_dot_product_attention(*given, is_causal=True).half()
        if difference(found, one.expected[0], one.tolerances[0]).wrong:
            wrong.add(one.name)
    assert len(wrong & {"large", "spikes", "graded"}) >= 2, wrong


# Chunked linear attention with decay, as far as it matters: a sum of decays inside of exp, cast to float inside.
DECAY = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, decay):
        total = decay.float().cumsum(-1)
        return (x.float() * torch.exp(total)).cumsum(-1).to(x.dtype)

def get_inputs():
    return [torch.randn(8, 64).to(torch.bfloat16), (DECAYS).to(torch.bfloat16)]

def get_init_inputs():
    return []
"""
# Honest: the same in another order, and only the exponential's argument in half precision.
OTHER = """
class ModelNew(Model):
    def forward(self, x, decay):
        total = torch.cumsum(decay.double(), -1).to(torch.bfloat16).double()
        return torch.cumsum(x.double() * torch.exp(total), -1).to(x.dtype)
"""


def _judged(watching: Bench, problem: str, candidate: str) -> Fault:
    given = parse_problem(problem, "L1/01_decay")
    return watching.evaluate(given, Candidate(given.source + candidate, "torch"), {}, timing=False).verdict.fault


def test_an_honest_kernel_of_a_decay_passes(watching: Bench) -> None:
    assert _judged(watching, DECAY.replace("DECAYS", "-torch.rand(8, 64) * 0.05"), OTHER) is Fault.OK


def test_without_the_look_at_conditions_it_is_called_wrong(watching: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decays of both signs nothing is one-sided, so only the reference itself shows where it is noise."""
    problem = DECAY.replace("DECAYS", "torch.randn(8, 64) * 0.2 - 0.3")
    assert _judged(watching, problem, OTHER) is Fault.OK
    monkeypatch.setattr(sets.SetMaker, "strays", lambda *_: "")
    found = {_judged(watching, problem + "\n" * n, OTHER) for n in range(1, 6)}  # one draw in ten is kind to it
    assert Fault.INCORRECT in found


TOLD = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 3

def get_inputs():
    return [torch.randn(16, 33)]

def get_init_inputs():
    return []
"""
NARROW = """
class ModelNew(Model):
    def forward(self, x):
        return (torch.tanh(x).to(torch.bfloat16) * 3).float()
"""


def test_lowered_precision_is_found_unless_the_problem_declares_it(watching: Bench) -> None:
    assert _judged(watching, TOLD, NARROW) is Fault.INCORRECT
    assert _judged(watching, TOLD + 'TOLERANCES = {"float32": 2e-2}\n', NARROW) is Fault.OK


NOISE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)).mean(-1)

def get_inputs():
    return [torch.randn(32, 512)]

def get_init_inputs():
    return []
"""
WIDE = """
class ModelNew(nn.Module):
    def forward(self, x):
        return Model()(x.double()).float()
"""


def test_an_output_of_rounding_errors_alone_refuses_nobody_and_proves_nothing(bench: Bench) -> None:
    problem = parse_problem(NOISE, "L2/23_noise")
    verdict = bench.evaluate(problem, Candidate(NOISE + WIDE, "torch"), {}, timing=False).verdict
    assert verdict.fault is Fault.OK, verdict
    assert all(one.degenerate for one in bench.references.get(problem).references[0].sets)


@pytest.mark.parametrize(
    ("made", "is_so"),
    [
        (lambda x: x.half(), True),
        (lambda x: x.double(), True),
        (lambda x: x.half() * 2, False),
        (lambda x: (x + 1e-5 * x.roll(1)).double(), False),  # real work, within what is allowed
        (lambda x: x > 0, False),
        (lambda x: x.to(torch.complex64), False),
    ],
)
def test_where_a_cast_of_an_input_is_right_nothing_is_proven(
    made: Callable[[torch.Tensor], torch.Tensor], is_so: bool
) -> None:
    """A copy of what the library had cast was accepted: bringing inputs to another type is free."""
    x = torch.randn(4096)
    assert is_degenerate([x], [made(x)], [Tolerance(1e-4, 1e-4)]) is is_so


def test_a_jump_is_no_noise() -> None:
    wide = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    steps = torch.sign(wide)
    moved = steps.clone()
    moved[500:502] *= -1
    assert not is_noise(steps.float(), moved)
    assert is_noise(torch.randn(100) * 1e-8, torch.zeros(100, dtype=torch.float64))
    assert not is_noise(wide.float(), wide)
    assert not is_noise(torch.zeros(9), torch.zeros(9))


DRAWN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, y):
        return {answer}

def get_inputs():
    return {inputs}

def get_init_inputs():
    return []
"""
SIGNED = DRAWN.format(
    answer="torch.floor_divide(x, y)", inputs="[torch.randn(64).bfloat16(), torch.randn(1).double() + 3]"
)
UNEVEN = DRAWN.format(answer="x / y", inputs="[torch.randn(8, 8), 10.0 ** (6 * torch.rand(1) - 6)]")
NOTHING = DRAWN.format(answer="x / y", inputs="[torch.zeros(8, 8), torch.zeros(1)]")


def judged_as_itself(bench: Bench, problem: str) -> Fault:
    own = problem.replace("class Model(", "class ModelNew(")
    return bench.evaluate(parse_problem(problem, "L1/01_a"), Candidate(own, "torch"), {}).verdict.fault


def test_an_answer_in_fp64_stays_as_the_reference_gave_it(bench: Bench) -> None:
    assert judged_as_itself(bench, SIGNED) is Fault.OK


def test_what_a_problem_draws_itself_is_never_outside_of_what_it_is_for(bench: Bench) -> None:
    for name in "abcd":  # draws of one size are rare
        assert judged_as_itself(bench, f"# {name}\n{UNEVEN}") is Fault.OK


def test_a_reference_with_nothing_finite_is_named(bench: Bench) -> None:
    with pytest.raises(ProblemError, match="gives no finite output"):
        judged_as_itself(bench, NOTHING)
