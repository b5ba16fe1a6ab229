"""`kbrl rehearse`: a run at a model's real shape with random weights and given answers, and where its time went.

::

    config.json ─▶ folder: random weights, tokenizer ─┐
    demonstrations, lengths ─▶ answers.json ──────────┴─▶ the processes of `kbrl train` ─▶ findings
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from kbrl_async.cli import preflight
from kbrl_async.cli.launch import gave_up, start_and_wait, undone_at_signals
from kbrl_async.cli.plan import machine_of
from kbrl_async.cli.shared import add_settings, gathered, print_json, say, table
from kbrl_async.durable import write_atomically
from kbrl_async.errors import CheckpointError, HostError, UserError
from kbrl_async.lab import cost
from kbrl_async.lab.rehearsal import answers
from kbrl_async.lab.rehearsal import model as random_model
from kbrl_async.lab.rehearsal.findings import COUNTED, RehearsalFindings, find
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.config import Config, placement, process_counts
from kbrl_async.runs.config.loading import resolve
from kbrl_async.runs.config.sources import Setting
from kbrl_async.runs.folder import is_finished, plan, prepare, settle_latest
from kbrl_async.runs.origins import cache_folder
from kbrl_async.runs.problems import problems_of
from kbrl_async.runs.sizing import layout
from kbrl_async.runs.telemetry.system_metrics import written as lines_of
from kbrl_async.sampling.forced import Script
from kbrl_async.shapes import CONFIG, parse_shape

EXAMPLES = """\
examples:
  kbrl rehearse --model Qwen2.5-0.5B --length 600:1.5
  kbrl rehearse --model ./my-model --config model.yaml max_steps=20
                                           a folder that holds a config.json
  kbrl rehearse --model Qwen2.5-7B --length 4000:1.6 --price H200=3.2 \\
      sampler.engine=vllm

What is real, what is not, and how to read it: docs/howto-model.md"""
DEFAULTS = {
    "name": "rehearsal",
    "lora_rank": 32,
    "max_steps": 5,
    "max_minutes": None,
    "eval_samples": 0,
    "learning_rate": 2e-7,  # at 1e-6 random weights leave those of two versions before behind in a dozen updates
}
"""Below everything that is set."""
ON_GPU = {"backend": "cuda-nvrtc", "device": "cuda", "placement": "one_gpu"}
LEAST_TOKENS = 1024
"""Of max_tokens, where nobody sets it: answers of the suite are a few hundred long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--model",
        metavar="FOLDER|NAME",
        required=True,
        help="a folder with config.json, or a public model",
    )
    add(
        "--length",
        metavar="MEDIAN:SPREAD",
        default="0",
        help="tokens of an answer; five in six are shorter than MEDIAN × SPREAD; default: as long as the kernel is",
    )
    add("--right", type=float, default=0.75, metavar="SHARE", help="of the answers that are right (.75)")
    add("--answers", metavar="FILE", type=Path, help="answers of your own, a JSON line each: problem, answer")
    add("--price", metavar="NAME=PRICE", action="append", default=[], help="of an hour, beside cost.prices: H100=2.49")
    add("--keep", action="store_true", help="leave the random weights in cache_path, for the next one of this name")
    add("--json", action="store_true", help="the findings as JSON")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    median, spread = length_of(args.length)
    gpus = placement.inventory(os.environ)
    config = settings_of(args, median, spread, on_gpu=bool(gpus))
    folder = Path(config.model_name)
    script = script_of(config, args, median, spread)
    random_model.describe(args.model, folder, (text for some in script.answers.values() for text in some))
    write_atomically(Path(str(config.sampler.forced)), msgspec.json.encode(script).decode())
    todo = plan(config)
    preflight.check(todo)
    on_gpu = bool(gpus) and config.device != "cpu"
    try:
        with undone_at_signals():
            fill(folder, "cuda" if on_gpu else "cpu")
        prepared = prepare(config)
        say(f"rehearsing in {prepared.path}: answers are given, weights random")
        ended = start_and_wait(prepared.path, process_counts(config))
        settle_latest(prepared.path)
    finally:
        if not args.keep:
            for path in random_model.weights_of(folder):
                path.unlink()
    report_findings(prepared.path, config, args)
    if not is_finished(prepared.path) and not ended.interrupted:
        raise gave_up(ended, "rehearsal", f"Read its last lines above and in {prepared.path / 'logs'}")
    return ended.code if ended.interrupted else 0


def report_findings(run_dir: Path, config: Config, args: argparse.Namespace) -> None:
    """What was found, also of a rehearsal that was stopped or broke off."""
    try:
        found = findings_of(run_dir, config, args.model)
    except (CheckpointError, UserError) as nothing:
        say(f"nothing to tell: {nothing.cause}")
        return
    if args.json:
        print_json(found)
    else:
        show(found, config, args)


def length_of(text: str) -> tuple[float, float]:
    """
    :raises UserError: no `MEDIAN:SPREAD`.
    """
    median, _, spread = text.partition(":")
    try:
        found = float(median), float(spread or 1.0)
    except ValueError:
        found = -1.0, 0.0
    if not 0 <= found[0] < float("inf") or not 1 <= found[1] < float("inf"):
        raise UserError(f"--length {text} is no length", "Write MEDIAN:SPREAD, such as 2000:1.5; a spread is 1 or more")
    return found


