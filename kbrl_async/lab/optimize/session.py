"""One call of `kbrl optimize` without its terminal: search with an open engine, prove the best, write it down."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.funnel.reading import read_candidate
from kbrl_async.kernels.funnel.verifier import read_text, under
from kbrl_async.kernels.settings import BACKENDS, Outputs, Rules
from kbrl_async.lab.optimize import engine, evidence, proving
from kbrl_async.lab.optimize.driver import DriveOptions, PromptMaker, SearchDriver
from kbrl_async.lab.optimize.evidence import Facts, SearchResult
from kbrl_async.lab.optimize.search import Budget, Search, SearchOptions
from kbrl_async.lab.optimize.targets import UserModule
from kbrl_async.lab.optimize.tree import Attempt
from kbrl_async.runs.config import Config, available_cores, cpu_layout, sampler_threads
from kbrl_async.runs.value import ValueModel
from protocols.records import SamplingParams


class Beginning(msgspec.Struct, frozen=True):
    """A kernel that somebody has."""

    name: str
    source: str


class Wanted(msgspec.Struct, frozen=True):
    """What one search may spend and do."""

    budget: Budget = Budget(seconds=60.0)
    turns: int = 4
    start: Beginning | None = None
    examples: str = ""
    allow_slower: bool = False
    value: ValueModel | None = None
    """Orders what is verified and refined."""


class Verifiers(msgspec.Struct, frozen=True):
    """Both on the bench's core, one after the other: `quick` for the search, `careful` measures for longer."""

    quick: Verifier
    careful: Verifier


def read_start(path: Path, backend: str) -> Beginning:
    """With what lies beside it that it uses.

    :raises UserError: there is no candidate in that file, or it is none of the backend.
    """
    reading = read_candidate(read_text(path))
    if reading.candidate is None:
        raise UserError(f"--from {path} holds no kernel: {reading.problem}", "Give a Python file with ModelNew")
    if (written := reading.candidate.backend) != backend and backend in BACKENDS.ours:
        cause = f"--from {path} is written in {written}, and kernels are asked for in {backend}"
        raise UserError(cause, f"Add backend={written}")
    return Beginning(path.name, reading.candidate.source)


@contextlib.contextmanager
def open_verifiers(config: Config, rules: Rules, outputs: Outputs | None) -> Iterator[Verifiers]:
    options = under(VerifyOptions(cores=tuple(cpu_layout(config, available_cores()).bench)), rules, outputs)
    with Verifier(None, options) as quick, Verifier(None, proving.careful_options(options)) as careful:
        yield Verifiers(quick, careful)


@contextlib.contextmanager
def pinned(config: Config) -> Iterator[int]:
    """The engine keeps off the bench's core, as in a run; yields how many threads it may use."""
    before = os.sched_getaffinity(0)
    layout = cpu_layout(config, available_cores())
    os.sched_setaffinity(0, layout.sampler)
    try:
        yield sampler_threads(config, layout)
    finally:
        os.sched_setaffinity(0, before)


async def search(
    wanted: Wanted,
    config: Config,
    target: UserModule,
    opened: engine.Opened,
    verifier: Verifier,
    changed: Callable[[Search], None],
    until: float = math.inf,
) -> SearchResult:
    """Until the budget is spent; the first Ctrl-C ends it too, and what was found is kept.

    :param changed: called at each event.
    :param until: when, of `time.monotonic`, nothing that was written is verified any more.
    """
    began = time.monotonic()
    driver, shown = _driver(wanted, config, target, opened, verifier, changed, until)
    with interruptible(asyncio.get_running_loop(), lambda: driver.stop("interrupted")):
        await driver.run()
    seconds = round(time.monotonic() - began, 2)
    budget = {**msgspec.structs.asdict(wanted.budget), "turns": wanted.turns}
    made = (opened.label, config.prompt_option, config.backend, seconds, budget, shown, opened.engine.stats().cost)
    return SearchResult(target, driver.search, Facts(*made))


