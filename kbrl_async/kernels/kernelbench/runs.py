"""Every candidate of a KernelBench run folder: several at once, and going on where an interrupted run stopped.

::

    run folder ─samples─▶ queue ─▶ workers (a Verifier each) ─▶ journal, one line each ─▶ kbrl_results.json
                                                                                      └─▶ eval_results.json, pass@k

Invariants
* Files are written by one thread; a result is on disk before the next one is counted.
* What is known is not done again, unless candidate, problem or options have changed.
* A file that is not ours is replaced only when that was asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError, KbrlError, ProblemError
from kbrl_async.kernels.funnel.concurrent import cores_for
from kbrl_async.kernels.funnel.reading import read_candidate
from kbrl_async.kernels.funnel.verifier import Verifier, VerifyOptions, choose_device, read_text, shapes_for
from kbrl_async.kernels.kernelbench.files import CHANCES_FILE, pass_at_k_results
from kbrl_async.kernels.kernelbench.formats import (
    EVAL_FILE,
    GeneratedSample,
    SampleOutcome,
    by_level,
    eval_results,
    samples,
)
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.problems.finding import number
from protocols.records import Problem

RESULTS_FILE = "kbrl_results.json"
JOURNAL_FILE = "kbrl_results.partial.jsonl"
VERSION = 1
_TRIES = 2


class RunResults(msgspec.Struct, frozen=True):
    """`kbrl_results.json`."""

    version: int
    outcomes: list[SampleOutcome]


class RunOptions(msgspec.Struct, frozen=True):
    backend: str | None = None
    device: str | None = None
    workers: int = 1
    overwrite: bool = False
    precision: str = "fp32"
    """Number format of problems and candidates, as KernelBench means it."""
    verify: VerifyOptions = VerifyOptions()


class VerificationEnd(msgspec.Struct, frozen=True):
    """The end of a run folder's verification."""

    outcomes: list[SampleOutcome]
    files: list[str]
    kept: list[str]
    """Files of KernelBench's name that were there before and were left alone."""


def _quiet(_outcome: SampleOutcome) -> None:
    pass


