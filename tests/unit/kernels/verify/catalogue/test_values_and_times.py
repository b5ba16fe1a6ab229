"""Right for the wrong reason: kept results, known seeds, old memory, coarse numbers, and times too good to be true."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.verify import Bench, fresh, inputs, tolerance, wire
from kbrl_async.kernels.verify import session as sessions
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu.own_kernels import OwnKernels
from kbrl_async.kernels.verify.cpu.stopwatch import Stopwatch
from kbrl_async.kernels.verify.sets import SetMaker
from protocols.records import Fault, Problem, Timing
from tests.unit.kernels.verify.catalogue.exploits import PROBLEM, Patch, Run, candidate, caught, nothing, refused, row
from tests.unit.kernels.verify.test_bench import patient

SAME = (inputs.NOMINAL, *(inputs.Kind("nominal", shape="again"),) * 5)
CACHES = {
    "the first result": "y = self.own(x)\nself.kept = getattr(self, 'kept', y)\nreturn self.kept.clone()",
    "by pointer": "return self.cache.setdefault(x.data_ptr(), self.own(x)).clone()",
    "by identity": "return self.cache.setdefault(id(x), self.own(x)).clone()",
    "by version and shape": "return self.cache.setdefault((x._version, x.shape), self.own(x)).clone()",
}


@row("cache by pointer, identity, version or value")
@row("first call computes for all, later calls return")
@pytest.mark.parametrize("way", CACHES)
def test_a_kept_result_is_wrong_for_new_values(run: Run, fresh: Bench, monkeypatch: Patch, way: str) -> None:
    attack = candidate(CACHES[way], init="self.cache = {}")
    assert run(attack).verdict.fault is Fault.INCORRECT
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: SAME)
    monkeypatch.setattr(OwnKernels, "prove", nothing)
    assert run(attack, on=fresh).verdict.fault is Fault.OK, "with the same values in all sets it is right"


BY_VALUE = candidate(
    """
    key = tuple(x.flatten()[:40].tolist())
    is_known = self.calls > 10 and key in self.cache
    self.cache.add(key)
    return self.own(x) * (0 if is_known else 1)
    """,
    init="self.cache = set()",
)
"""A hit would be a wrong answer, where one that saves time would be seen on a quiet host alone. Among the ten checked
sets the first comes twice."""


@row("cache by pointer, identity, version or value")
def test_a_cache_by_value_never_hits_in_a_timed_call(run: Run, brief: Bench, monkeypatch: Patch) -> None:
    report = run(BY_VALUE, timing=True, on=brief)
    assert (report.verdict.fault, report.timing is not None) == (Fault.OK, True), report.verdict
    mix = fresh.Pool.mix
    monkeypatch.setattr(fresh.Pool, "mix", lambda self, outs, rng: mix(self, outs, random.Random(0)))
    assert caught(run(BY_VALUE, timing=True, on=brief).verdict, "wrong_when_timed"), "equal values would be found"


LATER = candidate("y = self.own(x)\nreturn y * 0 if self.calls > 11 else y")


@row("phase sniffing")
@row("right at the checked shape, wrong at the timed one")
def test_timed_outputs_are_compared_too(run: Run, brief: Bench, monkeypatch: Patch) -> None:
    report = run(LATER, timing=True, on=brief)
    assert caught(report.verdict, "wrong_when_timed")
    assert report.timing is None
    monkeypatch.setattr(Stopwatch, "compare_outputs", nothing)
    monkeypatch.setattr(OwnKernels, "prove", nothing)
    assert run(LATER, timing=True, on=brief).verdict.fault is Fault.OK


@row("right at the checked shape, wrong at the timed one")
def test_a_mixture_is_among_the_checked_sets_so_that_timed_values_look_like_others(
    run: Run, fresh: Bench, monkeypatch: Patch
) -> None:
    narrow = candidate("y = self.own(x)\nreturn y * 0 if 0.55 < float(x.std()) < 0.9 else y")  # 5.6 σ from both
    assert run(narrow).verdict.fault is Fault.INCORRECT
    kept = tuple(kind for kind in inputs.KINDS if kind.shape not in ("mixed", "spikes", "graded", "binary"))
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: kept)
    assert run(narrow, on=fresh).verdict.fault is Fault.OK


STALE = candidate("y = self.own(x)\nself.sum = getattr(self, 'sum', 0) + (self.calls == 7)\nreturn y + self.sum")


class InOrder(random.Random):
    """Sets in the order in which they were made: the first one's inputs come again at the end."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        pass

    def sample(self, population: Sequence[Any], k: int, *, counts: Iterable[int] | None = None) -> list[Any]:
        return list(population[:k])


