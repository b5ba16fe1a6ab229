"""The bench's own duties: faults of the host and the problem, weights, timing, references kept."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, BenchOptions, bench_options
from kbrl_async.kernels.verify import session as sessions
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.kernels.verify.inputs import KINDS
from kbrl_async.kernels.verify.memory import read_memory
from kbrl_async.kernels.verify.session import ForwardOutcome
from protocols.records import (
    DISTURBED,
    REPLAYED,
    BenchReport,
    Candidate,
    Fault,
    Problem,
    Strictness,
    Timing,
    Verdict,
)
from tests.candidates import affine, elementwise

Evaluate = Callable[..., BenchReport]
WEIGHTS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 10)

    def forward(self, x):
        return self.linear(x)

def get_inputs():
    return [torch.randn(4, 20)]

def get_init_inputs():
    return []
"""
NEW = WEIGHTS.replace("class Model(", "class ModelNew(")


def patient(**more: Any) -> BenchOptions:
    """Limits that a loaded machine keeps too, where they are not what is tested."""
    return bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0, **more)


def test_weights_of_the_same_name_are_the_references(evaluate: Evaluate) -> None:
    later = NEW.replace("self.linear =", "torch.randn(7); self.linear =")
    assert evaluate(later, problem=WEIGHTS).verdict.fault is Fault.OK


def test_weights_of_other_names_come_from_the_same_seed(evaluate: Evaluate) -> None:
    assert (
        evaluate(
            NEW.replace("linear =", "other =").replace("self.linear(", "self.other("), problem=WEIGHTS
        ).verdict.fault
        is Fault.OK
    )


def test_keyword_constructor_arguments_are_accepted(evaluate: Evaluate) -> None:
    problem = (
        WEIGHTS.replace("__init__(self)", "__init__(self, *, n)")
        .replace("20, 10", "20, n")
        .replace("return []", "return [[], {'n': 10}]")
    )
    assert evaluate(problem.replace("class Model(", "class ModelNew("), problem=problem).verdict.fault is Fault.OK


def test_a_wrong_dtype_is_incorrect(evaluate: Evaluate) -> None:
    verdict = evaluate(NEW.replace("self.linear(x)", "self.linear(x).double()"), problem=WEIGHTS).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "dtype")


def test_another_number_of_outputs_is_incorrect(evaluate: Evaluate) -> None:
    verdict = evaluate(NEW.replace("self.linear(x)", "self.linear(x), x"), problem=WEIGHTS).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "structure")


def test_an_error_is_told_with_its_line_and_without_ours(evaluate: Evaluate) -> None:
    message = evaluate(NEW.replace("self.linear(x)", "self.lineer(x)"), problem=WEIGHTS).verdict.message
    assert "line 11, in forward" in message
    assert "lineer" in message
    assert "runner" not in message


@pytest.mark.parametrize("broken", ["raise ValueError('no')", "import nothing_like_this", "class Model: pass"])
def test_a_broken_problem_is_nobodys_fault_but_its_own(evaluate: Evaluate, broken: str) -> None:
    with pytest.raises(ProblemError):
        evaluate(NEW, problem=broken)


def test_a_reference_that_fails_in_forward_is_a_problem_error(evaluate: Evaluate) -> None:
    with pytest.raises(ProblemError):
        evaluate(NEW, problem=WEIGHTS.replace("return self.linear(x)", "raise ValueError('no')"))


def test_a_reference_that_crashes_costs_the_sandbox_that_it_crashed_in() -> None:
    """It holds no foreign code: the next one would crash in a damaged sandbox, and so would every candidate."""
    crashing = WEIGHTS.replace("return self.linear(x)", "import ctypes; ctypes.string_at(8)")
    with zygote_for("cpu") as zygote, contextlib.closing(Bench(zygote, patient())) as bench:
        candidate, before = Candidate(NEW, "torch"), zygote.pid
        with pytest.raises(ProblemError, match="SIGSEGV"):
            bench.evaluate(Problem("L1/1", 1, "x", crashing), candidate, {}, timing=False)
        assert bench.evaluate(Problem("L1/1", 1, "x", WEIGHTS), candidate, {}, timing=False).verdict.fault is Fault.OK
        assert zygote.pid != before


