"""`kbrl train`: resolve, check, prepare the run folder, start all processes, show how it ended.

Nothing is written before every check has passed; a run that ends early can be continued.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kbrl_async.cli import preflight, summary
from kbrl_async.cli.launch import ProcessesEnded, gave_up, start_and_wait
from kbrl_async.cli.rounds import check as check_rounds
from kbrl_async.cli.rounds import config_of, run_rounds
from kbrl_async.cli.shared import add_settings, resolve
from kbrl_async.errors import UserError
from kbrl_async.runs.config import Config, available_cores, config_hash, cpu_layout, placement, process_counts, to_yaml
from kbrl_async.runs.folder import Run, is_finished, plan, prepare, settle_latest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print what was resolved, start nothing"
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    if config.evaluation.policy is not None:
        raise UserError(f"{config.resume or 'this'} is an evaluation", "Go on with the same 'kbrl eval' command")
    if config.rounds and not args.dry_run:
        return run_rounds(args, config, train)
    if config.rounds:
        check_rounds(args, config)
        config = config_of(args, config, 1, "")
    if args.dry_run:
        todo = plan(config)
        preflight.check(todo)
        print(describe(todo))
        return 0
    return train(config)


def train(config: Config) -> int:
    """One run, from its folder to its result."""
    preflight.check(plan(config))
    run = prepare(config)
    doing = "continuing" if run.resumed else "starting"
    print(f"{doing} {run.path}; Ctrl-C stops it, the same command continues it", flush=True)
    try:
        ended = start_and_wait(run.path, process_counts(run.config))
    finally:
        settle_latest(run.path)
    return conclude(run.path, ended)


def conclude(run_dir: Path, ended: ProcessesEnded) -> int:
    """Print the result, or why there is none.

    :raises RunError: a service gave up.
    """
    if is_finished(run_dir):
        summary.show(run_dir)
        print(f"everything is in {run_dir}; see it with 'kbrl report {run_dir}' or 'tensorboard --logdir {run_dir}'")
        return 0
    again = f"continue with 'kbrl train resume={run_dir}'"
    if ended.interrupted:
        print(f"stopped; {again}", file=sys.stderr)
        return ended.code
    raise gave_up(ended, "run", f"Read its last lines above and in {run_dir / 'logs'}, then {again}")


def describe(todo: Run) -> str:
    """The resolved configuration with, as comments, what follows from it."""
    layout = cpu_layout(todo.config, available_cores())
    processes = ", ".join(f"{name} × {count}" for name, count in process_counts(todo.config).items())
    cores = f"bench {layout.bench}, compile {layout.compile}, sampler {layout.sampler}, learner {layout.learner}"
    facts = {
        "run folder": f"{todo.path} ({'continued' if todo.resumed else 'new'})",
        "experiment": config_hash(todo.config),
        "processes": processes,
        "cores": cores,
        "GPUs": ", ".join(f"{name} {gpus}" for name, gpus in placement.ranges(todo.config).items()),
    }
    comments = "".join(f"# {name}: {fact}\n" for name, fact in facts.items() if fact)
    return comments + to_yaml(todo.config).rstrip()