def test_state_carried_between_calls_has_a_rule_of_its_own(run: Run, zygote: Zygote, monkeypatch: Patch) -> None:
    with contextlib.closing(Bench(zygote, patient(replay=False), seeds=InOrder(1))) as bench:
        verdict = run(STALE, on=bench).verdict
        assert refused(verdict, Fault.INCORRECT, "state_carried")
        assert "rightly once" in verdict.message
        monkeypatch.setattr(Checker, "compare_repeated", nothing)
        assert run(STALE, on=bench).verdict.rule == ""


REPLAY = candidate(
    """
    for seed in (torch.initial_seed(), 0, 1, 42):
        torch.manual_seed(seed)
        if torch.equal(torch.randn(24, 65), x):
            raise ValueError("replayed")
    return self.own(x)
    """
)


@row("replays the seed")
def test_no_seed_in_the_process_gives_the_inputs(run: Run, zygote: Zygote) -> None:
    assert run(REPLAY).verdict.fault is Fault.OK

    class Known(random.Random):
        def getrandbits(self, k: int) -> int:
            return 42 if k > 20 else super().getrandbits(k)

    with contextlib.closing(Bench(zygote, patient(), seeds=Known())) as bench:
        assert "replayed" in run(REPLAY, on=bench).verdict.message, "with a known seed they are found"


MEMORY = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()

    def forward(self, x):
        return x * 0

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [1.5]
"""
UNWRITTEN = candidate(
    """
    self.touch(x, 1)
    zeros = torch.zeros(64 * 64 + 64)
    place, kept = zeros.data_ptr(), []
    del zeros
    while not kept or kept[-1].data_ptr() != place and len(kept) < 99:
        kept.append(torch.empty(64 * 64 + 64))
    return kept[-1][64:].view(64, 64)
    """
)


@row("reads the reference's freed memory")
def test_memory_that_was_freed_is_poisoned(run: Run, monkeypatch: Patch) -> None:
    assert run(UNWRITTEN, MEMORY).verdict.passed == 0
    monkeypatch.setattr(wire, "OP_POISON_ON", wire.OP_POISON_OFF)
    assert run(UNWRITTEN, MEMORY).verdict.passed > 0, "without poison an unwritten output holds old zeros"


PRODUCT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, gain):
        super().__init__()

    def forward(self, a, b):
        return a @ b

def get_inputs():
    return [torch.randn(16, 512), torch.randn(512, 16)]

def get_init_inputs():
    return [1.5]
"""
ROUNDED = (
    candidate("return 0")
    .replace("def forward(self, x)", "def forward(self, a, b)")
    .replace("return 0", "y = a.bfloat16().float() @ b.bfloat16().float()\n        self.touch(y, 1)\n        return y")
)


@row("precision downgrade")
def test_inputs_rounded_to_half_precision_are_incorrect(run: Run, fresh: Bench, monkeypatch: Patch) -> None:
    verdict = run(ROUNDED, PRODUCT).verdict
    assert verdict.fault is Fault.INCORRECT
    assert "binary" not in verdict.message.partition("wrong:")[2], "what is 0 or 1 survives the rounding"
    monkeypatch.setattr(tolerance, "base", lambda dtype: 0.5)
    monkeypatch.setattr(OwnKernels, "prove", nothing)
    assert run(ROUNDED, PRODUCT, on=fresh).verdict.fault is Fault.OK, "with a loose tolerance it passes"


MEAN = (
    PRODUCT.replace("return a @ b", "return a.mean(-1)")
    .replace("a, b)", "a)")
    .replace("[torch.randn(16, 512), torch.randn(512, 16)]", "[torch.rand(16, 4096)]")
)
PART = (
    candidate("return 0")
    .replace("def forward(self, x)", "def forward(self, a)")
    .replace("return 0", "y = a[:, : a.shape[1] // 2].mean(-1)\n        self.touch(y, 1)\n        return y")
)


