"""`kbrl bench`: the time of one candidate, as carefully as this host can; or the bench against itself.

Exit codes: 0 done · 1 the candidate is wrong, or `--aa` claimed more than 1 % of speedups that are not there ·
2 wrong usage · 3 our fault.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from kbrl_async.cli.shared import add_kernel, add_rules, judged, print_json, say, table
from kbrl_async.errors import UserError

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel import Result
    from kbrl_async.kernels.timing import Recipe
    from kbrl_async.kernels.timing.resolution import CaseRow, ResolutionReport
    from protocols.records import Timing

MAX_FALSE = 0.01
_TELL_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    one, self_test = parser.add_argument_group("one kernel"), parser.add_argument_group("the bench against itself")
    add_kernel(one)
    one.add_argument("--problems", metavar="DIR", default="", help="where ids are looked up; default: our suite")
    one.add_argument(
        "--baseline",
        action="append",
        default=[],
        choices=("compile", "compile-max-autotune"),
        help="also compare with torch.compile; takes a minute for the first time",
    )
    self_test.add_argument("--aa", action="store_true", help="a reference against itself, by kernel length")
    self_test.add_argument("--ab", action="store_true", help="the same slowed by 0.5 to 20 %%: is the truth inside?")
    self_test.add_argument("--pairs", type=int, default=100, help="A/A measurements in all, and A/B ones; default: 100")
    self_test.add_argument("--beside", action="store_true", help="other methods on the same kernels, in as much time")
    self_test.add_argument("--trials", metavar="FILE", type=Path, help="keep each measurement there, and go on from it")
    self_test.add_argument("--minutes", type=float, metavar="M", help="stop measuring after so long, and report")
    self_test.add_argument("--plot", metavar="FILE", type=Path, help="error by kernel length, as SVG")
    self_test.add_argument("--no-save", action="store_true", help="do not keep the report for later runs")
    parser.add_argument("--cap", type=float, metavar="S", help="seconds that one measurement may take")
    parser.add_argument(
        "--resolution",
        type=float,
        metavar="PERCENT",
        help="stop when the interval's half width is so small; default: 1, and 3 as in training for --aa and --ab",
    )
    parser.add_argument(
        "--pairs-a-place",
        type=int,
        metavar="N",
        help="on a GPU: other memory for both sides after N pairs; default: 4, and never, as in training, for --aa",
    )
    add_rules(parser)
    parser.add_argument("--core", type=int, help="pin to this core; default: the last one")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N; default: auto")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of tables")


def run(args: argparse.Namespace) -> int:
    _check_usage(args)
    return judged(lambda: _self_test(args) if args.aa or args.ab else _one(args))


def _check_usage(args: argparse.Namespace) -> None:
    tests_itself = args.aa or args.ab
    if tests_itself and (args.problem or args.candidate):
        raise UserError("--aa and --ab test the bench itself", "Leave out --problem and --candidate")
    if not tests_itself and not (args.problem and args.candidate):
        raise UserError("kbrl bench needs --problem and --candidate, or --aa", "See 'kbrl bench --help'")
    asked = (args.cap, args.resolution, args.minutes)
    if args.pairs < 1 or (args.pairs_a_place or 0) < 0 or any(value is not None and value <= 0 for value in asked):
        cure = "Give --pairs 1 or more, and --cap, --resolution and --minutes above 0"
        raise UserError("nothing would be measured", cure)


# ── one kernel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _one(args: argparse.Namespace) -> int:
    from kbrl_async.kernels.funnel.careful import Careful, bench

    candidate = sys.stdin.read() + "\n" if args.candidate == "-" else Path(args.candidate)
    careful = Careful(
        cap_s=args.cap or Careful().cap_s,
        resolution=args.resolution / 100 if args.resolution else Careful().resolution,
        pairs_a_place=args.pairs_a_place,
        core=args.core,
    )
    with Console(stderr=True).status(f"timing {args.candidate} against {args.problem} …"):
        result = bench(
            args.problem,
            candidate,
            args.backend,
            device=args.device,
            problems=args.problems,
            baselines=args.baseline,
            careful=careful,
            rules=args.rules,
            outputs=args.outputs,
        )
    _tell_one(args, result)
    return result.exit_code


def _tell_one(args: argparse.Namespace, result: Result) -> None:
    if args.json:
        print_json(result.document())
        return
    from kbrl_async.cli.verify import show

    console = Console()
    show(result, console)
    lines = timing_lines(result.timing) if result.timing is not None else []
    for line in [*lines, *(f"no baseline {name}: {why}" for name, why in result.missing_baselines.items())]:
        say(line, console)


def timing_lines(timing: Timing) -> list[str]:
    """What a reward rests on, in words."""
    roof = "" if timing.roofline is None else f"; {100 * timing.roofline:.0f} % of the roofline"
    lines = [
        f"{timing.candidate_ms:.4f} ms against {timing.reference_ms:.4f} ms{roof}",
        f"{timing.n} pairs in {timing.spent_s:.2f} s, {timing.rejected} set aside; stopped: {timing.stopped}; "
        f"load by others {timing.load or 0:.2f}; widened by ±{100 * timing.resolution:.2f} %",
    ]
    for name, (speedup, lo, hi) in timing.baselines.items():
        lines.append(f"over {name}: {speedup:.3f}× ({lo:.3f} … {hi:.3f})")
    return lines


def _as_asked(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    if args.pairs_a_place is not None:
        recipe = msgspec.structs.replace(recipe, pairs_a_place=args.pairs_a_place)
    return msgspec.structs.replace(recipe, resolution=args.resolution / 100) if args.resolution else recipe


# ── the bench against itself ────────────────────────────────────────────────────────────────────────────────────────


def _self_test(args: argparse.Namespace) -> int:
    from kbrl_async.kernels.timing import resolution
    from kbrl_async.lab import self_test

    console = Console(stderr=args.json)
    report = measured_report(args, Console(stderr=True))
    path = resolution.cache_folder() / resolution.file_name(report.hardware)
    is_kept = bool(report.rows) and not args.no_save and report.is_quiet
    if is_kept:
        resolution.save(report, path)
    if args.plot:
        args.plot.write_text(self_test.svg(report))
    show_report(report, console)
    if args.json:
        print_json(report)
    if is_kept:
        say(f"kept in {path}: timings on this host are widened by it", console)
    elif report.rows and not report.is_quiet:
        say("not kept: others loaded this host, and their noise hides what was looked for", console)
    return 1 if report.false_faster > MAX_FALSE else 0


@contextmanager
def status_line(console: Console) -> Iterator[Callable[[str], None]]:
    """Progress: a line that changes on a terminal, else a new line every ten seconds."""
    if console.is_terminal:
        with console.status("starting …") as status:
            yield status.update
        return
    last = -math.inf

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            say(text, console)

    yield tell


def measured_report(args: argparse.Namespace, console: Console) -> ResolutionReport:
    from kbrl_async.kernels.funnel.careful import bench_cores
    from kbrl_async.kernels.funnel.verifier import check_device, choose_device, default_bench
    from kbrl_async.kernels.settings import TimingBench
    from kbrl_async.kernels.timing import Recipe
    from kbrl_async.lab.self_test import SelfTest, measure

    device = choose_device("c" if args.device == "auto" else "", args.device)
    # What no sampling removes is what is being measured here: nothing may widen the intervals.
    settings = TimingBench()
    if args.cap:
        longer = max(settings.max_pairs, int(400 * args.cap))
        settings = msgspec.structs.replace(settings, cap_s=args.cap, max_pairs=longer)
    recipe = _as_asked(Recipe.of(settings, placement=0.0), args)
    options = msgspec.structs.replace(
        default_bench(bench_cores(device, args.core), recipe), device=device, references=16, reference_bytes=1 << 34
    )
    check_device(device)
    asked = SelfTest(args.aa, args.ab, args.pairs, args.beside, args.trials, args.minutes)
    with status_line(console) as tell:
        return measure(asked, options, tell)


def show_report(report: ResolutionReport, console: Console) -> None:
    if report.rows:
        console.print(_rows_table("A/A: a reference against itself", report.rows))
        runs = sum(row.runs for row in report.rows)
        console.print(f"speedups claimed that are not there: {100 * report.false_faster:.2f} % of {runs}")
    if any(row.methods for row in report.rows):
        console.print(_others_table(report.rows))
    if report.truths:
        console.print(_rows_table("A/B: the same, slowed by a known amount", report.truths))
    clocks = report.clocks
    if clocks:
        console.print(f"clock {clocks['min']:.0f} … {clocks['median']:.0f} … {clocks['max']:.0f} MHz", end="; ")
    say(f"throttled: {', '.join(report.throttle) or 'never'}; load by others {report.load:.2f}", console)


def _rows_table(title: str, rows: list[CaseRow]) -> Table:
    """`±`: what no sampling removes, by which intervals are widened; `inside`: how often the truth was."""
    numbers = ("ms", "runs", "± %", "false + %", "false − %", "inside %", "worst %", "pairs", "s")
    made = _narrow(title, numbers)
    for row in rows:
        shares = (row.share, row.false_faster, row.false_slower, row.covered, row.worst_error)
        values = (f"{100 * share:.2f}" for share in shares)
        made.add_row(row.case, f"{row.ms:.4f}", str(row.runs), *values, f"{row.median_n:.0f}", f"{row.seconds:.3f}")
    return made


def _others_table(rows: list[CaseRow]) -> Table:
    names = sorted({name for row in rows for name in row.methods})
    made = _narrow("worst error of other methods on the same, in %", ("this bench", *names))
    for row in rows:
        found = (row.worst_error, *(row.methods.get(name) for name in names))
        made.add_row(row.case, *("" if value is None else f"{100 * value:.2f}" for value in found))
    return made


def _narrow(title: str, numbers: Sequence[str]) -> Table:
    """So many columns have room where nothing stands between them."""
    made = table(("kernel", *numbers), title, right=numbers)
    made.padding = (0, 0, 0, 0)
    for column in made.columns:
        column.no_wrap = True
    return made
