"""`kbrl plan`, from measured stage times: how many of each process a wished throughput needs, and what a run costs.

With `--gpus`, before any run: what of a model fits (`fitting`).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kbrl_async.cli import fitting
from kbrl_async.cli.shared import add_old_run, add_run, print_json, run_of, say, table
from kbrl_async.errors import UserError
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems.split import HELDOUT
from kbrl_async.lab import cost
from kbrl_async.lab import plan as planning
from kbrl_async.lab.apart import with_verifiers
from kbrl_async.lab.cost import Bill, Machine
from kbrl_async.lab.plan import TARGET, AdmissionWindow, Capacity, RunObservation
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.config import Config, available_cores, environment, load, placement
from kbrl_async.runs.folder import LATEST, SUMMARY_FILE, load_run
from kbrl_async.runs.problems import problems_of
from kbrl_async.runs.telemetry.system_metrics import SystemSample, Tail
from protocols.messages import Stage
from protocols.records import Purpose

ENOUGH_UPDATES = 4
"""With fewer, half a run says nothing."""
EXAMPLES = """\
examples:
  kbrl plan                                what a run carried, what bounded it
  kbrl plan --rollouts-per-hour 100000     what five times the default run takes
  kbrl plan --rollouts-per-hour 20000 --model 7B
                                           generation and updates scaled by size
  kbrl plan --rollouts-per-hour 20000 \\
      --times generate=0.4,compile=1.1,bench=2.5,train=0.3
  kbrl plan default --verifiers            the same run's work, if verifiers did
                                           all of a bench's but the timing
  kbrl plan --price core=0.04              what the newest run has cost, and
                                           will; it may be running
  kbrl plan default --for configs/gpu.yaml --price H100=2.49 --gpu H100
                                           before that one is started
  kbrl plan --model Qwen2.5-7B --gpus 2 --gpu h200
                                           what fits, and settings for it

Formulas, and what to scale on: docs/capacity.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run(parser)
    add_old_run(parser)
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    add = parser.add_argument_group("how many processes, from a run or from --times").add_argument
    add("--rollouts-per-hour", type=float, metavar="N", help="scored answers an hour; default: what the run reached")
    add(
        "--times",
        metavar="STAGE=SECONDS",
        action="append",
        default=[],
        help="seconds of one sampler, core, bench or learner per rollout: they replace measured ones",
    )
    add(
        "--model",
        metavar="FOLDER|NAME",
        help="as many times as much for generation and updates as this model is larger, such as 7B; with --gpus: what"
        " must fit",
    )
    add("--verifiers", action="store_true", help="plan as if verifiers proved kernels right and benches only timed")
    add("--utilisation", type=float, default=TARGET, metavar="U", help=f"largest share of busy time ({TARGET})")
    add("--variability", type=float, default=1.0, metavar="C", help="of arrivals and times: 1 Poisson, more in bursts")
    add = parser.add_argument_group("what it costs").add_argument
    add("--for", dest="wanted", metavar="FILE", type=Path, help="say what a run of this configuration would cost")
    add("--price", metavar="NAME=PRICE", action="append", default=[], help="of an hour, beside cost.prices: H100=2.49")
    add("--gpu", metavar="NAME", default="", help="the GPUs' name, for prices and --gpus; default: this machine's")
    fitting.add_to(parser)


