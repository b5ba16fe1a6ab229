"""`kbrl verify`: one candidate through the whole funnel, or every candidate of a KernelBench run folder.

Exit codes: 0 the candidate is correct · 1 it is not · 2 wrong usage · 3 our fault: the host or the problem failed ·
130 stopped by Ctrl-C.
With `--run`: 0 every candidate has its verdict, whatever it is · 3 some have none, and why is in `kbrl_results.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress

from kbrl_async.cli.shared import OUR_FAULT, add_kernel, add_rules, facts, judged, print_json, say, table
from kbrl_async.errors import KbrlError, UserError

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel import Result
    from kbrl_async.kernels.kernelbench.runs import VerificationEnd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    one, folder = parser.add_argument_group("one candidate"), parser.add_argument_group("a run folder")
    add_kernel(one)
    one.add_argument(
        "--response",
        action=argparse.BooleanOptionalAction,
        help="the file is a model's answer; default: looked at its text",
    )
    one.add_argument("--example", metavar="BACKEND", help="write a problem and a kernel to start from, in this folder")
    one.add_argument("--json", action="store_true", help="one JSON document on stdout instead of a table")
    folder.add_argument("--run", metavar="DIR", type=Path, help="level_L_problem_P_sample_S_kernel.py files to verify")
    folder.add_argument("--workers", type=int, default=1, help="candidates verified at once, each on a core of its own")
    folder.add_argument("--overwrite", action="store_true", help="replace the eval_results.json that is there")
    parser.add_argument(
        "--problems", metavar="DIR", default="", help="where ids are looked up; default: the project's suite"
    )
    parser.add_argument(
        "--timing", action=argparse.BooleanOptionalAction, default=True, help="time what is correct (default)"
    )
    parser.add_argument("--device", default="auto", help="where kernels run: cpu, cuda or cuda:N; default: auto")
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="number format of module and inputs"
    )
    add_rules(parser)
    parser.add_argument("--sanitize", action="store_true", help="also run under sanitizers; slower")


def run(args: argparse.Namespace) -> int:
    if args.example:
        return _example(args.example)
    _check_usage(args)

    def print_failure(error: KbrlError) -> None:
        if args.json:
            print_json(_failure(error))

    return judged(lambda: _run_folder(args) if args.run else _one(args), print_failure)


def _check_usage(args: argparse.Namespace) -> None:
    if args.run and (args.problem or args.candidate):
        raise UserError("--run verifies a whole folder", "Leave out --problem and --candidate, or --run")
    if not args.run and not (args.problem and args.candidate):
        cure = "To start from an example: kbrl verify --example c"
        raise UserError("kbrl verify needs --problem and --candidate, or --run DIR", cure)
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} verifies nothing", "Give 1 or more")


_INPUTS = """

def get_inputs():
    return [torch.randn(512, 1024), torch.randn(512, 1024)]


def get_init_inputs():
    return []
