"""`kbrl optimize`: the fastest proven kernel for one module of your own, as a file that you can import.

Exit codes: 0 a proven kernel was written · 1 none was proven, or none is faster: nothing was written · 2 wrong usage ·
3 the host lacks something · 4 the engine or the module failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.runs.config import Config, available_cores, cpu_layout, sampler_threads

if TYPE_CHECKING:
    from kbrl_async.cli.optimize_engine import Opened
    from kbrl_async.evaluation.targets import Target as Policy
    from kbrl_async.kernels.funnel import Verifier
    from kbrl_async.lab.optimize import Search, Target
    from kbrl_async.lab.optimize.driver import Driver
    from kbrl_async.lab.optimize.proving import Proof

EXAMPLES = """\
examples:
  kbrl optimize my_module.py                           a file with Model, get_inputs and get_init_inputs
  kbrl optimize my_module.py --policy runs/default     by the newest policy of a run
  kbrl optimize package.module:function --inputs 'torch.randn(64, 128)'
  kbrl optimize layers.py:GatedNorm --init 1024 --inputs 'torch.randn(64, 1024)' --seconds 120
  kbrl optimize my_module.py --policy http://127.0.0.1:8000/v1 model_name=qwen backend=triton
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("target", metavar="FILE|MODULE:NAME", help="a KernelBench file, or a function or nn.Module by name")
    add("--inputs", default="", metavar="EXPR", help="example inputs, such as 'torch.randn(64, 128), torch.randn(128)'")
    add("--inputs-from", default="", metavar="MODULE:FUNCTION", help="a function that returns the inputs")
    add("--init", default="", metavar="EXPR", help="arguments of a class's constructor, such as '1024, 1e-5'")
    add("--policy", default="", metavar="WHAT", help="run, policy, model or http://…; default: model_name (small)")
    add("--version", default="newest", metavar="newest|best|N", help="which policy of a run")
    add("--seconds", type=float, default=60.0, metavar="S", help="for the search; default 60")
    add("--tokens", type=int, metavar="N", help="most tokens that the engine may write")
    add("--attempts", type=int, metavar="N", help="most answers to ask for")
    add("--turns", type=int, default=4, metavar="N", help="longest chain of refinements; 1: none; default 4")
    add("--examples", default="", metavar="DIR", help="an index or a run whose verified kernels are shown and tried")
    add("--output", type=Path, metavar="FILE", help="default: optimized_NAME.py here")
    add("--allow-slower", action="store_true", help="also write a proven kernel that is not shown to be faster")
    add("--json", action="store_true", help="the evidence as one JSON document on stdout")
    add("--config", metavar="FILE", type=Path, action="append", default=[], help="YAML or TOML; later files win")
    add("overrides", metavar="key=value", nargs="*", help="settings that win over files; 'kbrl config' lists them")


def run(args: argparse.Namespace) -> int:
    from kbrl_async.cli import optimize_engine
    from kbrl_async.lab.optimize.targets import Given, read_target

    if args.seconds <= 0 or args.turns < 1:
        raise UserError("--seconds must be above 0 and --turns at least 1", "See 'kbrl optimize --help'")
    policy, config = optimize_engine.resolve(args.policy, args.version, args.config, args.overrides)
    target = read_target(args.target, Given(args.inputs, args.inputs_from, args.init), shapes=_shapes(config))
    output = _output(args.output, target)
    with pinned(config) as threads:
        return asyncio.run(_main(args, policy, config, target, output, threads))


def _shapes(config: Config) -> str:
    return "cpu" if config.backend in ("c", "cpp") else "gpu"


def _output(given: Path | None, target: Target) -> Path:
    path = given or Path(f"optimized_{target.stem}.py")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"--output {path} can't be imported", "Give a name such as optimized_my_module.py")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.absolute().parent}", "Make it, or give --output FILE elsewhere")
    return path


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


class Wanted(msgspec.Struct, frozen=True):
    """What one search may spend and do."""

    seconds: float | None = 60.0
    tokens: int | None = None
    attempts: int | None = None
    turns: int = 4
    examples: str = ""
    allow_slower: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """What came of it; `proof` is None where nothing was written."""

    search: Any
    proof: Any
    finals: tuple[Any, ...]
    facts: Any


async def _main(
    args: argparse.Namespace, policy: Policy, config: Config, target: Target, output: Path, threads: int
) -> int:
    from kbrl_async.cli import optimize_engine
    from kbrl_async.cli import optimize_show as show

    console = Console(stderr=True)
    wanted = Wanted(args.seconds, args.tokens, args.attempts, args.turns, args.examples, args.allow_slower)
    with console.status(f"loading {policy.label} …") as said:
        opening = optimize_engine.open_engine(
            policy, config, threads, lambda what, share: said.update(f"{what} ({share:.0%}) …")
        )
        opened = await opening.__aenter__()
    try:
        with open_verifiers(config) as verifiers:
            done = await optimise(wanted, config, target, output, opened, verifiers, console)
    finally:
        await opening.__aexit__(None, None, None)
    document = _write_evidence(output, target, done)
    if args.json:
        print(json.dumps(document))
    else:
        files = [*([output] if done.proof else []), *_evidence_paths(output, done.proof)]
        show.conclude(Console(), target, done.search, done.proof, done.finals, [str(path) for path in files])
    return 0 if done.proof is not None else 1