class PlanBasis(msgspec.Struct, frozen=True):
    """What a plan is made from."""

    source: str
    observed: RunObservation
    window: AdmissionWindow
    config: Config
    samples: list[SystemSample] = msgspec.field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    if args.gpus is not None:
        return fitting.run(args)
    times = parse_times(args.times)
    measured = _of_times(times) if times and _names_no_run(args) else _of_run(run_of(args))
    observed = _apart(args, measured).replaced(times)
    factor = 1.0
    if args.model is not None:
        factor = model_factor(args.model, measured)
        observed = observed.scaled({"generate": factor, "train": factor})
    wanted = args.rollouts_per_hour
    if wanted is None:
        wanted = _reached(measured)
    found = planning.plan(
        observed, wanted, target=args.utilisation, variability=args.variability, window=measured.window
    )
    bills = bills_of(args, measured, observed)
    if args.json:
        print_json({**_finite(found), "cost": msgspec.to_builtins(bills)})
        return 0
    show(measured, found, factor, Console())
    currency = _paid(args, measured).cost.currency
    for what, of in bills.items():
        say(f"{what}: {of.format(currency)}")
    if bills and all(of.money is None for of in bills.values()):
        say("in money: set cost.prices, or give --price gpu=2.49 or --price core=0.04, of an hour")
    return 0


def _apart(args: argparse.Namespace, measured: PlanBasis) -> RunObservation:
    """What was measured, with the work of verifiers apart where they are asked for and the run had none."""
    wanted = args.wanted is not None and _paid(args, measured).processes.verifier > 0
    observed = measured.observed
    if not args.verifiers and (not wanted or not measured.samples or observed.visits(Stage.VERIFY)):
        return observed
    if not measured.samples:
        raise UserError("--times says what each stage costs", "Give verify=SECONDS there, and leave --verifiers out")
    with ArchiveReader(Path(measured.source) / FILE) as archive:
        records = (archive.record(row.task_id) for row in archive.rows(purpose=Purpose.TRAIN))
        return with_verifiers(observed, (r.bench for r in records if r is not None and r.bench is not None))


def _paid(args: argparse.Namespace, measured: PlanBasis) -> Config:
    """The configuration of the run that is to be paid."""
    if args.wanted is not None:
        return load([args.wanted], (), environment(os.environ))
    return measured.config


def bills_of(args: argparse.Namespace, measured: PlanBasis, observed: RunObservation) -> dict[str, Bill]:
    """In words: before a run of `--for`; of a measured run what it has cost and, until it ends, will."""
    config = _paid(args, measured)
    machine = machine_of(config, args.gpu)
    prices = cost.prices(config, args.price)
    if args.wanted is not None:
        heldout = sum(problem.split == HELDOUT for problem in problems_of(config, config.levels))
        hours = cost.hours_of(config, observed, args.utilisation, heldout)
        return {f"cost of {args.wanted}, about": cost.bill(hours, machine, prices)}
    if not measured.samples:
        return {}
    bills = {"cost so far": cost.bill(cost.spent_hours(measured.samples), machine, prices)}
    has_ended = (Path(measured.source) / SUMMARY_FILE).is_file()
    if not has_ended and (left := cost.left_hours(config, measured.samples, observed)) > 0:
        bills["to its last update, about"] = cost.bill(left, machine, prices)
    return bills


def machine_of(config: Config, gpu: str) -> Machine:
    """What a run of it takes of this host."""
    gpus = placement.inventory(os.environ)
    on_gpu = config.device == "cuda" or (config.device == "auto" and runs_on_gpu(config.backend))
    count = placement.wanted(config) if config.placement is not None else int(on_gpu)
    name = gpu or (gpus[0].name if gpus else "")
    return Machine(count, name if count else "", len(available_cores()))


def parse_times(words: Sequence[str]) -> dict[str, float]:
    """`generate=0.5,bench=2` by stage.

    :raises UserError: a word that is none, or an unknown stage.
    """
    times: dict[str, float] = {}
    for part in filter(None, ",".join(words).split(",")):
        stage, _, number = part.partition("=")
        try:
            times[stage.strip()] = float(number)
        except ValueError:
            raise UserError(f"--times {part}: no number of seconds", "Write bench=2.5") from None
    planning.check_times(times)
    return times


def model_factor(model: str, measured: PlanBasis) -> float:
    """How many times as many parameters as the policy of the measured run has."""
    policies = sorted(Path(measured.source).glob("policies/policy-v*"), key=lambda path: path.stat().st_mtime)
    if not policies:
        raise UserError(
            f"{measured.source} holds no policy to compare {model} with",
            "Give the times of that model instead: --times generate=…,train=…",
        )
    return planning.count_parameters(model) / planning.count_parameters(str(policies[-1]))


