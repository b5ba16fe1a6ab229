"""`rounds`: training runs one after the other, each from what the ones before it found; see configs/fusion_rounds.yaml.

::

    files < variables < the round's own words < the command line ─▶ NAME-1 ─▶ NAME-2 ─▶ …      (each a run as any other)

Invariants
* A round begins when the one before it has ended. One that has ended is not run again, one that was stopped goes on.
* A round starts from the newest policy of the round before, unless it names a model; `{first}` is that of the first
  round, `{previous}` the folder of the round before.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from kbrl_async.cli.shared import process_overrides, say
from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import Config, config_hash, environment, load
from kbrl_async.runs.folder import is_finished, load_run

FIRST, PREVIOUS = "{first}", "{previous}"
MODEL = "model_name="


def run_rounds(args: argparse.Namespace, config: Config, train: Callable[[Config], int]) -> int:
    """`train` runs one configuration and gives its exit code; 0 of all rounds is 0.

    :raises ConfigError: a round's words are no settings, or a run of its name is another experiment.
    """
    check(args, config)
    previous = ""
    for number in range(1, len(config.rounds) + 1):
        wanted = config_of(args, config, number, previous)
        folder = Path(wanted.log_path) / str(wanted.name)
        if is_finished(folder):
            if config_hash(load_run(folder)) != config_hash(wanted):
                raise ConfigError(f"{folder} has ended, and was another experiment", "Start under another name=…")
            say(f"round {number} of {len(config.rounds)} has ended already: {folder}")
        else:
            say(f"round {number} of {len(config.rounds)}: {config.rounds[number - 1]}")
            if code := train(wanted):
                return code
        previous = str(folder)
    names = " ".join(str(Path(config.log_path) / f"{config.run_name}-{n + 1}") for n in range(len(config.rounds)))
    say(f"all rounds have ended; side by side: 'kbrl compare {names}'")
    return 0


def check(args: argparse.Namespace, config: Config) -> None:
    """That the words of every round are settings, before the first one begins."""
    for number in range(1, len(config.rounds) + 1):
        config_of(args, config, number, "")


def config_of(args: argparse.Namespace, config: Config, number: int, previous: str) -> Config:
    """Of the round of this number, from 1; `previous`: the folder of the one before, empty where it is not there."""
    words = shlex.split(config.rounds[number - 1])
    names_model = any(word.startswith(MODEL) for word in words)
    given = list(args.overrides)
    if number > 1 and names_model:  # the command line's model is the first round's
        given = [word for word in given if not word.startswith(MODEL)]
    starts = [f"{MODEL}{previous}"] if previous and not names_model else []
    filled = [word.replace(FIRST, config.model_name).replace(PREVIOUS, previous) for word in words]
    ours = [*process_overrides(args.processes), *starts, "rounds=[]", f"name={config.run_name}-{number}"]
    return load(args.config, [*filled, *given, *ours], environment(os.environ))