def _driver(
    wanted: Wanted,
    config: Config,
    target: UserModule,
    opened: engine.Opened,
    verifier: Verifier,
    changed: Callable[[Search], None],
    until: float,
) -> tuple[SearchDriver, tuple[str, ...]]:
    """Ready to run, and the names of the examples in its prompt."""
    place, shown, backend = wanted.examples, target.shown, config.backend
    hits = engine.examples(place, shown, backend, config.prompt) if place else []
    room = opened.positions - config.max_tokens
    prompts = PromptMaker(config.prompt_option, shown, backend, hits, opened.count_tokens, room)
    model = wanted.value
    value = None if model is None else functools.partial(model.value, target.problem.source)
    state = Search(
        SearchOptions(wanted.budget, wanted.turns, value=value), random.Random(config.seed), time.monotonic()
    )
    options = DriveOptions(backend, SamplingParams(config.max_tokens, config.temperature), opened.at_once, until=until)
    driver = SearchDriver(state, target, opened.engine, verifier, prompts, options, changed)
    if wanted.start is not None:
        driver.begin_with(wanted.start.source, f"the author of {wanted.start.name}")
    # won by a run for a similar module: tried before the policy is asked
    for entry in engine.similar_kernels(place, shown, backend) if place else ():
        driver.plant(entry.kernel, f"a policy of run {entry.origin}, for {entry.problem_id}")
    return driver, tuple(hits[number].entry.uid for number in prompts.shown)


@contextlib.contextmanager
def interruptible(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second is Python's own."""

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def finalists(found: SearchResult, allow_slower: bool) -> list[Attempt]:
    """The brief timing may miss what a longer one shows: those whose interval reaches above 1 are examined too.
    What the search was given to begin with comes before them: what is written has to be faster.
    """
    proven = found.search.tree.proven()
    hopeful = [a for a in proven if allow_slower or (a.judgement is not None and (a.judgement.hi or 0.0) > 1.0)]
    best, start = hopeful[: proving.FINALISTS], found.search.start
    if not best:
        return []
    return [*(a for a in proven if a.number == start), *(a for a in best if a.number != start)]


def prove(
    found: SearchResult,
    verifier: Verifier,
    output: Path,
    allow_slower: bool,
    is_over: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Proves the best few from disk; `output` is written where one holds. Blocks for seconds.

    :param is_over: asked before each but the best one, whether there is time for it.
    """
    target, backend = found.target, found.facts.backend
    version, texts = evidence.versions()["kbrl-async"], {}
    for attempt in finalists(found, allow_slower):
        author = evidence.author(found.search, attempt.number, found.facts.engine)
        texts[attempt.number] = proving.render(target, attempt.source, output.name, backend, author, version)
    to_beat = found.search.start if found.search.start in texts else None
    proof, finals = proving.prove(texts, target.problem, verifier, output, backend, allow_slower, is_over, to_beat)
    return msgspec.structs.replace(found, proof=proof, finals=finals)


def output_path(given: Path | None, target: UserModule) -> Path:
    """:raises UserError: a file that can't be imported, or has no folder."""
    path = given or Path(f"optimized_{target.stem}.py")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"--output {path} can't be imported", "Give a name such as optimized_my_module.py")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.absolute().parent}", "Make it, or give --output FILE elsewhere")
    return path


def write_evidence(output: Path, found: SearchResult) -> tuple[dict[str, Any], list[Path]]:
    """The document, and all files that there are now."""
    # what failed must not take the place of the evidence for a kernel that an earlier search has written
    kind = "failed" if found.proof is None else "evidence"
    as_json, as_markdown = output.with_suffix(f".{kind}.json"), output.with_suffix(f".{kind}.md")
    document = evidence.document(found)
    write_atomically(as_json, msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
    write_atomically(as_markdown, evidence.markdown(found))
    return document, [*([output] if found.proof else []), as_json, as_markdown]
