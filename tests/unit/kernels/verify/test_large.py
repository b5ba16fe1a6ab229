"""Problems too large to keep their sets: judged one set at a time; what does not fit either is refused first."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.stages import spans
from kbrl_async.kernels.verify import Bench, bench_options, wire
from kbrl_async.kernels.verify import session as sessions
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cpu.device import CpuDevice
from kbrl_async.kernels.verify.hoarding import Crowded
from kbrl_async.kernels.verify.known import AskedSet, Held, Offloaded, Recent, Sizes
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Session
from protocols.records import REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.candidates import affine, elementwise

PROBLEM = Problem("L1/07_large", 1, "large", affine(shape="256, 256"))
SIZE = 256 * 256 * 4
RIGHT, WRONG = elementwise("2 * x[i] + 1"), elementwise("2 * x[i] + (x[i] > 5 ? 2 : 1)")
Memory = Callable[[int], None]
DEVICE = CpuDevice("cpu")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """What a bench may plan with."""
    return lambda size: monkeypatch.setattr(Reference, "plannable_bytes", lambda self: size)


@pytest.fixture
def bench(zygote: Zygote) -> Iterator[Bench]:
    options = bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0)
    with contextlib.closing(Bench(zygote, options, random.Random(1), device=DEVICE)) as made:
        yield made


def judge(
    bench: Bench,
    source: str,
    compile_raw: Callable[[str], dict[str, Path]],
    timing: bool = False,
    problem: Problem = PROBLEM,
) -> BenchReport:
    artifacts = compile_raw(source.split("SOURCE = ")[1].split("\n")[0].strip("'").encode().decode("unicode_escape"))
    return bench.evaluate(problem, Candidate(source, "c"), artifacts, timing=timing)


def test_one_set_at_a_time_is_judged_as_all_at_once(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    memory(20 * SIZE)
    right = judge(bench, RIGHT, compile_raw, timing=True)
    reference = next(iter(bench.references.kept.values())).references[0]
    assert not reference.keeps_sets
    assert all(isinstance(one.known, AskedSet) for one in reference.sets)
    assert reference.host_bytes < 3 * SIZE, "no more than the numbers that mixtures take"
    assert right.verdict.fault is Fault.OK, right.verdict
    assert right.timing is not None
    wrong = judge(bench, WRONG, compile_raw).verdict
    assert wrong.fault is Fault.INCORRECT
    assert wrong.total == right.verdict.total
    assert reference.sets[0].known is reference.sets[-1].known, "the same inputs come twice"


@pytest.mark.parametrize("is_large", [True, False])
def test_who_can_gives_its_outputs_back_before_a_large_set_is_made_again(
    bench: Bench,
    memory: Memory,
    compile_raw: Callable[[str], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    is_large: bool,
) -> None:
    """But for one secret set, before which the output of the call before it is looked at."""
    monkeypatch.setattr(Session, "gives_back", True)
    asked: list[tuple[int, int]] = []
    plain = Session.call

    def call(self: Session, op: int, slot: int, *given: Any) -> ForwardOutcome:
        if op in (wire.OP_FREE, wire.OP_POISON_ON, wire.OP_HELD):
            asked.append((op, slot))
        return plain(self, wire.OP_HELD if op == wire.OP_FREE else op, slot, *given)

    monkeypatch.setattr(Session, "call", call)
    if is_large:
        memory(20 * SIZE)
    bench.options = msgspec.structs.replace(bench.options, outputs="fresh")
    verdict = judge(bench, RIGHT, compile_raw).verdict
    assert verdict.fault is Fault.OK, verdict
    assert ((wire.OP_POISON_ON, 1) in asked) is is_large
    freed = [keeps_outputs for op, keeps_outputs in asked if op == wire.OP_FREE]
    assert sorted(freed) == ([0] * (verdict.total - 1) + [1] if is_large else [])


def test_where_memory_is_shorter_still_nothing_runs_in_fp64(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    memory(9 * SIZE)
    assert judge(bench, RIGHT, compile_raw).verdict.fault is Fault.OK
    reference = next(iter(bench.references.kept.values())).references[0]
    assert not reference.widens
    assert reference.sets[0].tolerances[0].relative == 1e-4


def test_a_set_made_again_is_the_same_set(bench: Bench, memory: Memory) -> None:
    memory(20 * SIZE)
    reference = bench.references.get(PROBLEM).references[0]
    seen = [[block.clone() for block in (*one.blocks, *one.expected)] for one in reference.sets]
    for one, before in zip(reference.sets, seen, strict=True):
        assert all(map(torch.equal, (*one.blocks, *one.expected), before)), one.name
    assert len({float(blocks[0].sum()) for blocks in seen}) == len(reference.sets) - 1


def test_what_does_not_fit_is_refused_in_bytes_before_anything_is_made(bench: Bench, memory: Memory) -> None:
    memory(8 * SIZE)
    with pytest.raises(ProblemError) as caught:
        bench.references.get(PROBLEM)
    text = str(caught.value)
    assert "L1/07_large does not fit" in text
    assert "inputs 262,144 bytes, outputs 262,144 bytes, weights 0 bytes" in text
    assert "timing_bench.memory_share" in caught.value.cure


def test_small_problems_keep_their_sets(bench: Bench) -> None:
    reference = bench.references.get(PROBLEM).references[0]
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


@pytest.mark.parametrize(
    ("memory", "inside", "host", "offloaded"),
    [
        (21_400, 0, 10**6, Offloaded()),
        (21_400, 500, 10**6, Offloaded(weights=True)),
        (19_000, 0, 10**6, Offloaded(weights=True)),
        (18_000, 0, 10**6, Offloaded(inputs=True)),
        (16_300, 0, 10**6, Offloaded(inputs=True, weights=True)),
        (16_300, 9000, 10**6, Offloaded(inputs=True, weights=True)),
        (21_400, 9000, 10**6, Offloaded()),  # what forward needs fits nowhere
        (1, 0, 10**6, Offloaded(inputs=True, weights=True)),
        (1, 0, 3999, Offloaded(weights=True)),
        (18_000, 0, 1999, Offloaded()),
    ],
)
def test_as_little_as_possible_lies_on_the_host(memory: int, inside: int, host: int, offloaded: Offloaded) -> None:
    found = Sizes(1000, 3000, 1000, frees=True).placed(memory, inside, host)
    assert found.offloaded == offloaded, found.asked
    assert found.asked <= memory or memory < 19_000


@pytest.mark.parametrize(
    ("memory", "inside", "offloaded"),
    [
        (21_400, 500, Offloaded(weights=True)),
        (18_000, 500, Offloaded(inputs=True)),  # without it does not fit whatever is inside
        (19_000, 3000, Offloaded(weights=True)),  # with its inputs on the host it would, and be watched
        (19_000, 9000, Offloaded(weights=True)),
    ],
)
def test_what_may_be_replayed_keeps_its_inputs_on_the_gpu_for_what_is_inside(
    memory: int, inside: int, offloaded: Offloaded
) -> None:
    sizes = Sizes(1000, 3000, 1000, frees=True)
    assert sizes.placed(memory, inside, 10**6, is_replayable=True).offloaded == offloaded
    assert sizes.placed(19_000, 3000, 10**6).offloaded == Offloaded(inputs=True, weights=True)


def test_new_secrets_are_made_when_those_of_before_are_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once would be twice what was planned."""
    reference = bench.references.get(PROBLEM).references[0]
    assert isinstance(reference.pool.draws, list)
    known = [
        weakref.ref(block) for one in (*reference.pool.draws, *(s.blocks for s in reference.sets)) for block in one
    ]
    left: list[int] = []
    draw = Reference._draw

    def noted(self: Reference, seed: int) -> list[torch.Tensor]:
        left.append(sum(one() is not None for one in known))
        return draw(self, seed)

    monkeypatch.setattr(Reference, "_draw", noted)
    reference.refresh()
    assert len(known) > 4
    assert left[0] == 0


