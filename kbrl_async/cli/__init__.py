"""The `kbrl` command.

Owns: arguments, what is printed, exit codes. Each command is one module of this package with `NAME`, `HELP`,
`add_arguments(parser)` and `run(args) -> exit code`; to add one, write the module and put it into `COMMANDS`.

Exit codes: 0 done · 1 the candidate of `kbrl verify` is wrong · 2 something asked for is wrong · 3 the host lacks
something · 4 the run can't go on · 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from kbrl_async.cli import (
    bench,
    chaos,
    compare,
    config,
    export,
    index,
    inspect,
    keys,
    logs,
    optimize,
    plan,
    prepare,
    problems,
    replay,
    report,
    summary,
    top,
    train,
    verify,
    worker,
)
from kbrl_async.cli import eval as evaluate
from kbrl_async.errors import KbrlError, UserError

EXAMPLES = """\
examples:
  kbrl train                                     the default run: a small policy, CPU kernels, about 5 minutes
  kbrl train max_steps=3 name=first-try          shorter, in runs/first-try
  kbrl train --config my.yaml learning_rate=1e-4 settings from a file, one of them replaced
  kbrl train --dry-run level=1,2                 show what would run, start nothing
  kbrl train resume=runs/default                 continue a run that was stopped
  kbrl top                                       watch the newest run: stages, workers, rates, errors
  kbrl logs -f --level warning                   what all its processes log, by time
  kbrl summary                                   the result of the newest run again
  kbrl report                                    the newest run as one HTML page
  kbrl compare one two --plot reward.svg         runs side by side
  kbrl eval default --samples 8 --heldout        what the newest policy of a run is worth
  kbrl optimize my_module.py                     the fastest proven kernel for a module of your own
  kbrl inspect g000012.r3                        one rollout: prompt, answer, reports, reward, advantage
  kbrl replay default                            a run's decisions and updates again, compared
  kbrl export default my-model                   the newest policy as a plain Hugging Face folder
  kbrl config                                    every key=value there is
  kbrl problems list                             what the policy is trained on
  kbrl index build runs/default --output index   worked examples for prompt.option=raicl
  kbrl verify --problem L1/13 --candidate my.py  build, check and time one kernel
  kbrl bench --aa                                what this host's bench can tell apart
  kbrl plan --rollouts-per-hour 100000           how many processes that takes, by a run's stage times
  kbrl chaos --train --random 20 --seed 1        twenty faults done to a run of its own, then its counters checked
  kbrl keys new all                              keys for a run that other hosts may join
  kbrl worker bench --connect tcp://host:5756 --keys host7
                                                 verify and time for a run on another host
"""


class Command(Protocol):
    """A module of this package."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    train,
    evaluate,
    optimize,
    prepare,
    top,
    logs,
    summary,
    report,
    compare,
    inspect,
    replay,
    export,
    config,
    problems,
    verify,
    index,
    bench,
    plan,
    keys,
    worker,
    chaos,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what went wrong is one line on stderr."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        code: int = args.command.run(args)
        sys.stdout.flush()
    except KbrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # who read our output (head, less) has had enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments with `command`, and `overrides` where the command takes settings, which may stand anywhere."""
    args, rest = _parser().parse_known_args(argv)
    if options := [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]:
        command = f"kbrl {args.command.NAME}"
        raise UserError(f"{command} has no argument {options[0]}", f"See '{command} --help'")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kbrl",
        description="Asynchronous reinforcement learning with verified rewards for GPU and CPU kernels.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser
