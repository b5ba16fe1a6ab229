"""Sampling and verifying side by side, with engine and verifier that are told what to say."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kbrl_async.errors import ConfigError, InfraError, ProblemError
from kbrl_async.kernels.funnel import Result
from kbrl_async.lab.optimize.driver import DriveOptions, PromptMaker, SearchDriver
from kbrl_async.lab.optimize.search import Budget, Search, SearchOptions
from kbrl_async.lab.optimize.targets import UserModule
from kbrl_async.sampling.engine import Completion
from protocols.records import Candidate, Fault, Problem, Purpose, SamplingParams
from tests.unit.lab.optimize.making import PROBLEM, result

TARGET = UserModule(PROBLEM, PROBLEM, "file", "Model", "my_module.py")


class Engine:
    """Writes a new kernel each time; holds every answer back while `gate` is closed."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.prompts: list[str] = []
        self.purposes: set[Purpose] = set()
        self.now = self.most = self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._fails = fails

    async def generate(
        self, request_id: str, prompt: str, params: SamplingParams, purpose: Purpose = Purpose.TRAIN, adapter: str = ""
    ) -> Completion:
        self.prompts.append(prompt)
        self.purposes.add(purpose)
        number = len(self.prompts)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        if self._fails is not None:
            raise self._fails
        text = f"```python\nclass ModelNew:  # {number}\n    def forward(self):\n        pass\n```\n"
        return Completion([1], [2] * 10, [], text, "stop", 0, 0.0, 0.0)


class Verifier:
    """Says what `judge` says of each source; notes whether two verdicts were ever made at once."""

    def __init__(self, judge: Callable[[str], Result] = lambda _: result(Fault.INCORRECT)) -> None:
        self._judge, self._lock = judge, threading.Lock()
        self.sources: list[str] = []
        self.restarts = 0
        self.threads: set[int] = set()

    def verify(self, problem: Problem, candidate: Candidate) -> Result:
        assert self._lock.acquire(blocking=False), "one candidate at a time"
        try:
            self.threads.add(threading.get_ident())
            self.sources.append(candidate.source)
            return self._judge(candidate.source)
        finally:
            self._lock.release()

    def restart(self) -> None:
        self.restarts += 1


def drive(
    verifier: Verifier | None = None,
    use: Callable[[SearchDriver, Engine], Any] | None = None,
    fails: BaseException | None = None,
    turns: int = 1,
    budget: Budget | None = None,
    changed: Callable[[Search], None] = lambda _search: None,
    **options: Any,
) -> tuple[SearchDriver, Engine, Verifier]:
    """Runs a search to its end; `use` may do something once it has begun."""

    async def main() -> tuple[SearchDriver, Engine, Verifier]:
        engine, judge = Engine(fails), verifier or Verifier()
        search = Search(SearchOptions(budget or Budget(attempts=20), turns), random.Random(0), 0.0)
        driver = SearchDriver(
            search,
            TARGET,
            engine,
            judge,
            PromptMaker("compact", PROBLEM, "c"),
            DriveOptions(**{"at_once": 4, "backlog": 3, **options}),
            changed,
            lambda: 0.0,
        )
        if use is not None:
            use(driver, engine)
        await asyncio.wait_for(driver.run(), 60)
        return driver, engine, judge

    return asyncio.run(main())


def test_everything_that_is_sampled_is_verified_by_one_thread() -> None:
    driver, engine, verifier = drive()
    assert len(engine.prompts) == len(verifier.sources) == 20
    assert all(attempt.judgement is not None for attempt in driver.search.tree)
    assert len(verifier.threads) == 1
    assert threading.get_ident() not in verifier.threads


def test_answers_are_asked_for_as_no_training_and_a_few_at_once() -> None:
    _, engine, _ = drive()
    assert engine.purposes == {Purpose.EVAL}
    assert engine.most == 4


def test_an_attempt_is_refined_with_its_own_feedback() -> None:
    driver, engine, _ = drive(turns=3, budget=Budget(attempts=40), at_once=1, backlog=1)
    refined = [a for a in driver.search.tree if a.parent is not None]
    assert refined
    for attempt in refined:
        prompt = engine.prompts[attempt.number]
        assert attempt.parent is not None
        assert driver.search.tree[attempt.parent].source in prompt
        assert "### Feedback: mismatch" in prompt