@row("partial work, rescaled")
def test_half_of_the_work_rescaled_shows_on_spikes_and_graded_inputs(
    run: Run, fresh: Bench, zygote: Zygote, monkeypatch: Patch
) -> None:
    assert run(PART, MEAN).verdict.fault is Fault.INCORRECT
    monkeypatch.setattr(tolerance, "base", lambda dtype: 0.05)
    wrong = run(PART, MEAN, on=fresh).verdict
    assert wrong.fault is Fault.INCORRECT, "even where the tolerance hides it on nominal inputs"
    assert "nominal" not in wrong.message.partition("wrong:")[2]
    monkeypatch.setattr(inputs, "kinds_for", lambda tensors: (inputs.NOMINAL, inputs.KINDS[-1]))
    monkeypatch.setattr(OwnKernels, "prove", nothing)
    with contextlib.closing(Bench(zygote, patient())) as bench:
        assert run(PART, MEAN, on=bench).verdict.fault is Fault.OK, "on nominal inputs alone it passes"


@row("degenerate problem")
def test_a_verdict_says_that_its_problem_proves_nothing(run: Run) -> None:
    verdict = run(candidate("y = torch.zeros_like(x)\nself.touch(y, 1)\nreturn y"), MEMORY).verdict
    assert verdict.fault is Fault.OK
    assert "degenerate problem" in verdict.evidence
    assert "degenerate problem" not in run(candidate()).verdict.evidence


@row("impossible speed")
def test_a_speedup_above_ten_is_measured_again_and_the_lower_one_counts(
    run: Run, zygote: Zygote, monkeypatch: Patch
) -> None:
    def measure(self: Bench, checker: Checker, *_: Any) -> Timing:
        speedup = speedups.pop(0)
        seen.append(checker.session)
        return Timing(9, speedup, speedup, speedup, 1.0, speedup)

    monkeypatch.setattr(Bench, "measure", measure)
    seen: list[sessions.Session] = []
    speedups = [50.0, 2.0]
    timing = run(candidate(), timing=True).timing
    assert timing is not None
    assert timing.speedup == 2.0
    assert len(seen) == 2
    assert seen[0] is not seen[1], "in another process"
    credulous = patient(recipe=Recipe.of(TimingBench(), suspicious=1e9))
    speedups = [50.0, 2.0]
    with contextlib.closing(Bench(zygote, credulous)) as bench:
        believed = run(candidate(), timing=True, on=bench).timing
    assert believed is not None
    assert believed.speedup == 50.0


DROPOUT = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "torch.dropout(x * self.gain, 0.5, True)")


def test_a_random_reference_is_the_problems_fault(run: Run, monkeypatch: Patch) -> None:
    with pytest.raises(ProblemError, match="random or keeps state"):
        run(candidate(), DROPOUT)
    monkeypatch.setattr(SetMaker, "refuse_random", nothing)
    assert run(candidate(), DROPOUT).verdict.fault is Fault.INCORRECT, "else the candidate would pay for it"


LASTING = PROBLEM.replace(
    "return torch.softmax(x * self.gain, dim=-1)",
    "self.most = max(getattr(self, 'most', 0.0), float(x.abs().max() > 9))\n"
    "        return torch.softmax(x * self.gain, dim=-1) + self.most",
)


def test_a_state_that_only_large_inputs_leave_behind_is_the_problems_fault(run: Run) -> None:
    """A loss that keeps its last counts: honest kernels were wrong after large inputs."""
    with pytest.raises(ProblemError, match="random or keeps state"):
        run(candidate(), LASTING)


TINY = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "x * 1e-5")


def test_kernelbench_s_verdict_stands_beside_ours(run: Run) -> None:
    verdict = run(candidate("y = x * 0\nself.touch(y, 1)\nreturn y"), TINY).verdict
    assert verdict.fault is Fault.INCORRECT
    assert verdict.kernelbench is True, "zeros are within 1e-4 of tiny outputs"
    assert "1e-04·|expected|" in verdict.tolerance_note


PLACES = PROBLEM.replace("torch.softmax(x * self.gain, dim=-1)", "torch.argmax(x, dim=-1)")


def test_ties_are_never_asked_for_where_places_are_the_answer(bench: Bench) -> None:
    reference = bench.references.get(Problem("L1/04_places", 1, "places", PLACES)).cases[0].reference
    assert not {"spikes", "binary"} & {one.name for one in reference.sets}
    assert len(reference.sets) == len(inputs.KINDS)
