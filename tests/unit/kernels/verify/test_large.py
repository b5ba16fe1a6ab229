"""Problems too large to keep their sets: judged one set at a time; what does not fit either is refused first."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options, wire
from kbrl_async.kernels.verify.known import AskedSet, Held, Recent, Sizes
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import ForwardOutcome, Session
from protocols.records import BenchReport, Candidate, Fault, Problem
from tests.candidates import affine, elementwise

PROBLEM = Problem("L1/07_large", 1, "large", affine(shape="256, 256"))
SIZE = 256 * 256 * 4
RIGHT, WRONG = elementwise("2 * x[i] + 1"), elementwise("2 * x[i] + (x[i] > 5 ? 2 : 1)")
Memory = Callable[[int], None]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """What a bench may plan with."""
    return lambda size: monkeypatch.setattr(Reference, "_memory", lambda self: size)


@pytest.fixture
def bench(zygote: Zygote) -> Iterator[Bench]:
    options = bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0)
    with contextlib.closing(Bench(zygote, options, random.Random(1))) as made:
        yield made


def judge(
    bench: Bench, source: str, compile_raw: Callable[[str], dict[str, Path]], timing: bool = False
) -> BenchReport:
    artifacts = compile_raw(source.split("SOURCE = ")[1].split("\n")[0].strip("'").encode().decode("unicode_escape"))
    return bench.evaluate(PROBLEM, Candidate(source, "c"), artifacts, timing=timing)


def test_one_set_at_a_time_is_judged_as_all_at_once(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    memory(20 * SIZE)
    right = judge(bench, RIGHT, compile_raw, timing=True)
    reference = next(iter(bench._references._kept.values())).references[0]
    assert not reference.keeps_sets
    assert all(isinstance(one.known, AskedSet) for one in reference.sets)
    assert reference.host_bytes < 3 * SIZE, "no more than the numbers that mixtures take"
    assert right.verdict.fault is Fault.OK, right.verdict
    assert right.timing is not None
    wrong = judge(bench, WRONG, compile_raw).verdict
    assert wrong.fault is Fault.INCORRECT
    assert wrong.total == right.verdict.total
    assert reference.sets[0].known is reference.sets[-1].known, "the same inputs come twice"


def test_where_memory_is_shorter_still_nothing_runs_in_fp64(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    memory(12 * SIZE)
    assert judge(bench, RIGHT, compile_raw).verdict.fault is Fault.OK
    reference = next(iter(bench._references._kept.values())).references[0]
    assert not reference.widens
    assert reference.sets[0].tolerances[0].relative == 1e-4


def test_a_set_made_again_is_the_same_set(bench: Bench, memory: Memory) -> None:
    memory(20 * SIZE)
    reference = bench._references.get(PROBLEM).references[0]
    seen = [[block.clone() for block in (*one.blocks, *one.expected)] for one in reference.sets]
    for one, before in zip(reference.sets, seen, strict=True):
        assert all(map(torch.equal, (*one.blocks, *one.expected), before)), one.name
    assert len({float(blocks[0].sum()) for blocks in seen}) == len(reference.sets) - 1


def test_what_does_not_fit_is_refused_in_bytes_before_anything_is_made(bench: Bench, memory: Memory) -> None:
    memory(8 * SIZE)
    with pytest.raises(ProblemError) as caught:
        bench._references.get(PROBLEM)
    text = str(caught.value)
    assert "L1/07_large does not fit" in text
    assert "inputs 262,144 bytes, outputs 262,144 bytes, weights 0 bytes" in text
    assert "timing_bench.memory_share" in caught.value.cure


def test_small_problems_keep_their_sets(bench: Bench) -> None:
    reference = bench._references.get(PROBLEM).references[0]
    assert reference.keeps_sets
    assert all(isinstance(one.known, Held) for one in reference.sets)


def test_only_the_last_set_is_in_memory() -> None:
    made: list[int] = []

    def make(number: int) -> Callable[[], Held]:
        return lambda: made.append(number) or Held([torch.tensor(number)], [])

    recent = Recent()
    sets = [AskedSet(recent, make(number)) for number in range(2)]
    for one in (*sets, sets[1], sets[0]):
        one.load()
        assert one.blocks
    assert made == [0, 1, 0]


def test_the_peak_grows_with_what_is_kept() -> None:
    sizes = Sizes(1000, 1000, 10)
    assert sizes.asked < sizes.kept(draws=4, slots=3)
    assert sizes.are_kept(10**6, 4, 3)
    assert not sizes.are_kept(2 * sizes.asked, 4, 3)


LATE = """

class ModelNew(Model):
    def forward(self, x):
        import time
        if not hasattr(self, "is_warm"):
            time.sleep(0.8)
        self.is_warm = True
        return super().forward(x)
"""


@pytest.mark.parametrize(("first_call_s", "fault"), [(0.0, Fault.TIMEOUT), (8.0, Fault.OK)])
def test_a_first_call_may_compile(zygote: Zygote, first_call_s: float, fault: Fault) -> None:
    options = bench_options(TimingBench(deadline_s=20.0), call_floor_s=0.3, replay=False, first_call_s=first_call_s)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + LATE, "torch"), {}, timing=False).verdict
    assert found.fault is fault, found


def test_what_others_plan_with_is_given_back_and_asked_for_again(
    bench: Bench,
    memory: Memory,
    compile_raw: Callable[[str], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory(1000 * SIZE)
    asked: list[int] = []

    def refuse(size: int) -> bool:
        asked.append(size)
        return False

    monkeypatch.setattr(Reference, "device_bytes", 5)
    monkeypatch.setattr(bench._device, "may_use", refuse)
    monkeypatch.setattr(bench._device, "rest", lambda kept: True)
    judge(bench, RIGHT, compile_raw)
    first = next(iter(bench._references._kept.values()))
    assert first.needed == Sizes(SIZE, SIZE).kept(4, 3)
    assert judge(bench, RIGHT, compile_raw).verdict.fault is Fault.OK
    assert asked == [first.needed]
    assert next(iter(bench._references._kept.values())) is not first, "others had the memory: it is made anew"
    monkeypatch.setattr(bench._device, "rest", lambda kept: not kept)
    judge(bench, RIGHT, compile_raw)
    assert bench.references_kept == 0


def test_what_was_given_back_is_there_again_before_it_is_read_once_more(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a child's outputs are gone then, and asking for them again found none."""
    done: list[str] = []
    call = Session.call

    def noted(self: Session, op: int, *rest: Any) -> ForwardOutcome:
        done.append({wire.OP_RUN: "run", wire.OP_EMPTY: "read"}.get(op, ""))
        return call(self, op, *rest)

    memory(20 * SIZE)
    monkeypatch.setattr(Session, "again", lambda self, op, slot, metas, limit: self.call(op, slot, limit).tensors)
    monkeypatch.setattr(Session, "call", noted)
    monkeypatch.setattr(Reference, "_forget_outputs", lambda self: done.append("gone"))
    bench._references.get(PROBLEM)
    read = done.index("read")
    assert done[read - 2 : read] == ["gone", "run"]
