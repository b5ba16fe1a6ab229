"""`kbrl optimize`: the fastest proven kernel for one module of your own, as a file that you can import.

Exit codes: 0 a proven kernel was written · 1 none was proven, or none is faster: nothing was written · 2 wrong usage ·
3 the host lacks something · 4 the engine or the module failed · 130 Ctrl-C, except in the search, which it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kbrl_async.cli.shared import add_config, add_rules, completed, facts, find, run_names, say, table
from kbrl_async.errors import UserError

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel import Verifier
    from kbrl_async.kernels.settings import Outputs, Rules
    from kbrl_async.lab.optimize.deadline import Deadline
    from kbrl_async.lab.optimize.evidence import SearchResult
    from kbrl_async.lab.optimize.search import Search
    from kbrl_async.lab.optimize.session import Wanted
    from kbrl_async.lab.optimize.targets import UserModule
    from kbrl_async.runs.config import Config
    from kbrl_async.runs.targets import Target as Policy

TURNS = 4
EXAMPLES = """\
examples:
  kbrl optimize my_module.py     a file with Model, get_inputs, get_init_inputs
  kbrl optimize my_module.py --policy default    by the newest policy of a run
  kbrl optimize my_module.py --from my_kernel.py    go on from what you have
  kbrl optimize package.module:function --inputs 'torch.randn(64, 128)'
  kbrl optimize layers.py:GatedNorm --init 1024 \\
      --inputs 'torch.randn(64, 1024)' --seconds 120
  kbrl optimize my_module.py --policy http://127.0.0.1:8000/v1 \\
      model_name=qwen backend=triton
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("target", metavar="FILE|MODULE:NAME", help="a KernelBench file, or a function or nn.Module by name")
    add("--inputs", default="", metavar="EXPR", help="example inputs, such as 'torch.randn(64, 128), torch.randn(128)'")
    add("--inputs-from", default="", metavar="MODULE:FUNCTION", help="a function that returns the inputs")
    add("--init", default="", metavar="EXPR", help="arguments of a class's constructor, such as '1024, 1e-5'")
    add("--from", dest="start", type=Path, metavar="FILE", help="a kernel to begin with: refined, and to be beaten")
    add("--policy", default="", metavar="WHAT", help="run, policy, model or http://…; default: model_name (small)")
    add("--version", default="newest", metavar="newest|best|N", help="which policy of a run")
    add("--seconds", type=float, metavar="S", help="for everything; default: 60 for the search, once there is a policy")
    add("--tokens", type=int, metavar="N", help="most tokens that the engine may write")
    add("--attempts", type=int, metavar="N", help="most answers to ask for")
    add("--turns", type=int, metavar="N", help=f"longest chain of refinements; 1: none; default {TURNS}")
    add("--examples", default="", metavar="DIR", help="an index or a run whose verified kernels are shown and tried")
    value = add("--value", action="append", default=[], metavar="RUN", help="order by what this run's kernels teach")
    completed(value, run_names)
    add("--output", type=Path, metavar="FILE", help="default: optimized_NAME.py here")
    add("--allow-slower", action="store_true", help="also write a proven kernel that is not shown to be faster")
    add("--json", action="store_true", help="the evidence as one JSON document on stdout")
    add_rules(parser)
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    from kbrl_async.lab.optimize.deadline import Deadline

    deadline = Deadline(args.seconds)  # before what takes seconds to import
    from kbrl_async.lab.optimize.targets import Given, find_file, read_target

    find_file(args.target.partition(":")[0])
    from kbrl_async.lab.optimize import engine
    from kbrl_async.lab.optimize.search import Budget
    from kbrl_async.lab.optimize.session import Wanted, output_path, pinned, read_start
    from kbrl_async.runs.origins import SMALL

    if (args.seconds is not None and args.seconds <= 0) or (args.turns is not None and args.turns < 1):
        raise UserError("--seconds must be above 0 and --turns at least 1", "See 'kbrl optimize --help'")
    policy, config = engine.resolve(args.policy, args.version, args.config, args.overrides)
    shapes = "cpu" if config.backend in ("c", "cpp") else "gpu"
    target = read_target(args.target, Given(args.inputs, args.inputs_from, args.init), shapes=shapes)
    output = output_path(args.output, target)
    start = None if args.start is None else read_start(args.start, config.backend)
    # a policy that was made without turns has never seen feedback
    turns = args.turns or (1 if policy.name == SMALL and config.mode == "single_turn" else TURNS)
    budget = Budget(None, args.tokens, args.attempts)
    model = None
    if args.value:
        from kbrl_async.runs.value import ValueModel, judged_in

        model = ValueModel().fit(judged_in([find(run) for run in args.value]))
        say(f"value model: learned from {model.pairs} pairs of kernels", Console(stderr=True))
    wanted = Wanted(budget, turns, start, args.examples, args.allow_slower, model)
    judged_by = (args.rules, args.outputs)
    with pinned(config) as threads:
        found = _found(OptimizeCall(wanted, policy, config, target, output, judged_by), threads, deadline)
    return _conclude(args, output, found)


