"""The `kbrl` command.

Owns: arguments, what is printed, exit codes. Each command is the module of this package of its name, with
`add_arguments(parser)` and `run(args) -> exit code`; to add one, write the module and put an entry into `COMMANDS`.
Only the module of the command that is called is imported.

Exit codes: 0 done · 1 the candidate of `kbrl verify` is wrong · 2 something asked for is wrong · 3 the host lacks
something · 4 the run can't go on · 130 stopped.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from kbrl_async.errors import HostError, KbrlError, UserError

EXAMPLES = """\
examples:
  kbrl train                          the default run: small policy, CPU kernels
  kbrl train max_steps=3 name=short   shorter, in runs/short
  kbrl train resume=runs/default      continue a run that was stopped
  kbrl top                            watch the newest run
  kbrl summary                        its result
  kbrl eval default --heldout         what its newest policy is worth
  kbrl verify --problem L1/13 --candidate my.py
                                      build, check and time one kernel
  kbrl optimize my_module.py          the fastest proven kernel for your module

RUN is a folder or a name in runs/; left out, it is the newest run. Settings are
key=value, after those of --config FILE and of KBRL_* variables (also in .env).
'kbrl COMMAND --help' has an example of each and says how long it takes;
'kbrl completion bash' (zsh, fish) prints what completes words on Tab.

exit codes: 0 done, 1 the candidate is wrong, 2 something asked for is wrong,
3 the host lacks something, 4 the run can't go on, 130 stopped
"""


class Command(NamedTuple):
    """What help says of a command."""

    group: str
    does: str
    example: str
    takes: str
    """How long it takes, on two cores."""


TRAIN, LOOK, KERNELS, SETUP = "train and evaluate", "look at runs", "kernels and problems", "set up and scale out"
COMMANDS = {
    "train": Command(
        TRAIN,
        "train a policy; continues the run of that name if it has not ended",
        "kbrl train max_steps=3 name=short",
        "the default run five minutes; the first one a minute and a half more",
    ),
    "eval": Command(
        TRAIN,
        "what a policy is worth: pass@k, fast_p, speedups over n answers",
        "kbrl eval default --samples 8 --heldout",
        "about a second an answer of the small policy",
    ),
    "distill": Command(
        TRAIN,
        "proven answers to training problems, as a file for method=sft",
        "kbrl distill default --samples 8",
        "as long as 'kbrl eval' for as many answers; --from: a second",
    ),
    "optimize": Command(
        TRAIN,
        "the fastest proven kernel for a module of your own, as a file",
        "kbrl optimize my_module.py --policy runs/default",
        "a minute of search (--seconds), and half a minute around it",
    ),
    "export": Command(
        TRAIN,
        "write a policy as a Hugging Face folder, or verdicts as a data set",
        "kbrl export default my-model",
        "seconds for the small policy; a minute for 7 billion parameters",
    ),
    "runs": Command(
        LOOK,
        "list the runs: how each stands, and what came of it",
        "kbrl runs",
        "a second",
    ),
    "top": Command(
        LOOK,
        "watch a running system: stages, workers, rates, errors",
        "kbrl top",
        "until Ctrl-C; --once: a second",
    ),
    "logs": Command(
        LOOK,
        "show the logs of all processes of a run by time",
        "kbrl logs -f --level warning",
        "a second; -f: until the run ends",
    ),
    "summary": Command(
        LOOK,
        "print the result of a run",
        "kbrl summary default",
        "a second",
    ),
    "report": Command(
        LOOK,
        "write a run as one self-contained HTML page",
        "kbrl report default --open",
        "seconds; half a minute for a day's run",
    ),
    "compare": Command(
        LOOK,
        "put runs side by side",
        "kbrl compare one two --output compared.html",
        "seconds",
    ),
    "inspect": Command(
        LOOK,
        "print a rollout: prompt, answer, each check, reward, advantage",
        "kbrl inspect default g000012.r3",
        "a second",
    ),
    "replay": Command(
        LOOK,
        "make a run's decisions and updates again and compare",
        "kbrl replay default",
        "about as long as the run's updates took; --no-train: seconds",
    ),
    "verify": Command(
        KERNELS,
        "build, check and time one candidate, or a KernelBench run folder",
        "kbrl verify --problem L1/13 --candidate my.py",
        "some ten seconds, most of them for starting",
    ),
    "bench": Command(
        KERNELS,
        "time one kernel carefully, or say what this bench can tell apart",
        "kbrl bench --problem L1/13 --candidate my.py",
        "some twenty seconds; --aa: minutes (--minutes)",
    ),
    "profile": Command(
        KERNELS,
        "what limits a kernel: roofline, loops, counters, where time goes",
        "kbrl profile --problem L1/13 --candidate my.py",
        "some fifteen seconds",
    ),
    "problems": Command(
        KERNELS,
        "list the problems of the suite or of a folder, or audit them",
        "kbrl problems list --level 1",
        "list: a second; audit: seconds a problem",
    ),
    "index": Command(
        KERNELS,
        "build or query an index of worked examples (prompt.option=raicl)",
        "kbrl index build runs/default --output index",
        "build: a minute for ten thousand examples; query: seconds",
    ),
    "mcp": Command(
        KERNELS,
        "the verifier as tools for coding agents (Model Context Protocol)",
        "kbrl mcp --http 8765",
        "until the client goes, or Ctrl-C",
    ),
    "serve": Command(
        SETUP,
        "the verifier over HTTP, for other trainers, agents and tools",
        "kbrl serve --port 8470",
        "until Ctrl-C; ready after some seconds",
    ),
    "config": Command(
        SETUP,
        "print every setting, or one with its value and where it was set",
        "kbrl config max_staleness",
        "a second",
    ),
    "prepare": Command(
        SETUP,
        "make a run folder, for services that are started by other means",
        "kbrl prepare name=long max_steps=1000",
        "a second",
    ),
    "worker": Command(
        SETUP,
        "join the broker of a run on another host: compile, time or sample",
        "kbrl worker bench --connect tcp://host:5756 --keys host7",
        "as long as the run",
    ),
    "keys": Command(
        SETUP,
        "make, list and revoke the keys of workers on other hosts",
        "kbrl keys new all",
        "a second",
    ),
    "plan": Command(
        SETUP,
        "processes for a throughput, what a run costs, where a model fits",
        "kbrl plan default --rollouts-per-hour 100000",
        "a second",
    ),
    "rehearse": Command(
        SETUP,
        "a run at a model's real shape: random weights, given answers",
        "kbrl rehearse --model Qwen2.5-0.5B --length 600:1.5",
        "a minute and a few updates (max_steps); making large weights takes more",
    ),
    "chaos": Command(
        SETUP,
        "do faults to a run by a plan, then check its counters",
        "kbrl chaos --train --random 20 --seed 1",
        "as long as the run; about 4 seconds a fault",
    ),
    "completion": Command(
        SETUP,
        "print what makes a shell complete commands, runs and settings",
        'eval "$(kbrl completion bash)"',
        "a second; afterwards, half a second a Tab",
    ),
}


class CommandModule(Protocol):
    """A module of this package."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what went wrong is one line on stderr."""
    atexit.register(gc.freeze)  # Python's exit looks through all objects, with torch for a second: Ctrl-C waits for it
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        _read_dotenv()
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
    except Exception as error:  # supervisor: what the host refuses, and what may be a mistake of ours
        print(f"error: {_refused_by_host(error) or _mistaken(error)}", file=sys.stderr)
        return HostError.exit_code
    return code