def _kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_zygote_that_died_between_two_candidates_is_replaced_unnoticed() -> None:
    with zygote_for("cpu") as zygote, contextlib.closing(Bench(zygote, patient())) as bench:
        problem, candidate = Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch")
        bench.evaluate(problem, candidate, {}, timing=False)
        assert zygote.pid is not None
        _kill_and_wait(zygote.pid)
        assert bench.evaluate(problem, candidate, {}, timing=False).verdict.fault is Fault.OK


def test_a_zygote_that_dies_under_a_candidate_is_never_the_candidates_fault_and_the_next_call_works() -> None:
    with zygote_for("cpu") as zygote, contextlib.closing(Bench(zygote, patient())) as bench:
        problem, candidate = Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch")
        bench.evaluate(problem, candidate, {}, timing=False)
        victims = [zygote.pid]

        def kill_once() -> None:
            if victims:
                pid = victims.pop()
                assert pid is not None
                _kill_and_wait(pid)

        with pytest.raises(InfraError):
            bench.evaluate(problem, candidate, {}, timing=True, tick=kill_once)
        assert bench.evaluate(problem, candidate, {}, timing=True).verdict.fault is Fault.OK


@pytest.mark.usefixtures("slow_deaths")
def test_a_zygote_that_dies_before_an_output_is_read_is_never_the_candidates_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is gone before it has ended."""
    with zygote_for("cpu") as zygote, contextlib.closing(Bench(zygote, patient())) as bench:
        problem, candidate = Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch")
        bench.evaluate(problem, candidate, {}, timing=False)

        def gone(pid: int, *_: int) -> bool:
            assert zygote.pid is not None
            _kill_and_wait(zygote.pid)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
            return False

        monkeypatch.setattr(sessions, "read_memory", gone)
        with pytest.raises(InfraError):
            bench.evaluate(problem, candidate, {}, timing=False)


def test_a_reference_that_was_killed_before_new_secrets_were_drawn_is_nobodys_fault(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, patient(reuse=1))) as bench:
        problem, candidate = Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch")
        bench.evaluate(problem, candidate, {}, timing=False)
        bench.references.kept[WEIGHTS].cases[0].reference.session.close()
        with pytest.raises(InfraError, match=r"the reference of L1/1 is gone"):
            bench.evaluate(problem, candidate, {}, timing=False)
        assert bench.evaluate(problem, candidate, {}, timing=False).verdict.fault is Fault.OK


@pytest.mark.parametrize("draws", [4, 64])
def test_a_reference_that_fails_while_a_candidate_is_recorded_is_nobodys_fault(
    bench: Bench, builder: Builder, draws: int
) -> None:
    """It is asked for inputs then, which no set has."""
    drawn = f"DRAWN = []\n\ndef get_inputs():\n    DRAWN.append(1)\n    assert len(DRAWN) <= {draws}"
    problem = Problem("L1/01_affine", 1, "affine", affine().replace("def get_inputs():", drawn))
    candidate = Candidate(elementwise("2 * x[i] + 1"), "c")
    paths = artifact_paths(builder.store, builder.build(candidate, problem))
    told = pytest.raises(InfraError, match="L1/01_affine") if draws == 4 else contextlib.nullcontext()
    with told:
        assert bench.evaluate(problem, candidate, paths, timing=False).verdict.fault is Fault.OK


def test_few_references_are_kept(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, patient(references=2))) as bench:
        for number in range(4):
            problem = Problem(f"L1/{number}", 1, "x", WEIGHTS + f"# {number}")
            bench.evaluate(problem, Candidate(NEW, "torch"), {}, timing=False)
        assert len(bench.references) == 2


def test_references_are_kept_as_far_as_their_memory_goes(zygote: Zygote) -> None:
    """By number alone a bench took from 0.3 to 1.2 GB, as chance had it."""
    problems = [Problem(f"L1/{number}", 1, "x", WEIGHTS + f"# {number}") for number in range(4)]
    with contextlib.closing(Bench(zygote, patient())) as bench:
        bench.evaluate(problems[0], Candidate(NEW, "torch"), {}, timing=False)
        each = bench.references.kept[problems[0].source].host_bytes
    assert each > 0
    with contextlib.closing(Bench(zygote, patient(reference_bytes=2 * each))) as bench:
        for problem in problems:
            bench.evaluate(problem, Candidate(NEW, "torch"), {}, timing=False)
        assert len(bench.references) == 2
    with contextlib.closing(Bench(zygote, patient(reference_bytes=1))) as bench:
        assert bench.evaluate(problems[0], Candidate(NEW, "torch"), {}, timing=False).verdict.fault is Fault.OK
        assert len(bench.references) == 1


def test_secrets_are_drawn_again_after_some_candidates(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, patient(reuse=2))) as bench:
        problem = Problem("L1/1", 1, "x", WEIGHTS)
        for _ in range(5):
            assert bench.evaluate(problem, Candidate(NEW, "torch"), {}, timing=False).verdict.fault is Fault.OK


def test_a_slower_candidate_is_timed_as_slower(evaluate: Evaluate) -> None:
    slow = NEW.replace("return self.linear(x)", "[self.linear(x) for _ in range(200)]; return self.linear(x)")
    found = (evaluate(slow, problem=WEIGHTS, timing=True).timing for _ in range(5))
    # where others load the machine the bounds may be far apart
    timing = next((one for one in found if one is not None and one.hi < 1), None)
    assert timing is not None
    assert timing.n >= 1
    assert timing.hardware
    assert timing.method


def test_who_counts_what_a_timed_kernel_does_sees_it_at_work_on_inputs(bench: Bench, builder: Builder) -> None:
    """Not on the zeros of the memory that its measurement gave it last."""
    problem, candidate = Problem("L1/01_affine", 1, "affine", affine()), Candidate(elementwise("2 * x[i] + 1"), "c")
    answers: list[torch.Tensor] = []

    def watch(pid: int, call: Callable[[], object]) -> None:
        (meta,) = cast(ForwardOutcome, call()).tensors
        answers.append(torch.empty(meta.shape))
        assert read_memory(pid, meta.place, answers[0].data_ptr(), answers[0].nbytes)

    paths = artifact_paths(builder.store, builder.build(candidate, problem))
    found = bench.evaluate(problem, candidate, paths, watch=watch)
    assert (found.verdict.trust, found.timing is not None) == (REPLAYED, True), found
    assert answers[0].std() > 0.1


def test_a_reference_is_made_in_steps_between_which_others_may_time(zygote: Zygote) -> None:
    ticks: list[int] = []
    with contextlib.closing(Bench(zygote, patient())) as bench:
        bench.references.get(Problem("L1/1", 1, "x", WEIGHTS), lambda: ticks.append(1))
    assert len(ticks) == bench_options(TimingBench()).pool + len(KINDS)


def test_timing_calls_the_tick(bench: Bench) -> None:
    ticks: list[int] = []
    bench.evaluate(Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch"), {}, tick=lambda: ticks.append(1))
    assert len(ticks) > 10


def test_outputs_are_copied_inside_the_call_where_memory_can_not_be_read(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, patient(copy_outputs=True))) as bench:
        report = bench.evaluate(Problem("L1/1", 1, "x", WEIGHTS), Candidate(NEW, "torch"), {})
        assert report.verdict.fault is Fault.OK
        assert report.timing is not None
        assert "copied outputs" in report.timing.method


def judged(bench: Bench, new: str, strictness: Strictness | None = None) -> Verdict:
    problem = Problem("L1/weights", 1, "weights", WEIGHTS)
    return bench.evaluate(problem, Candidate(new, "torch"), {}, timing=False, strictness=strictness).verdict


def test_a_wrong_kernel_meets_as_many_sets_as_were_asked_for_and_a_right_one_all(bench: Bench) -> None:
    wrong = NEW.replace("self.linear(x)", "self.linear(x) * 1.5")
    assert judged(bench, wrong).total == judged(bench, NEW).total > 6
    few = judged(bench, wrong, Strictness(sets=3))
    assert (few.fault, few.total, few.near) == (Fault.INCORRECT, 3, 0)
    assert judged(bench, NEW, Strictness(sets=3, tolerance=100.0)).total == judged(bench, NEW).total


def test_what_passes_with_wider_tolerances_only_is_near_and_still_wrong(bench: Bench) -> None:
    nearly = NEW.replace("self.linear(x)", "self.linear(x) * 1.001")
    strict, wide = judged(bench, nearly), judged(bench, nearly, Strictness(tolerance=100.0))
    assert (strict.fault, wide.fault) == (Fault.INCORRECT, Fault.INCORRECT)
    assert strict.near == 0 < wide.near
    assert strict.passed == wide.passed


@pytest.fixture
def timings() -> list[Timing]:
    """What the next measurements find; the host decides nothing here."""
    return [Timing(8, 1.0 + n, 0.9 + n, 1.1 + n, 1.0, 1.0, spent_s=0.1) for n in range(9, 0, -1)]


@pytest.fixture
def of_group(
    zygote: Zygote, timings: list[Timing], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., BenchReport]]:
    """A timed evaluation of a source that is right, or is given, in a group."""
    monkeypatch.setattr(Bench, "measure", lambda *_: timings.pop())
    with contextlib.closing(Bench(zygote, patient(replay=False, reuse=5))) as bench:
        problem = Problem("L1/01_test", 1, "test", WEIGHTS)

        def run(group: str, source: str = NEW) -> BenchReport:
            return bench.evaluate(problem, Candidate(source, "torch"), {}, timing=True, group=group)

        yield run


def test_equal_sources_of_a_group_share_a_timing(of_group: Callable[..., BenchReport]) -> None:
    reports = [of_group("g1") for _ in range(3)]
    assert [(report.timing.speedup, report.timing.spent_s) for report in reports if report.timing] == [
        (2.0, 0.1),
        (2.0, 0.0),
        (2.0, 0.0),
    ]
    assert [stage.detail for stage in reports[1].stages if stage.name == "timing"] == [
        "of an equal kernel of its group"
    ]


def test_another_source_another_group_and_new_secrets_are_timed(of_group: Callable[..., BenchReport]) -> None:
    """With the sixth kernel come new secrets."""
    asked = [("g1", NEW), ("g1", NEW + "\n"), ("g2", NEW), ("", NEW), ("", NEW), ("g1", NEW)]
    found = [of_group(*one).timing for one in asked]
    assert [timing.speedup for timing in found if timing] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_what_others_disturbed_is_timed_again(of_group: Callable[..., BenchReport], timings: list[Timing]) -> None:
    timings.append(msgspec.structs.replace(timings[-1], stopped=DISTURBED))
    found = [of_group("g1").timing for _ in range(3)]
    assert [timing.stopped for timing in found if timing] == [DISTURBED, "", ""]


def test_a_shared_timing_is_no_shared_verdict(of_group: Callable[..., BenchReport]) -> None:
    """The source is right in every second process or so."""
    fickle = NEW.replace("self.linear(x)", "self.linear(x) + self.odd").replace(
        "super().__init__()", "super().__init__(); import os; self.odd = os.urandom(1)[0] % 2"
    )
    reports = [of_group("g1", fickle) for _ in range(6)]
    while len({report.verdict.fault for report in reports}) == 1 and len(reports) < 40:
        reports.append(of_group("g1", fickle))
    assert {report.verdict.fault for report in reports} == {Fault.OK, Fault.INCORRECT}
    assert all((report.timing is None) == (report.verdict.fault is not Fault.OK) for report in reports)