class OptimizeCall(NamedTuple):
    """What one call is asked for."""

    wanted: Wanted
    policy: Policy
    config: Config
    target: UserModule
    output: Path
    judged_by: tuple[Rules, Outputs | None]


def _found(job: OptimizeCall, threads: int, deadline: Deadline) -> SearchResult:
    """Gets the policy, searches, and proves the best few from disk; the output is written where one holds.

    Only the search has an event loop, so that Ctrl-C ends everything else at once.
    """
    from kbrl_async.lab.optimize import session
    from kbrl_async.lab.optimize.engine import published

    console, slower = Console(stderr=True), job.wanted.allow_slower
    with contextlib.ExitStack() as stack:
        with console.status(f"loading {job.policy.label} …") as said:
            told = deadline.watching(lambda text: said.update(f"{text} …"))
            folder = stack.enter_context(published(job.policy, job.config, told))
        verifiers = stack.enter_context(session.open_verifiers(job.config, *job.judged_by))
        found = asyncio.run(_searched(job, threads, deadline, folder, verifiers.quick, console))
        if not (best := session.finalists(found, slower)):
            return found
        with console.status(f"proving the best {len(best)} from disk …"):
            return session.prove(found, verifiers.careful, job.output, slower, lambda: deadline.is_over)


async def _searched(
    job: OptimizeCall, threads: int, deadline: Deadline, folder: Path, verifier: Verifier, console: Console
) -> SearchResult:
    """Searches, and shows how far it is."""
    from kbrl_async.lab.optimize import session
    from kbrl_async.lab.optimize.engine import open_engine

    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    async with open_engine(job.policy, job.config, threads, folder) as opened:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("starting", total=1.0)

            def changed(search: Search) -> None:
                progress.update(bar, completed=search.share(time.monotonic()), description=status(search))

            wanted = msgspec.structs.replace(job.wanted, budget=deadline.within(job.wanted.budget))
            until = deadline.search_until()
            return await session.search(wanted, job.config, job.target, opened, verifier, changed, until)


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


def status(search: Search) -> str:
    """One line: how many attempts, how many proven, the best so far."""
    from kbrl_async.lab.optimize import evidence

    total = evidence.counts(search)
    words = [f"{total['attempts']} attempts", f"{total['distinct']} verified", f"{total['proven']} proven"]
    best = search.best
    judged = best.judgement if best is not None else None
    if judged is not None and judged.speedup is not None:
        words.append(f"best {judged.speedup:.2f}× [{judged.lo:.2f}, {judged.hi:.2f}]")
    elif not total["proven"] and (failures := search.tree.failures()):
        words.append(f"furthest: {escape(evidence.described(failures[0]))}")
    return " · ".join(words)


def _conclude(args: argparse.Namespace, output: Path, found: SearchResult) -> int:
    from kbrl_async.lab.optimize import evidence
    from kbrl_async.lab.optimize.session import write_evidence

    document, files = write_evidence(output, found)
    code = 0 if found.proof is not None else 1
    if args.json:
        print(json.dumps(document))
        return code
    console = Console()
    console.print(f"[bold]{escape(found.target.title)}[/bold]: {evidence.conclusion(found)}")
    if found.proof is not None:
        console.print(facts(evidence.proof_rows(found)))
    else:
        say(f"asked: {found.facts.engine}", console)
        _explain(console, found)
    if words := evidence.began_with(found.search):
        say(f"began with {words}", console)
    for line in evidence.tree_lines(found.search, most=12):
        say("  " + line, console)
    say(f"written: {', '.join(map(str, files))}", console)
    return code


def _explain(console: Console, found: SearchResult) -> None:
    from kbrl_async.lab.optimize import evidence

    for final in found.finals:
        say(f"attempt {final.attempt}, examined again: {repr(final.result).strip('<>')}", console)
    if found.search.tree.proven():
        say("--allow-slower writes a proven kernel that is not faster", console)
        return
    rows = table(("attempt", "verdict", "what"))
    for row in evidence.failures(found.search):
        rows.add_row(*map(escape, row))
    if rows.row_count:
        console.print(rows)