def test_what_making_a_reference_takes_is_told_by_its_parts(
    bench: Bench, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    heard: dict[str, float] = {}
    token = spans.set(heard)
    try:
        made, again = (judge(bench, RIGHT, compile_raw).stages[0] for _ in range(2))
    finally:
        spans.reset(token)
    parts = dict(part.rsplit(" ", 2)[:2] for part in made.detail.split("; "))
    assert set(parts) == {"its process", "its draws", "its sets"}
    assert sum(map(float, parts.values())) == pytest.approx(made.seconds, abs=0.1)
    assert (again.name, again.detail) == ("reference", "")
    assert heard["a reference's sets"] == pytest.approx(float(parts["its sets"]), abs=0.01), "others hear it, too"


LATE = """

class ModelNew(Model):
    def forward(self, x):
        import time
        if not hasattr(self, "is_warm"):
            time.sleep(1.2)
        self.is_warm = True
        return super().forward(x)
"""


def test_what_torch_imports_at_its_first_use_is_no_hang(zygote: Zygote) -> None:
    """That of `torch.broadcast_shapes` takes .7 s; a reference's process may have it from before."""
    once = "\n\nclass ModelNew(Model):\n    def forward(self, x):\n        torch.broadcast_shapes(x.shape, (1,))\n"
    source = f"{PROBLEM.source}{once}        return super().forward(x)\n"
    options = bench_options(TimingBench(deadline_s=10.0), call_factor=1.0, replay=False)
    with contextlib.closing(Bench(zygote, options)) as bench:
        assert bench.evaluate(PROBLEM, Candidate(source, "torch"), {}, timing=False).verdict.fault is Fault.OK


@pytest.mark.parametrize(("first_call_s", "fault"), [(0.0, Fault.TIMEOUT), (8.0, Fault.OK)])
def test_a_first_call_may_compile(zygote: Zygote, first_call_s: float, fault: Fault) -> None:
    """By fifty times its reference's time, on a loaded host a call may take longer than this first one."""
    configured = TimingBench(deadline_s=20.0)
    options = bench_options(configured, call_floor_s=0.6, call_factor=1.0, replay=False, first_call_s=first_call_s)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + LATE, "torch"), {}, timing=False).verdict
    assert found.fault is fault, found


