"""Runs a search: asks the engine for answers while the funnel verifies earlier ones.

::

    event loop:  ask ─▶ engine.generate (many at once) ─▶ queue ─▶ one thread with the Verifier ─▶ judged ─▶ ask …

Invariants
* At most `backlog` sources wait for the verifier, so that what is asked for reflects what is known, and at the end of
  the budget all that was sampled is verified within moments.
* A fault of the host is tried again once, by a verifier made anew; then the attempt is lost, not judged (I4).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from kbrl_async.errors import InfraError
from kbrl_async.kernels.funnel import Result
from kbrl_async.lab.optimize.search import AnswerRequest, Search
from kbrl_async.lab.optimize.targets import UserModule
from kbrl_async.lab.optimize.tree import Attempt, Judgement
from kbrl_async.rollouts.prompts import TokenBudget, extract, feedback_of, render_prompt, render_turn
from kbrl_async.rollouts.prompts.examples import Worked, render_with_examples
from kbrl_async.sampling.engine import Completion
from protocols.records import Candidate, Problem, Purpose, SamplingParams

_ALL_ASKED = ("", "attempts", "tokens")
"""After these, what was asked for is still waited for; after the others, time above all, it is not."""


class Samples(Protocol):
    """The part of an engine that a search needs."""

    async def generate(
        self, request_id: str, prompt: str, params: SamplingParams, purpose: Purpose = Purpose.TRAIN, adapter: str = ""
    ) -> Completion: ...


class Verifies(Protocol):
    """The part of a verifier that a search needs; called from one thread."""

    def verify(self, problem: Problem, candidate: Candidate) -> Result: ...
    def restart(self) -> None: ...


class DriveOptions(msgspec.Struct, frozen=True):
    backend: str = "c"
    sampling: SamplingParams = SamplingParams(max_tokens=256)
    at_once: int = 16
    """Answers that the engine writes at once."""
    backlog: int = 12
    """Sources that may wait for their verdict."""
    until: float = math.inf
    """When nothing that waits is verified any more."""


class PromptMaker:
    """How attempts are asked for. `max_tokens` bounds every prompt: examples or feedback beyond it stay out."""

    def __init__(
        self,
        option: str,
        problem: Problem,
        backend: str,
        examples: Sequence[Worked] = (),
        count_tokens: Callable[[str], int] = len,
        max_tokens: int = 1 << 30,
    ) -> None:
        self._option, self._problem, self._backend = option, problem, backend
        self._budget = TokenBudget(max_tokens, count_tokens)
        self._first = render_prompt(option, problem, backend)
        self.shown: tuple[int, ...] = ()
        """Which of the examples are in the first prompt."""
        if examples:
            made = render_with_examples(option, problem, examples, count_tokens, max_tokens, backend)
            self._first, self.shown = made.text, made.shown

    def first(self) -> str:
        return self._first

    def turn(self, result: Result, source: str) -> str:
        feedback = feedback_of(result.verdict, result.timing, source, self._backend)
        return render_turn(self._option, self._problem, feedback, self._backend, self._budget)


class SearchDriver:
    """See the module. `changed` is called after every event, on the loop."""

    def __init__(
        self,
        search: Search,
        target: UserModule,
        engine: Samples,
        verifier: Verifies,
        prompts: PromptMaker,
        options: DriveOptions,
        changed: Callable[[Search], None] = lambda _search: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.search, self._target, self._engine, self._verifier = search, target, engine, verifier
        self._prompts, self._options, self._changed, self._clock = prompts, options, changed, clock
        self._results: dict[int, Result] = {}
        self._writing: dict[asyncio.Task[None], int] = {}
        self._queue: asyncio.PriorityQueue[tuple[float, int, Attempt]] = asyncio.PriorityQueue()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "verify")
        self._failure: BaseException | None = None

    def stop(self, reason: str) -> None:
        """Ask for nothing more; what is written so far is still verified."""
        self.search.stop(reason)
        self._wake.set()

    def plant(self, source: str, origin: str) -> None:
        """A candidate from elsewhere, to be verified first."""
        self._judge_first(self.search.plant(source, origin, self._clock()))

    def begin_with(self, source: str, origin: str) -> None:
        """A kernel to refine and to beat, see `Search.begin_with`. Without its verdict there is no search."""
        self._judge_first(self.search.begin_with(source, origin, self._clock()))

    def _judge_first(self, attempt: Attempt) -> None:
        if self.search.needs_verdict(attempt):
            self._queue.put_nowait((-math.inf, attempt.number, attempt))

    async def run(self) -> None:
        """Until the budget is spent and everything that was sampled has its verdict.

        :raises KbrlError: the module itself can't be verified, or the engine refuses.
        """
        judge = asyncio.create_task(self._judge())
        judge.add_done_callback(self._judge_ended)
        try:
            while self._failure is None and not (self.search.stopped and self.search.is_idle):
                self._ask()
                self._wake.clear()
                if self.search.stopped not in _ALL_ASKED:
                    for task in self._writing:
                        task.cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.25):
                        await self._wake.wait()
        finally:
            judge.cancel()
            for task in self._writing:
                task.cancel()
            await asyncio.gather(judge, *self._writing, return_exceptions=True)
            self._thread.shutdown(wait=True)
        if self._failure is not None:
            raise self._failure

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self) -> None:
        while len(self._writing) < self._options.at_once and self._queue.qsize() < self._options.backlog:
            ask = self.search.ask(self._clock())
            if ask is None:
                return
            task = asyncio.create_task(self._write(ask), name=f"attempt-{ask.number}")
            self._writing[task] = ask.number
            task.add_done_callback(self._written)

    async def _write(self, ask: AnswerRequest) -> None:
        if ask.parent is None:
            prompt = self._prompts.first()
        else:
            prompt = self._prompts.turn(self._results[ask.parent], self.search.tree[ask.parent].source)
        try:
            done = await self._engine.generate(f"attempt-{ask.number}", prompt, self._options.sampling, Purpose.EVAL)
        except InfraError as error:
            self.search.lost(ask.number, str(error))
            return
        found = extract(done.text)
        tokens = len(done.token_ids) or done.output_tokens
        attempt = self.search.wrote(ask.number, found.source, tokens, found.problem)
        if self.search.needs_verdict(attempt):
            value = self.search.options.value
            self._queue.put_nowait((0.0 if value is None else -value(attempt.source), attempt.number, attempt))

    def _written(self, task: asyncio.Task[None]) -> None:
        number = self._writing.pop(task)
        if task.cancelled():
            self.search.lost(number, f"not written: {self.search.stopped or 'cancelled'}")
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._tell()

    def _tell(self) -> None:
        self._changed(self.search)
        self._wake.set()

    # ── verifying ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _judge(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            _, _, attempt = await self._queue.get()
            if self._clock() >= self._options.until:
                self.search.lost(attempt.number, "not verified: time")
                self._tell()
                continue
            try:
                result = await loop.run_in_executor(self._thread, self._verify, attempt.source)
            except InfraError as error:
                self.search.lost(attempt.number, str(error))
                if attempt.number == self.search.start:
                    self._failure = self._failure or error
            except Exception as error:  # supervisor: what is wrong with module or host ends the search, in `run`
                self._failure = self._failure or error
            else:
                self._results[attempt.number] = result
                self.search.judged(attempt.number, judgement(result))
            self._tell()

    def _judge_ended(self, task: asyncio.Task[None]) -> None:
        """With an error of ours it would judge nothing more, and the search would never be idle."""
        if not task.cancelled():
            self._failure = self._failure or task.exception()
            self._wake.set()

    def _verify(self, source: str) -> Result:
        candidate = Candidate(source, self._options.backend)
        try:
            return self._verifier.verify(self._target.problem, candidate)
        except InfraError:
            self._verifier.restart()
            return self._verifier.verify(self._target.problem, candidate)


def judgement(result: Result) -> Judgement:
    """What the search needs of a result."""
    v, t = result.verdict, result.timing
    return Judgement(
        fault=v.fault,
        category=feedback_of(v, t, "", result.backend).category,
        message=v.message,
        rule=v.rule,
        passed=v.passed,
        total=v.total,
        speedup=t.speedup if t else None,
        lo=t.lo if t else None,
        hi=t.hi if t else None,
        max_abs_error=v.max_abs_error,
        seconds=round(sum(stage.seconds for stage in result.stages), 4),
    )