def test_a_planted_kernel_is_verified_first_and_can_be_told_apart() -> None:
    driver, _, verifier = drive(use=lambda driver, _: driver.plant("planted\n", "L1/01_tanh of runs/one"))
    assert verifier.sources[0] == "planted\n"
    assert driver.search.tree[0].origin == "L1/01_tanh of runs/one"


def test_the_kernel_to_begin_with_is_judged_first_and_shown_with_its_verdict() -> None:
    driver, engine, verifier = drive(use=lambda driver, _: driver.begin_with("mine\n", "me"), turns=2)
    assert verifier.sources[0] == "mine\n"
    assert "mine" in engine.prompts[0]
    assert "### Feedback: mismatch" in engine.prompts[0]
    assert driver.search.tree[1].parent == driver.search.start == 0


def test_without_a_verdict_of_the_kernel_to_begin_with_there_is_no_search() -> None:
    """Whatever came of it might be slower."""

    def judge(source: str) -> Result:
        raise InfraError("the sandbox died")

    with pytest.raises(InfraError, match="the sandbox died"):
        drive(Verifier(judge), use=lambda driver, _: driver.begin_with("mine\n", "me"))


def test_a_fault_of_the_host_is_tried_again_and_then_lost_not_judged() -> None:
    def judge(source: str) -> Result:
        if source.startswith("class ModelNew:  # 2\n"):
            raise InfraError("the sandbox died")
        return result()

    driver, _, verifier = drive(Verifier(judge))
    lost = [a for a in driver.search.tree if a.lost]
    assert [(a.lost, a.judgement) for a in lost] == [("the sandbox died", None)]
    assert verifier.restarts == 1
    assert len(driver.search.tree.proven()) == 19


def test_a_module_that_can_not_be_verified_ends_the_search() -> None:
    def judge(_: str) -> Result:
        raise ProblemError("the reference fails")

    with pytest.raises(ProblemError, match="the reference fails"):
        drive(Verifier(judge))


def test_an_engine_that_refuses_ends_the_search_and_one_that_fails_for_a_while_does_not() -> None:
    with pytest.raises(ConfigError, match="no key"):
        drive(fails=ConfigError("no key"))
    driver, _, _ = drive(fails=InfraError("503"))
    assert {a.lost for a in driver.search.tree} == {"503"}


def test_stopping_cancels_what_is_being_written_and_keeps_what_is_proven() -> None:
    def use(driver: SearchDriver, engine: Engine) -> None:
        driver.plant("planted\n", "mine")
        engine.gate.clear()
        stop_when_all_are_written(driver, engine)

    def stop_when_all_are_written(driver: SearchDriver, engine: Engine) -> None:
        if engine.now == 4 and driver.search.tree.proven():
            driver.stop("interrupted")
        else:
            asyncio.get_running_loop().call_later(0.01, stop_when_all_are_written, driver, engine)

    driver, engine, _ = drive(Verifier(lambda _: result()), use)
    assert engine.cancelled == 4
    assert [a.source for a in driver.search.tree.proven()] == ["planted\n"]
    assert {a.lost for a in driver.search.tree if a.lost} == {"not written: interrupted"}


def test_an_answer_that_was_asked_for_and_never_begun_does_not_hold_up_the_end() -> None:
    driver, engine, _ = drive(use=lambda driver, _: driver.search.stop("interrupted"))
    assert engine.prompts == []
    driver, _, _ = drive(use=lambda driver, _: asyncio.get_running_loop().call_soon(driver.stop, "interrupted"))
    assert driver.search.is_idle


def test_changes_are_told() -> None:
    told: list[int] = []
    drive(changed=lambda search: told.append(len(search.tree)))
    assert told[-1] == 20


def test_an_attempt_too_long_to_be_shown_again_is_started_afresh() -> None:
    first = PromptMaker("compact", PROBLEM, "c").first()
    tight = PromptMaker("compact", PROBLEM, "c", count_tokens=len, max_tokens=len(first) + 100)
    failed = result(Fault.INCORRECT)
    assert "short" in tight.turn(failed, "short")
    assert tight.turn(failed, "x" * 200) == first


def test_an_error_of_ours_in_judging_ends_the_search_instead_of_leaving_it_waiting() -> None:
    def break_it(driver: SearchDriver, _: Engine) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("ours")

        driver.search.judged = broken  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="ours"):
        drive(use=break_it)


def test_after_the_deadline_nothing_that_waits_is_verified() -> None:
    driver, _, verifier = drive(budget=Budget(attempts=3), until=0.0)
    assert verifier.sources == []
    assert {attempt.lost for attempt in driver.search.tree} == {"not verified: time"}