@pytest.mark.parametrize(("compiling_s", "fault"), [(0.0, Fault.TIMEOUT), (10.0, Fault.OK)])
def test_who_has_torch_compile_may_do_so_at_its_first_calls(zygote: Zygote, compiling_s: float, fault: Fault) -> None:
    """One that compiled again at its second call had a quarter of a second for it."""
    late = LATE.replace('not hasattr(self, "is_warm"):', 'getattr(self, "is_warm", 0) < 2:  # torch.compile')
    late = late.replace("self.is_warm = True", 'self.is_warm = getattr(self, "is_warm", 0) + 1')
    assert late.count("is_warm") == 3
    configured, limits = TimingBench(deadline_s=20.0), {"call_floor_s": 0.4, "call_factor": 1.0, "first_call_s": 0.0}
    options = bench_options(configured, **limits, replay=False, compiling_s=compiling_s)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + late, "torch"), {}, timing=False).verdict
    assert found.fault is fault, found


@pytest.mark.parametrize(("compiling_s", "fault"), [(0.0, Fault.TIMEOUT), (20.0, Fault.OK)])
def test_what_torch_imports_to_compile_is_no_hang(zygote: Zygote, compiling_s: float, fault: Fault) -> None:
    begun = "        import time\n        time.sleep(1.5)  # torch.compile\n        super().__init__()\n"
    source = f"{PROBLEM.source}\n\nclass ModelNew(Model):\n    def __init__(self):\n{begun}"
    options = bench_options(TimingBench(deadline_s=1.0), replay=False, compiling_s=compiling_s)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(source, "torch"), {}, timing=False).verdict
    assert found.fault is fault, found


def test_who_goes_on_compiling_has_no_more_time(zygote: Zygote) -> None:
    late = LATE.replace('if not hasattr(self, "is_warm"):', "if True:  # torch.compile")
    configured, limits = TimingBench(deadline_s=2.0), {"call_floor_s": 0.3, "call_factor": 1.0, "first_call_s": 0.0}
    options = bench_options(configured, **limits, replay=False, compiling_s=2.0)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + late, "torch"), {}, timing=False).verdict
    assert found.fault is Fault.TIMEOUT, found


def test_who_gets_no_time_on_its_core_is_waited_for_however_short_its_deadline_is(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "process_time_ns", lambda pid: 0)
    monkeypatch.setattr(sessions, "waited_ns", lambda pid: 1 << 62)
    options = bench_options(TimingBench(deadline_s=20.0), call_floor_s=0.1, call_factor=1.0, replay=False)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + LATE, "torch"), {}, timing=False).verdict
    assert found.fault is Fault.OK, found


@pytest.mark.parametrize(("call_floor_s", "fault"), [(0.45, Fault.OK), (0.1, Fault.TIMEOUT)])
def test_a_host_that_stands_still_for_a_short_deadline_makes_no_slow_kernel(
    zygote: Zygote, call_floor_s: float, fault: Fault
) -> None:
    """Its process had no time to use, and waited for none: it is waited for as long as a host may stand still."""
    late = LATE.replace("sleep(1.2)", "sleep(0.75)")
    assert late != LATE
    configured, limits = TimingBench(deadline_s=20.0), {"call_floor_s": call_floor_s, "call_factor": 1.0}
    options = bench_options(configured, **limits, replay=False, first_call_s=0.0)
    with contextlib.closing(Bench(zygote, options)) as bench:
        found = bench.evaluate(PROBLEM, Candidate(PROBLEM.source + late, "torch"), {}, timing=False).verdict
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
    monkeypatch.setattr(DEVICE, "may_use", refuse)
    monkeypatch.setattr(DEVICE, "rest", lambda kept: True)
    judge(bench, RIGHT, compile_raw)
    first = next(iter(bench.references.kept.values()))
    assert first.needed == Sizes(SIZE, SIZE).kept(4, 3)
    assert judge(bench, RIGHT, compile_raw).verdict.fault is Fault.OK
    assert asked == [first.needed]
    assert next(iter(bench.references.kept.values())) is not first, "others had the memory: it is made anew"
    monkeypatch.setattr(DEVICE, "rest", lambda kept: not kept)
    judge(bench, RIGHT, compile_raw)
    assert len(bench.references) == 0