async def optimise(
    wanted: Wanted,
    config: Config,
    target: Target,
    output: Path,
    opened: Opened,
    verifiers: Verifiers,
    console: Console,
) -> Outcome:
    """Searches, then proves the best few from disk; `output` is written where one holds."""
    from kbrl_async.lab.optimize import proving
    from kbrl_async.lab.optimize.evidence import Facts

    began = time.monotonic()
    driver, shown = _driver(wanted, config, target, opened, verifiers.quick)
    await _search(driver, console)
    facts = Facts(
        opened.label,
        config.prompt_option,
        config.backend,
        round(time.monotonic() - began, 2),
        {"seconds": wanted.seconds, "tokens": wanted.tokens, "attempts": wanted.attempts, "turns": wanted.turns},
        shown,
        opened.engine.stats().cost,
    )
    search = driver.search
    finalists = _finalists(search, wanted.allow_slower)
    if not finalists:
        return Outcome(search, None, (), facts)
    saying = console.status(f"proving the best {len(finalists)} from disk …")
    with saying:
        proof, finals = await asyncio.to_thread(
            proving.prove, finalists, target, verifiers.careful, output, config.backend, _version(), wanted.allow_slower
        )
    return Outcome(search, proof, finals, facts)


class Verifiers(msgspec.Struct, frozen=True):
    """Both on the bench's core, one after the other: `quick` for the search, `careful` measures for longer."""

    quick: Verifier
    careful: Verifier


@contextlib.contextmanager
def open_verifiers(config: Config) -> Iterator[Verifiers]:
    from kbrl_async.kernels.funnel import Verifier, VerifyOptions
    from kbrl_async.lab.optimize.proving import careful_options

    options = VerifyOptions(cores=tuple(cpu_layout(config, available_cores()).bench))
    with Verifier(None, options) as quick, Verifier(None, careful_options(options)) as careful:
        yield Verifiers(quick, careful)


def _driver(
    wanted: Wanted, config: Config, target: Target, opened: Opened, verifier: Verifier
) -> tuple[Driver, tuple[str, ...]]:
    from kbrl_async.cli import optimize_engine
    from kbrl_async.lab.optimize import Budget, Search, SearchOptions
    from kbrl_async.lab.optimize.driver import DriveOptions, Driver
    from kbrl_async.lab.optimize.prompting import PromptMaker
    from protocols.records import SamplingParams

    hits = []
    if wanted.examples:
        hits = optimize_engine.examples(wanted.examples, target.shown, config.backend, config.dataset_builder.raicl_k)
    room = opened.positions - config.max_tokens
    prompts = PromptMaker(config.prompt_option, target.shown, config.backend, hits, opened.count_tokens, room)
    budget = Budget(wanted.seconds, wanted.tokens, wanted.attempts)
    search = Search(SearchOptions(budget, wanted.turns), random.Random(config.seed), time.monotonic())
    params = SamplingParams(config.max_tokens, config.temperature)
    options = DriveOptions(config.backend, params, opened.at_once)
    driver = Driver(search, target, opened.engine, verifier, prompts, options)
    if wanted.examples:  # won by a run for a similar module: tried before the policy is asked
        for entry in optimize_engine.similar_kernels(wanted.examples, target.shown, config.backend):
            driver.plant(entry.kernel, f"{entry.problem_id} of {wanted.examples}")
    return driver, tuple(hits[place].entry.uid for place in prompts.shown)


async def _search(driver: Driver, console: Console) -> None:
    """Until the budget is spent; the first Ctrl-C ends it too, and what was found is proven and kept."""
    from kbrl_async.cli import optimize_show as show

    progress, bar = show.live(console)
    loop = asyncio.get_running_loop()

    def changed() -> None:
        progress.update(bar, completed=driver.search.share(time.monotonic()), description=show.status(driver.search))

    driver.changed = changed
    with progress, interruptible(loop, lambda: driver.stop("interrupted")):
        await driver.run()


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


def _finalists(search: Search, allow_slower: bool) -> list[Any]:
    from kbrl_async.lab.optimize.proving import FINALISTS

    proven = search.tree.proven()
    # the brief timing may miss what a longer one shows: those whose interval reaches above 1 are examined too
    hopeful = [a for a in proven if allow_slower or (a.judgement is not None and (a.judgement.hi or 0.0) > 1.0)]
    return hopeful[:FINALISTS]


def _evidence_paths(output: Path, proof: Proof | None) -> tuple[Path, Path]:
    # what failed must not take the place of the evidence for a kernel that an earlier search has written
    kind = "failed" if proof is None else "evidence"
    return output.with_suffix(f".{kind}.json"), output.with_suffix(f".{kind}.md")


def _write_evidence(output: Path, target: Target, done: Outcome) -> dict[str, Any]:
    from kbrl_async.lab.optimize import evidence

    parts = (target, done.search, done.facts, done.proof, done.finals)
    document = evidence.document(*parts)
    as_json, as_markdown = _evidence_paths(output, done.proof)
    write_atomically(as_json, msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
    write_atomically(as_markdown, evidence.markdown(*parts))
    return document


def _version() -> str:
    from kbrl_async.lab.optimize.evidence import versions

    return versions()["kbrl-async"]