def settings_of(args: argparse.Namespace, median: float, spread: float, *, on_gpu: bool) -> Config:
    """The run's configuration: defaults of a rehearsal < files and words < what makes it one."""
    lowest = {**DEFAULTS, **(ON_GPU if on_gpu else {})}
    lowest["max_tokens"] = max(LEAST_TOKENS, round(median * spread * spread))
    below = [Setting(key, value, "rehearsal") for key, value in lowest.items()]
    first = resolve([*below, *gathered(args)])
    if first.mode == "agents" or first.method == "sft":
        raise UserError("a rehearsal needs rollouts of one role", "Leave mode=agents and method=sft out")
    place = cache_folder(first).absolute() / "rehearsals" / first.run_name
    own = {"model_name": str(place / "model"), "sampler.forced": str(place / "answers.json"), "temperature": 1.0}
    return resolve([*below, *gathered(args), *(Setting(key, value, "rehearsal") for key, value in own.items())])


def script_of(config: Config, args: argparse.Namespace, median: float, spread: float) -> Script:
    if not 0 <= args.right <= 1:
        raise UserError(f"--right {args.right:g} is no share", "Give 0 to 1")
    problems = problems_of(config, config.levels)
    if args.answers is not None:
        said = answers.read(args.answers, problems)
    else:
        said = answers.written(problems, config.backend, args.right, config.seed)
    return Script(said, config.seed, median, spread)


def fill(folder: Path, device: str) -> None:
    """Random weights, made by a process that gives its memory back.

    :raises HostError: it could not.
    """
    shape = parse_shape(folder / CONFIG)
    if random_model.is_filled(folder):
        say(f"random weights of {shape.parameters / 1e9:.2f} billion are there already")
        return
    size = shape.parameters * (4 if device == "cpu" else 2)
    preflight.check_room(folder, size, "the random model", "or set cache_path=… to another disk")
    say(f"making random weights: {shape.parameters / 1e9:.2f} billion, {size / 1e9:.1f} GB")
    command = [sys.executable, "-m", random_model.__name__, str(folder), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        cure = "Does this transformers know the model, and is there room on the device and the disk?"
        raise HostError(f"the weights could not be made: {why(done)}", cure)


def why(done: subprocess.CompletedProcess[str]) -> str:
    """The line of its traceback that names the exception: what follows there is advice of a library."""
    lines = done.stderr.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return next(iter(named[-1:] or lines[-1:]), f"exit code {done.returncode}")[:300]


def findings_of(run_dir: Path, config: Config, model: str) -> RehearsalFindings:
    gpus = placement.inventory(os.environ) if config.device != "cpu" else []
    capacity = min(gpu.memory_gib for gpu in gpus) * 2**30 if gpus else None
    shape = parse_shape(Path(config.model_name) / CONFIG)
    with ArchiveReader(run_dir / FILE) as archive:
        updates, rows = archive.updates(), list(archive.rows(purpose="train"))
    samples = list(lines_of(run_dir / "metrics" / "system.jsonl"))
    return find(config, samples, updates, rows, layout.tenants(config, shape, capacity))


def show(found: RehearsalFindings, config: Config, args: argparse.Namespace) -> None:
    console = Console()
    say(
        f"\n{args.model}: {found.updates} updates in {found.seconds:.0f} s, {found.answers} answers of "
        f"{found.tokens_median:.0f} tokens (median), {found.correct:.0%} right",
        console,
    )
    made = table(("process", "busy", "cores", "GPU busy", "GPU used, GB", "tokens/s"), "Where time went",
                 ("busy", "cores", "GPU busy", "GPU used, GB", "tokens/s"))  # fmt: skip
    for p in found.processes:
        of_gpu = (f"{p.gpu:.0%}", f"{p.gpu_gb:.1f}") if p.gpu >= 0 else ("–", "–")
        rate = f"{p.tokens_per_s:,.0f}" if p.tokens_per_s else "–"
        made.add_row(p.name, f"{p.busy:.0%}", f"{p.cores:.2f}", *of_gpu, rate)
    console.print(made)
    say("\n".join(_lines(found, config, args)), console)


def _lines(found: RehearsalFindings, config: Config, args: argparse.Namespace) -> list[str]:
    predicted = ", ".join(
        f"{name} {'at least ' if name.startswith(layout.BENCHES) else ''}{size:.1f}"
        for name, size in found.predicted_gb.items()
    )
    machine = machine_of(config, "")
    bill = cost.bill(found.hours, machine, cost.prices(config, args.price))
    began = [f"{what} after {s:.0f} s" for what, s in
             (("first answer", found.first_answer_s), ("first update", found.first_update_s)) if s >= 0]  # fmt: skip
    if not found.updates:
        return [", ".join([*began, "no update yet: nothing can be said of one"])]
    return [
        ", ".join(began),
        f"an update: {found.update_s:.1f} s of the learner, {found.learner_tokens_per_s:,.0f} tokens/s in its passes, "
        f"MFU {found.mfu:.3f}",
        f"memory: the learner's peak was {found.learner_gb:.2f} GB; predicted, GB: {predicted}",
        f"bottleneck: {found.bottleneck}",
        *(f"change {line}" for line in found.changes),
        f"{COUNTED} updates: {bill.format(config.cost.currency)}",
    ]
