"""The `kbrl` command.

Owns: arguments, what is printed, exit codes. Each command is the module of this package of its name, with
`add_arguments(parser)` and `run(args) -> exit code`; to add one, write the module and put a line into `COMMANDS`. Only
the module of the command that is called is imported.

Exit codes: 0 done · 1 the candidate of `kbrl verify` is wrong · 2 something asked for is wrong · 3 the host lacks
something · 4 the run can't go on · 130 stopped.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

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

COMMANDS = {
    "train": "train a policy; continues the run of that name if it has not ended",
    "eval": "what a policy is worth: pass@k, fast_p and speedups of n verified answers a problem",
    "optimize": "the fastest proven kernel for a module of your own, as a file to import",
    "prepare": "make a run folder and point runs/latest at it, for services that are started by other means",
    "top": "watch a running system: stages, workers, rates, errors",
    "logs": "show the logs of all processes of a run by time",
    "summary": "print the result of a run",
    "report": "write a run as one self-contained HTML page",
    "compare": "put runs side by side",
    "inspect": "print a rollout: prompt, answer, each stage's report, reward, advantage",
    "replay": "make a run's decisions and updates again and compare, or take one batch through the loss again",
    "export": "write a policy as a plain Hugging Face folder",
    "config": "print every setting with its default and meaning",
    "problems": "list the problems of the suite or of a folder, or audit them",
    "verify": "build, check and time one candidate, or all of a KernelBench run folder",
    "index": "build or query an index of worked examples (prompt_option=raicl)",
    "bench": "time one kernel carefully, or report what this host's bench can tell apart",
    "plan": "how many processes a throughput needs, from a run's measured stage times",
    "keys": "make, list and revoke the keys of workers on other hosts",
    "worker": "join the broker of a run on another host: compile, time or sample for it",
    "chaos": "kill, stop, cut off, corrupt: faults by a plan, done to a run; then its counters are checked",
}
"""What `kbrl --help` says of each."""


class CommandModule(Protocol):
    """A module of this package."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what went wrong is one line on stderr."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        code = _module(args.command).run(args)
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
    """Arguments with the name of the `command`, and `overrides` where it takes settings, which may stand anywhere."""
    args, rest = _parser(argv).parse_known_args(argv)
    if options := [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]:
        command = f"kbrl {args.command}"
        raise UserError(f"{command} has no argument {options[0]}", f"See '{command} --help'")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _module(command: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(f"kbrl_async.cli.{command}"))


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """With the arguments of the command that is called, and of no other: each would import its module."""
    parser = argparse.ArgumentParser(
        prog="kbrl",
        description="Asynchronous reinforcement learning with verified rewards for GPU and CPU kernels.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    called = next((word for word in argv if not word.startswith("-")), "")
    for name, words in COMMANDS.items():
        sub = commands.add_parser(name, help=words, description=words)
        if name == called:
            _module(name).add_arguments(sub)
    return parser