def test_where_memory_has_come_back_new_sets_are_kept_and_candidates_timed(
    zygote: Zygote, memory: Memory, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    """With other memory processes have another number of places for inputs, the reference's kept twin as well."""
    options = bench_options(TimingBench(deadline_s=10.0, cap_s=0.05), call_floor_s=1.0, reuse=1)
    with contextlib.closing(Bench(zygote, options, random.Random(1), device=DEVICE)) as bench:
        for size in (20 * SIZE, 1000 * SIZE):
            memory(size)
            found = judge(bench, RIGHT, compile_raw, timing=True)
            assert (found.verdict.fault, found.verdict.trust) == (Fault.OK, REPLAYED), found.verdict
            assert found.timing is not None


@pytest.mark.parametrize(("line", "rule"), [("", "input_mutation"), ("INPUTS_MAY_CHANGE = True", "")])
def test_who_may_work_in_place_may_where_there_is_one_place_for_inputs(
    bench: Bench, memory: Memory, compile_raw: Callable[[str], dict[str, Path]], line: str, rule: str
) -> None:
    """Each timed output then lies where the one before it was."""
    memory(20 * SIZE)
    problem = Problem("L1/07_large", 1, "large", f"{PROBLEM.source}\n{line}\n")
    found = judge(bench, RIGHT.replace("torch.empty_like(x)", "x"), compile_raw, timing=True, problem=problem)
    assert (found.verdict.rule, found.timing is not None) == (rule, not rule), found.verdict


@pytest.mark.parametrize("replay", [True, False])
def test_a_reference_that_fails_during_a_proof_proves_nothing(
    zygote: Zygote,
    memory: Memory,
    compile_raw: Callable[[str], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    replay: bool,
) -> None:
    """A candidate that fails without its own kernels needs them; here nobody knows."""
    memory(20 * SIZE)
    prove = CpuDevice.prove_last

    def failing(self: CpuDevice, checker: Checker) -> None:
        late = CandidateFault(Fault.TIMEOUT, "no result", by=checker.reference.session)
        monkeypatch.setattr(Reference, "ask", Mock(side_effect=late))
        prove(self, checker)

    monkeypatch.setattr(CpuDevice, "prove_last", failing)
    options = bench_options(TimingBench(), call_floor_s=1.0, replay=replay)
    with (
        contextlib.closing(Bench(zygote, options, device=DEVICE)) as bench,
        pytest.raises(InfraError, match="L1/07_large"),
    ):
        judge(bench, RIGHT, compile_raw)


def test_where_others_take_memory_while_new_secrets_are_drawn_it_is_made_anew(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Bench(zygote, bench_options(TimingBench(), reuse=1), device=DEVICE)) as bench:
        before = bench.references.get(PROBLEM)
        honest = Reference.plannable_bytes

        def crowded(_: Reference) -> int:
            monkeypatch.setattr(Reference, "plannable_bytes", honest)
            raise Crowded(SIZE)

        monkeypatch.setattr(Reference, "plannable_bytes", crowded)
        assert bench.references.get(PROBLEM) is not before
        assert before.references[0].weights_fd == -1, "it is closed"


def test_who_is_ended_while_new_secrets_are_drawn_leaves_no_process_behind(zygote: Zygote) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with contextlib.closing(Bench(zygote, bench_options(TimingBench(), reuse=1), device=DEVICE)) as bench:
        before = bench.references.get(PROBLEM).references[0]
        with pytest.raises(KeyboardInterrupt):
            bench.references.get(PROBLEM, end)
        assert before.weights_fd == -1, "it is closed"


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
    monkeypatch.setattr(Reference, "forget_outputs", lambda self: done.append("gone"))
    bench.references.get(PROBLEM)
    read = done.index("read")
    assert done[read - 2 : read] == ["gone", "run"]