class RunFolder:
    """A run folder and the problems that its numbers mean."""

    def __init__(self, folder: Path, problems: str, options: RunOptions) -> None:
        self.folder, self.options = folder, options
        self.samples = samples(folder)
        self._source = problems
        self._problems: dict[str, dict[tuple[int, int], Problem]] = {}
        self.known = self._recall()
        self.todo = [sample for sample in self.samples if not self._is_known(sample)]

    def verify(self, done: Callable[[SampleOutcome], None] = _quiet) -> VerificationEnd:
        """All that is left to do; `done` is told of each as it ends."""
        finished: queue.SimpleQueue[SampleOutcome | BaseException] = queue.SimpleQueue()
        stop, todo = threading.Event(), queue.SimpleQueue[GeneratedSample]()
        for sample in self.todo:
            todo.put(sample)
        count = min(self.options.workers, len(self.todo))
        cores = cores_for(count)
        threads = [
            threading.Thread(target=self._work, args=(todo, finished, stop, core), name=f"verify-{i}", daemon=True)
            for i, core in enumerate(cores)
        ]
        for thread in threads:
            thread.start()
        try:
            for outcome in self._finished(finished):
                self._remember(outcome)
                done(outcome)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        return self._write()

    def _finished(self, finished: queue.SimpleQueue[SampleOutcome | BaseException]) -> Iterator[SampleOutcome]:
        for _ in self.todo:
            outcome = finished.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome

    def _work(
        self,
        todo: queue.SimpleQueue[GeneratedSample],
        finished: queue.SimpleQueue[SampleOutcome | BaseException],
        stop: threading.Event,
        cores: tuple[int, ...],
    ) -> None:
        options = msgspec.structs.replace(self.options.verify, cores=cores)
        try:
            with contextlib.ExitStack() as stack:
                verifier = stack.enter_context(Verifier(self.options.device, options))
                while not stop.is_set():
                    sample = todo.get_nowait()
                    finished.put(self._one(sample, verifier))
        except queue.Empty:
            return
        except BaseException as error:  # a worker that dies silently would leave the folder waiting for ever
            finished.put(error)

    def _one(self, sample: GeneratedSample, verifier: Verifier) -> SampleOutcome:
        """Host faults are tried again once; what is wrong with one sample never ends the folder."""
        outcome = SampleOutcome(sample.level, sample.problem, sample.sample, self._key(sample))
        for attempt in range(_TRIES):
            try:
                problem = self._problem(sample)
                result = verifier.verify(problem, read_text(Path(sample.path)) + "\n", self.options.backend)
                return msgspec.structs.replace(outcome, result=result)
            except InfraError as error:
                outcome = msgspec.structs.replace(outcome, error=f"InfraError: {error}")
            except KbrlError as error:
                return msgspec.structs.replace(outcome, error=f"{type(error).__name__}: {error}")
            if attempt + 1 < _TRIES:
                verifier.restart()
        return outcome

    def _problem(self, sample: GeneratedSample) -> Problem:
        text = read_text(Path(sample.path)) + "\n"
        reading = read_candidate(text, self.options.backend)
        backend = reading.candidate.backend if reading.candidate else ""
        shapes = shapes_for(choose_device(backend, self.options.device))
        if shapes not in self._problems:
            listed = load_problems(self._source, shapes=shapes, precision=self.options.precision)
            self._problems[shapes] = {(p.level, n): p for p in listed if (n := number(p)) is not None}
        problem = self._problems[shapes].get((sample.level, sample.problem))
        if problem is None:
            raise ProblemError(f"{self._source} has no problem {sample.problem} in level {sample.level}")
        return problem

    def _key(self, sample: GeneratedSample) -> str:
        options = self.options
        try:
            problem = self._problem(sample).source
        except KbrlError:
            problem = ""
        verify = options.verify
        rules = f"{verify.farm.rules} {verify.bench.outputs if verify.bench else ''}"
        asked = f"{options.backend} {options.device} {verify.timing} {verify.sanitize} {rules} {VERSION}"
        parts = (read_text(Path(sample.path)), problem, asked)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _recall(self) -> dict[tuple[int, int, int], SampleOutcome]:
        """What earlier runs found. A line that was cut off by a crash is not there."""
        outcomes: list[SampleOutcome] = []
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            data = (self.folder / RESULTS_FILE).read_bytes()
            outcomes += msgspec.json.decode(data, type=RunResults).outcomes
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / JOURNAL_FILE).read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    outcomes.append(msgspec.json.decode(line, type=SampleOutcome))
        return {(o.level, o.problem, o.sample): o for o in outcomes}

    def _is_known(self, sample: GeneratedSample) -> bool:
        known = self.known.get((sample.level, sample.problem, sample.sample))
        return known is not None and not known.error and known.key == self._key(sample)

    def _remember(self, outcome: SampleOutcome) -> None:
        self.known[outcome.level, outcome.problem, outcome.sample] = outcome
        with (self.folder / JOURNAL_FILE).open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")

    def _write(self) -> VerificationEnd:
        there = {(s.level, s.problem, s.sample) for s in self.samples}
        outcomes = [outcome for key, outcome in sorted(self.known.items()) if key in there]
        ours = self.folder / RESULTS_FILE
        _replace(ours, msgspec.json.encode(RunResults(VERSION, outcomes)))
        (self.folder / JOURNAL_FILE).unlink(missing_ok=True)
        files, kept = [str(ours)], []
        levels = by_level(outcomes)
        for level, listed in levels.items():
            prefix = "" if len(levels) == 1 else f"level_{level}_"
            table = eval_results(listed)
            chances = pass_at_k_results(table, sorted({1, *map(len, table.values())}))
            for name, content in ((EVAL_FILE, table), (CHANCES_FILE, chances)):
                path, data = self.folder / f"{prefix}{name}", msgspec.json.encode(content)
                if path.exists() and not self.options.overwrite and path.read_bytes() != _pretty(data):
                    kept.append(str(path))
                else:
                    _replace(path, data)
                    files.append(str(path))
        return VerificationEnd(outcomes, files, kept)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(_pretty(data))
    fresh.replace(path)


def _pretty(data: bytes) -> bytes:
    return msgspec.json.format(data, indent=4) + b"\n"