def _refused_by_host(error: Exception) -> str:
    """A full disk, a folder that we may not write, a program that we may not run; empty for what may be a mistake."""
    from kbrl_async.durable import wants_room

    if wants_room(error):
        return f"no space left: {error}. Free some"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return f"{error.filename or 'this host'}: {error.strerror}. Go where you may do that, or change who may"
    return ""


def _mistaken(error: Exception) -> str:
    """What no command expects: one line, which says where its traceback is."""
    import tempfile
    import traceback

    said = " ".join(str(error).split())[:200]
    with tempfile.NamedTemporaryFile("w", prefix="kbrl-error-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"unexpected {type(error).__name__}: {said}. Please report it with {file.name}, its traceback"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments with the name of the `command`, and `overrides` where it takes settings, which may stand anywhere."""
    if COMPLETING in os.environ:
        _complete()
    called = next((word for word in argv if not word.startswith("-")), "")
    if called and called not in COMMANDS:
        raise UserError(f"there is no command {called}", _nearest(called))
    parser = _parser(called)
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    args, rest = parser.parse_known_args(argv)
    if options := [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]:
        command = f"kbrl {args.command}"
        raise UserError(f"{command} has no argument {options[0]}", f"See '{command} --help'")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _nearest(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, 1)
    return f"Did you mean 'kbrl {near[0]}'?" if near else "'kbrl --help' lists the commands"


def _module(command: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(f"kbrl_async.cli.{command}"))


def _parser(called: str) -> argparse.ArgumentParser:
    """With the arguments of the command that is called, and of no other: each would import its module."""
    parser = argparse.ArgumentParser(
        prog="kbrl",
        usage="kbrl [-h] [--version] COMMAND …",
        description="Asynchronous reinforcement learning of policies that write verified kernels.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(
        metavar="COMMAND", required=True, dest="command", prog="kbrl", help=argparse.SUPPRESS
    )
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            description=f"{command.does}\n\nexample: {command.example}\ntakes:   {command.takes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == called:
            _module(name).add_arguments(sub)
    return parser


def _overview() -> str:
    """All commands by group, then examples."""
    lines = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        lines += [f"  {name:<11} {command.does}" for name, command in COMMANDS.items() if command.group == group]
        lines.append("")
    return "\n".join([*lines, EXAMPLES])


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version  # takes a while, and nothing else asks

        print(f"kbrl {version('kbrl-async')}")
        parser.exit()


COMPLETING = "_ARGCOMPLETE"
"""Variable by which the shell asks for completions in place of a command, see `completion`."""


def _complete() -> None:
    """Answer the shell, and end."""
    argcomplete: Any = importlib.import_module("argcomplete")
    words = os.environ.get("COMP_LINE", "").split()
    parser = _parser(words[1] if len(words) > 1 and words[1] in COMMANDS else "")
    argcomplete.autocomplete(parser)


def _read_dotenv() -> None:
    """Variables of `.env` for this process and those that it starts, such as a provider's key; the shell's win.

    Those of `KBRL_*` are settings, which are read where settings are.
    """
    if not os.path.isfile(".env"):
        return
    from dotenv import dotenv_values

    for name, value in dotenv_values(".env").items():
        if value is not None and not name.startswith("KBRL_"):
            os.environ.setdefault(name, value)