def _names_no_run(args: argparse.Namespace) -> bool:
    return args.run_folder == LATEST and args.old_run is None


def _of_run(folder: Path) -> PlanBasis:
    samples, config = Tail(folder / "metrics" / "system.jsonl").new(), load_run(folder)
    return PlanBasis(str(folder), planning.observe(samples), _window(config), config, samples)


def _of_times(times: dict[str, float]) -> PlanBasis:
    config = Config()
    return PlanBasis(
        "--times", planning.observation_of(times, config.batch_size * config.group_size), _window(config), config
    )


def _window(config: Config) -> AdmissionWindow:
    return AdmissionWindow(config.max_staleness, config.batch_size, config.group_size)


def _reached(measured: PlanBasis) -> float:
    if not measured.samples:
        raise UserError("how much is wanted is not said", "Give --rollouts-per-hour N")
    return measured.observed.rollouts_per_hour


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────


def show(measured: PlanBasis, found: Capacity, factor: float, console: Console) -> None:
    lines = [f"measured: {measured.source}", *(check_lines(measured) if measured.samples else ())]
    if factor != 1.0:
        lines.append(
            f"model: {factor:.3g} × the parameters; generation and updates are taken to cost as many times as much"
        )
    say("\n".join([*lines, ""]), console)
    console.print(_table(found))
    say("\n".join(closing_lines(found)), console)


def check_lines(measured: PlanBasis) -> Iterator[str]:
    """What the formula says of the very run that was measured, beside what happened."""
    observed = measured.observed
    predicted, bottleneck = planning.carried(observed)
    actual = observed.rollouts_per_hour
    yield (
        f"check: {predicted:,.0f} rollouts an hour predicted for its own processes, {actual:,.0f} measured "
        f"({predicted / actual - 1:+.1%}); {bottleneck} is what bounds it"
    )
    if observed.updates < ENOUGH_UPDATES:
        return
    first, second = planning.halves(measured.samples)
    forecast, _ = planning.carried(first)
    yield (
        f"check: its first half predicts {forecast:,.0f} for its second, {second.rollouts_per_hour:,.0f} measured "
        f"({forecast / second.rollouts_per_hour - 1:+.1%}): times change as the policy learns"
    )


def closing_lines(found: Capacity) -> Iterator[str]:
    limit = found.bottleneck
    yield (
        f"bottleneck: {limit.name}, which would carry {_rate(limit.limit_per_hour)} an hour; "
        f"admission window {_rate(found.window_per_hour)}"
    )
    learner = next(resource for resource in found.resources if resource.stage == "train")
    yield f"learner: busy {learner.load:.0%} of the time"
    yield "so many: " + " ".join(f"{key}={count}" for key, count in found.settings.items())
    for problem in found.problems:
        yield f"not reachable: {problem}"


def _table(found: Capacity) -> Table:
    title = f"{found.rollouts_per_hour:,.0f} rollouts an hour, each stage busy at most {found.target:.0%}"
    numbers = ("number", "s per rollout", "busy", "wait in queue", "these carry")
    made = table(("", *numbers), title, right=numbers)
    for r in found.resources:
        wait = "∞" if math.isinf(r.wait_s) else f"{r.wait_s:.3f} s"
        rate = _rate(r.limit_per_hour)
        made.add_row(r.name, str(r.servers), f"{r.demand_s:.4f}", f"{r.utilisation:.0%}", wait, f"{rate}/h")
    return made


def _rate(rate: float) -> str:
    return "∞" if math.isinf(rate) else f"{rate:,.0f}"


def _finite(found: Capacity) -> dict[str, object]:
    """JSON has no infinity: null stands for it."""
    plain = msgspec.to_builtins(found)
    assert isinstance(plain, dict)
    return {**plain, "problems": found.problems}
