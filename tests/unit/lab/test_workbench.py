"""The workbench: what an agent may ask and is told, in which order, and what becomes of who gives up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError, ProblemError, UserError
from kbrl_async.kernels.funnel import Careful
from kbrl_async.lab import workbench
from kbrl_async.lab.answers import CandidateReport, HistoryEntry
from kbrl_async.lab.history import History
from kbrl_async.lab.workbench import Workbench
from protocols.records import Timing
from tests.candidates import affine, elementwise
from tests.unit.kernels.funnel.conftest import QUICK

PROBLEM = affine()
HANGS = elementwise("2 * x[i] + 1", after="for (volatile int i = 0; ; i++) ;")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(loop: asyncio.Runner) -> Iterator[Workbench]:
    made = Workbench(options=QUICK, careful=Careful(cap_s=0.5, resolution=0.2))
    loop.run(made.__aenter__())
    yield made
    loop.run(made.__aexit__())


def test_problems_are_found_by_level_and_name(bench: Workbench) -> None:
    assert bench.list_problems(level=1, search="softmax", limit=1).problems[0].problem_id == "L1/13_softmax"
    assert bench.list_problems(offset=50, limit=1000).total == 104
    view = bench.get_problem("1/13")
    assert "class Model" in view.source
    assert "ModelNew" in view.contract
    assert "c_kernel" in view.example


def test_a_right_kernel_a_wrong_one_and_one_that_hangs_are_answers(bench: Workbench, loop: asyncio.Runner) -> None:
    right = loop.run(bench.verify(PROBLEM, elementwise("2 * x[i] + 1")))
    assert (right.ok, right.fault, right.stage) == (True, "ok", "timing")
    assert right.speed is not None
    wrong = loop.run(bench.verify(PROBLEM, elementwise("3 * x[i]")))
    assert (wrong.ok, wrong.fault, wrong.speed) == (False, "incorrect", None)
    assert loop.run(bench.verify(PROBLEM, HANGS)).fault == "timeout"
    again = loop.run(bench.verify(PROBLEM, right.kernel_id, timing=False))
    assert again.ok
    kept = bench.history("own")
    assert kept.best is not None
    assert (kept.best.kernel_id, kept.entries[0].call, kept.entries[0].source) == (right.kernel_id, "verify", "")


@pytest.mark.long
def test_profile_and_compare_answer_in_words(bench: Workbench, loop: asyncio.Runner) -> None:
    found = loop.run(bench.profile(PROBLEM, elementwise("2 * x[i] + 1")))
    assert "roofline" in found.text
    both = loop.run(bench.compare(PROBLEM, elementwise("2 * x[i] + 1"), elementwise("3 * x[i]")))
    assert both.claim == "no comparison: the second is not correct"


@pytest.mark.parametrize(
    ("problem", "candidate", "backend", "words"),
    [
        ("L9/99", elementwise("x[i]"), "", "no problem"),
        (PROBLEM, "x\n" * 5_000_000, "", "at most 1,048,576"),
        ("x\n" * 5_000_000, elementwise("x[i]"), "", "at most 1,048,576"),
        (PROBLEM, "kffffffffffff", "", "no kernel_id"),
        (PROBLEM, "", "", "no source"),
        (PROBLEM, elementwise("x[i]"), "cobol", "cobol"),
        ("/etc/passwd", elementwise("x[i]"), "", "no problem"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_one_line(
    bench: Workbench, loop: asyncio.Runner, problem: str, candidate: str, backend: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        loop.run(bench.verify(problem, candidate, backend))
    assert "\n" not in str(refused.value)


def test_a_problem_whose_reference_fails_is_no_answer_about_the_candidate(
    bench: Workbench, loop: asyncio.Runner
) -> None:
    broken = PROBLEM.replace("return", "raise RuntimeError('broken')\n        return", 1)
    with pytest.raises(ProblemError, match="broken"):
        loop.run(bench.verify(broken, elementwise("2 * x[i] + 1")))


def test_who_gives_up_leaves_at_once_and_the_next_is_served(bench: Workbench, loop: asyncio.Runner) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def works(_: Callable[[], None]) -> None:
        begun.set()
        let_go.wait(120)

    async def gives_up() -> bool:
        first = asyncio.create_task(bench.run_work(works, workbench.nobody))
        assert await asyncio.to_thread(begun.wait, 120)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):  # though its work has not ended
            await asyncio.wait_for(first, 60)
        let_go.set()
        return (await bench.verify(PROBLEM, elementwise("2 * x[i] + 1"))).ok

    assert loop.run(gives_up())


def test_cancelled_work_ends_at_its_next_step(bench: Workbench, loop: asyncio.Runner) -> None:
    begun, ended = threading.Event(), threading.Event()

    def works(tick: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                tick()
                time.sleep(0.01)
        except workbench.Cancelled:
            ended.set()
            raise

    async def gives_up() -> bool:
        work = asyncio.create_task(bench.run_work(works, workbench.nobody))
        assert await asyncio.to_thread(begun.wait, 120)
        work.cancel()
        return await asyncio.to_thread(ended.wait, 120)

    assert loop.run(gives_up())


def test_progress_is_told_while_one_waits(bench: Workbench, loop: asyncio.Runner) -> None:
    heard: list[tuple[int, str]] = []

    async def told(done: int, doing: str) -> None:
        heard.append((done, doing))

    async def two() -> None:
        await asyncio.gather(*(bench.verify(PROBLEM, HANGS, told=told) for _ in range(2)))

    loop.run(two())
    assert {"waiting for the bench", "verifying"} == {doing for _, doing in heard}


def test_more_calls_than_may_wait_are_told_to_come_again(
    bench: Workbench, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbench, "MOST_WAITING", 1)

    async def three() -> list[object]:
        calls = (bench.verify(PROBLEM, elementwise("2 * x[i] + 1"), timing=False) for _ in range(3))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = loop.run(three())
    assert sum(isinstance(answer, InfraError) for answer in answers) == 2


def timing(speedup: float, width: float, stopped: str = "resolved") -> Timing:
    return Timing(20, speedup, speedup / width, speedup * width, 1.0, speedup, stopped=stopped)


@pytest.mark.parametrize(
    ("one", "other", "claim"),
    [
        (timing(1.0, 1.01), timing(2.0, 1.01), "the second is proven faster"),
        (timing(2.0, 1.01), timing(1.0, 1.01), "the first is proven faster"),
        (timing(1.0, 1.5), timing(1.2, 1.5), "not told apart at 98%"),
        (timing(1.0, 1.01), timing(2.0, 1.01, "disturbed"), "nothing is proven, others had the core"),
    ],
)
def test_a_comparison_claims_what_both_intervals_prove(one: Timing, other: Timing, claim: str) -> None:
    report = CandidateReport("k", "p", "c", True, "ok", "timing", "", "", 10, 10)
    assert workbench.compared(report, report, one, other).claim == claim


def entry(kernel_id: str, lo: float | None = 1.0, source: str = "text\n") -> HistoryEntry:
    return HistoryEntry(kernel_id, "L1/01_x", "c", "verify", True, "ok", lo, lo, 0.0, source)


def test_a_history_outlasts_the_process_and_a_line_that_a_crash_cut(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(path).add(entry("one"))
    with path.open("a") as file:
        file.write('{"kernel_id": "cu')
    later = History(path)
    later.add(entry("two", 2.0))
    assert [e.kernel_id for e in History(path).list("", 9, False).entries] == ["two", "one"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(UserError, match="no history"):
        History(path)
    assert path.read_text() == "dear diary\n"


def test_a_history_is_bounded_in_number_and_bytes() -> None:
    kept = History(most=3, most_bytes=100)
    for number in range(5):
        kept.add(entry(f"k{number}", source="x" * 40))
    assert [e.kernel_id for e in kept.list("", 9, False).entries] == ["k4", "k3"]
