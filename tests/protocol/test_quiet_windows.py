"""Quiet windows over real sockets: a bench's thread, a learner's thread between its steps, and the broker between."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from kbrl_async.errors import InfraError
from protocols import messages as msg
from protocols.ledger import LedgerOptions
from protocols.messages import SHARES
from services.runtime import HandlerOutcome, Producer, quiet
from services.runtime.quiet import PauseGate, QuietWindows, Window
from tests.brokers import ends, scenario_of, until
from tests.protocol.live import Run, scenario

GPU = "host/gpu0"
STEP_S, LENGTH_S = 0.02, 8.0


class Learner:
    """A worker whose thread does steps of some milliseconds until it is told to end."""

    def __init__(self, run: Run) -> None:
        self.worker = run.worker("learner", "train", self._train, caps={SHARES: GPU})
        self.steps: list[float] = []
        self.is_over = False

    async def _train(self, _: msg.Task, __: list[bytes]) -> HandlerOutcome:
        await asyncio.get_running_loop().run_in_executor(None, self._work)
        return HandlerOutcome()

    def _work(self) -> None:
        until_s = time.monotonic() + 25.0
        while not self.is_over and time.monotonic() < until_s:
            time.sleep(STEP_S)
            self.steps.append(time.monotonic())
            self.worker.breathe()

    def stepped_between(self, begin: float, end: float) -> int:
        return sum(begin < at < end for at in self.steps)


async def hold(bench: object, length_s: float, wait_s: float = 20.0) -> tuple[Window, float, float]:
    """Open a window from a thread and stay in it."""

    def work() -> tuple[Window, float, float]:
        with bench.quiet_windows.open(length_s, wait_s) as window:  # type: ignore[attr-defined]
            begin = time.monotonic()
            time.sleep(0.2)
            return window, begin, time.monotonic()

    return await asyncio.get_running_loop().run_in_executor(None, work)


class Bench:
    def __init__(self, run: Run, name: str = "bench") -> None:
        self.worker = run.worker(name, "bench", ends)
        self.quiet_windows = self.worker.quiet_windows(GPU)


@scenario
async def test_a_learner_at_work_stands_still_while_a_bench_measures(run: Run) -> None:
    learner, bench = Learner(run), Bench(run)
    async with run.running(learner.worker, bench.worker), Producer(run.submit) as producer:
        await producer.submit("b1", "train", [b""])
        await until(lambda: len(learner.steps) > 2)
        window, begin, end = await hold(bench, LENGTH_S)
        assert window.missing == ()
        assert learner.stepped_between(begin, end) == 0
        await until(lambda: learner.steps[-1] > end)
        learner.is_over = True
        assert 0 < run.broker.ledger.quiet.costs()[GPU].held_s < LENGTH_S


@scenario
async def test_an_idle_learner_answers_at_once_and_a_batch_that_comes_waits(run: Run) -> None:
    learner, bench = Learner(run), Bench(run)
    async with run.running(learner.worker, bench.worker), Producer(run.submit) as producer:
        await until(lambda: learner.worker.welcomed and bench.worker.welcomed)
        holding = asyncio.create_task(hold(bench, LENGTH_S))
        await until(lambda: not learner.worker.gate.is_open)
        await producer.submit("b1", "train", [b""])
        _, begin, end = await holding
        await until(lambda: bool(learner.steps))
        learner.is_over = True
        assert learner.stepped_between(begin, end) == 0


@scenario_of(lambda folder: Run(folder, LedgerOptions(heartbeat_s=60.0)))
async def test_a_window_opens_when_the_holders_rest_is_over_and_not_at_the_next_heartbeat(run: Run) -> None:
    learner, bench = Learner(run), Bench(run)
    async with run.running(learner.worker, bench.worker), Producer(run.submit) as producer:
        await producer.submit("b1", "train", [b""])
        await until(lambda: len(learner.steps) > 2)
        await hold(bench, LENGTH_S)
        with patch.object(quiet, "REPEAT_S", 60.0):
            window, begin, end = await hold(bench, LENGTH_S)
        learner.is_over = True
        assert window.missing == ()
        assert learner.stepped_between(begin, end) == 0


@scenario
async def test_two_benches_never_measure_at_the_same_time(run: Run) -> None:
    benches = Bench(run, "b1"), Bench(run, "b2")
    async with run.running(*(bench.worker for bench in benches)):
        (_, begin1, end1), (_, begin2, end2) = await asyncio.gather(*(hold(bench, LENGTH_S) for bench in benches))
        assert end1 <= begin2 or end2 <= begin1


@scenario
async def test_a_bench_without_a_broker_gives_up_at_its_deadline(run: Run) -> None:
    bench = Bench(run)
    async with run.running(bench.worker):
        await until(lambda: bench.worker.welcomed)
        await run.crash()
        with pytest.raises(InfraError, match="no quiet window"):
            await hold(bench, 1.0, wait_s=0.2)
        await run.start()


@scenario
async def test_a_learner_goes_on_by_itself_when_the_broker_dies_during_a_window(run: Run) -> None:
    said: list[msg.Message] = []
    gate = PauseGate(time.monotonic, said.append, lambda: True)
    begin = time.monotonic()
    gate.handle(msg.Pause("q1", GPU, 0.1))
    assert said == [msg.Paused("q1", is_idle=True)]
    await asyncio.get_running_loop().run_in_executor(None, gate.breathe)
    assert 0.1 <= time.monotonic() - begin < 10.0


def test_a_thread_that_stands_still_already_is_answered_for_at_once() -> None:
    async def play() -> None:
        said: list[msg.Message] = []
        gate = PauseGate(time.monotonic, said.append, lambda: False)
        gate.handle(msg.Pause("q1", GPU, 600.0))
        standing = asyncio.get_running_loop().run_in_executor(None, gate.breathe)
        await until(lambda: said == [msg.Paused("q1")])
        gate.handle(msg.Pause("q2", GPU, 600.0))
        assert said == [msg.Paused("q1"), msg.Paused("q2")]
        gate.handle(msg.Resume("q1"))
        gate.handle(msg.Resume("q2"))
        await standing
        gate.handle(msg.Pause("q3", GPU, 600.0))
        assert len(said) == 2, "it works again"

    asyncio.run(asyncio.wait_for(play(), 120))


def test_what_can_not_stand_still_is_waited_for_and_may_use_the_thread_that_could() -> None:
    async def play() -> None:
        said: list[msg.Message] = []
        gate = PauseGate(time.monotonic, said.append, lambda: True)
        async with gate.unstoppable():
            gate.handle(msg.Pause("q1", GPU, 600.0))
            await asyncio.get_running_loop().run_in_executor(None, gate.breathe)
            assert not said
        assert said == [msg.Paused("q1", is_idle=True)]

    asyncio.run(asyncio.wait_for(play(), 120))


def test_a_job_that_waits_for_the_end_of_a_window_is_no_idleness_in_the_next() -> None:
    async def play() -> None:
        said: list[msg.Message] = []
        gate = PauseGate(time.monotonic, said.append, lambda: True)
        gate.handle(msg.Pause("q1", GPU, 600.0))
        job = asyncio.create_task(gate.opened())
        await asyncio.sleep(0)
        gate.handle(msg.Pause("q2", GPU, 600.0))
        assert said == [msg.Paused("q1", is_idle=True), msg.Paused("q2", is_idle=False)]
        gate.handle(msg.Resume("q1"))
        gate.handle(msg.Resume("q2"))
        await job
        gate.handle(msg.Pause("q3", GPU, 600.0))
        assert said[2:] == [msg.Paused("q3", is_idle=True)]

    asyncio.run(asyncio.wait_for(play(), 120))


def test_a_thread_that_stands_is_let_go_for_what_can_not() -> None:
    async def play() -> None:
        gate = PauseGate(time.monotonic, lambda _: None, lambda: False)
        gate.handle(msg.Pause("q1", GPU, 600.0))
        standing = asyncio.get_running_loop().run_in_executor(None, gate.breathe)
        loading = asyncio.create_task(_hold_up(gate, standing))
        await until(lambda: gate.standing == 1)
        gate.handle(msg.Resume("q1"))
        await loading

    asyncio.run(asyncio.wait_for(play(), 120))


async def _hold_up(gate: PauseGate, standing: asyncio.Future[None]) -> None:
    async with gate.unstoppable():
        gate.handle(msg.Pause("q2", GPU, 600.0))
        await standing


def test_work_that_is_no_job_is_not_taken_for_idleness() -> None:
    said: list[msg.Message] = []

    async def play() -> None:
        gate = PauseGate(time.monotonic, said.append, lambda: True)
        with gate.at_work():
            gate.handle(msg.Pause("q1", GPU, 600.0))
            assert not said
        assert said == [msg.Paused("q1", is_idle=True)]

    asyncio.run(play())


@pytest.mark.parametrize(("missing", "expected"), [([()], 0), ([("sampler.1",), ()], 1), ([("sampler.1",)] * 2, 1)])
def test_a_window_with_somebody_missing_is_asked_for_once_more(
    missing: list[tuple[str, ...]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = iter(enumerate(missing))

    @contextlib.contextmanager
    def opened(_: QuietWindows, length_s: float) -> Iterator[Window]:
        number, who = next(windows)
        yield Window(length_s, float(number), who)

    async def play() -> float:
        monkeypatch.setattr(QuietWindows, "open", opened)
        with QuietWindows(GPU, time.monotonic, lambda _: None).insist(2.0) as window:
            return window.waited_s

    assert asyncio.run(play()) == expected