"""
"""What the plainest worked example of every backend of ours is called with."""


def _example(name: str) -> int:
    """:raises UserError: no such backend, one without an example, or files that would be overwritten."""
    from kbrl_async.kernels.backends import backend, backends

    shots = backend(name).shots
    if not shots:
        raise UserError(f"backend {name} has no worked example", f"Choose among {', '.join(backends())}")
    files = {Path("example_problem.py"): shots[0].reference + _INPUTS, Path("example_kernel.py"): shots[0].kernel}
    if there := [str(path) for path in files if path.exists()]:
        raise UserError(f"{there[0]} is there already", "Take it away, or go into another folder")
    for path, text in files.items():
        path.write_text(text)
    problem, candidate = files
    say(f"written: {problem} and {candidate}, a module and a right kernel for it, which is not fast yet. Now:")
    say(f"  kbrl verify --problem {problem} --candidate {candidate}")
    return 0


def _one(args: argparse.Namespace) -> int:
    from kbrl_async.kernels.funnel import VerifyOptions, verify
    from kbrl_async.kernels.funnel.verifier import under
    from kbrl_async.kernels.stages import teller

    candidate = sys.stdin.read() + "\n" if args.candidate == "-" else Path(args.candidate)
    console = Console(stderr=True)
    teller.set(lambda words: console.print(escape(words)))
    with console.status(f"verifying {args.candidate} against {args.problem} …"):
        result = verify(
            args.problem,
            candidate,
            args.backend,
            timing=args.timing,
            device=args.device,
            problems=args.problems,
            response=args.response,
            sanitize=args.sanitize,
            precision=args.precision,
            options=under(VerifyOptions(), args.rules, args.outputs),
        )
    if args.json:
        print_json(result.document())
    else:
        show(result)
    return result.exit_code


def show(result: Result, console: Console | None = None) -> None:
    """Every stage, then what came of it."""
    console = console or Console()
    title = f"{result.problem_id} · {result.backend or 'no backend'}"
    stages = table(("stage", "result", "seconds", ""), title, right=("seconds",))
    for stage in result.stages:
        outcome = stage.fault.value.replace("_", " ")
        stages.add_row(stage.name.replace("_", " "), outcome, f"{stage.seconds:.3f}", stage.detail)
    console.print(stages)
    console.print(facts(result.rows()))


def _run_folder(args: argparse.Namespace) -> int:
    from kbrl_async.kernels.funnel import VerifyOptions
    from kbrl_async.kernels.funnel.verifier import under
    from kbrl_async.kernels.kernelbench.formats import problems_root
    from kbrl_async.kernels.kernelbench.runs import RunFolder, RunOptions

    verify = under(VerifyOptions(timing=args.timing, sanitize=args.sanitize), args.rules, args.outputs)
    options = RunOptions(args.backend, args.device, args.workers, args.overwrite, args.precision, verify)
    folder = RunFolder(args.run, problems_root(args.problems, os.environ), options)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(
            "verifying", total=len(folder.samples), completed=len(folder.samples) - len(folder.todo)
        )
        written = folder.verify(lambda _outcome: progress.advance(bar))
    failed = [outcome for outcome in written.outcomes if outcome.result is None]
    if args.json:
        print_json(_run_document(written))
    else:
        _show_run(written)
    return OUR_FAULT if failed else 0


def _run_document(written: VerificationEnd) -> dict[str, Any]:
    counts = Counter(o.result.fault.value if o.result else "no_verdict" for o in written.outcomes)
    return {"version": 1, "candidates": len(written.outcomes), "faults": dict(counts), "files": written.files}


def _show_run(written: VerificationEnd) -> None:
    rows = table(("level", "problem", "sample", "verdict", "speedup", "what"))
    for outcome in written.outcomes:
        result = outcome.result
        place = (str(outcome.level), str(outcome.problem), str(outcome.sample))
        if result is None:
            rows.add_row(*place, "no verdict", "", escape(outcome.error))
            continue
        timing = result.timing
        speedup = "" if timing is None else f"{timing.speedup:.2f}× ({timing.lo:.2f} … {timing.hi:.2f})"
        what = result.verdict.rule or result.verdict.message[:80]
        rows.add_row(*place, result.fault.value.replace("_", " "), speedup, escape(what))
    console = Console()
    console.print(rows)
    correct = sum(outcome.result is not None and outcome.result.ok for outcome in written.outcomes)
    say(f"{correct} of {len(written.outcomes)} are correct; written: {', '.join(written.files)}", console)
    for path in written.kept:
        say(f"{path} was there before and is unchanged; --overwrite replaces it", console)


def _failure(error: KbrlError) -> dict[str, Any]:
    return {
        "version": 1,
        "ok": False,
        "fault": "infra_error",
        "exit_code": OUR_FAULT,
        "error": {"kind": type(error).__name__, "cause": error.cause, "cure": error.cure},
    }
