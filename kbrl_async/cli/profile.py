"""`kbrl profile`: what limits a correct kernel, as a text that a model's prompt has room for.

Exit codes as those of `kbrl verify`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from kbrl_async.cli.shared import add_kernel, judged, print_json, say
from kbrl_async.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel(parser.add_argument_group("the kernel"))
    parser.add_argument("--problems", metavar="DIR", default="", help="where ids are looked up; default: the suite")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N; default: auto")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of text")


def run(args: argparse.Namespace) -> int:
    if not (args.problem and args.candidate):
        raise UserError("kbrl profile needs --problem and --candidate", "See 'kbrl profile --help'")
    return judged(lambda: _profile(args))


def _profile(args: argparse.Namespace) -> int:
    from kbrl_async.kernels.backends import guess_backend
    from kbrl_async.kernels.funnel.profiling import profile
    from kbrl_async.kernels.funnel.verifier import Verifier, VerifyOptions, choose_device, read_text, shapes_for
    from kbrl_async.kernels.problems import find_problem

    text = sys.stdin.read() + "\n" if args.candidate == "-" else read_text(Path(args.candidate))
    device = choose_device(args.backend or guess_backend(text), args.device)
    problem = find_problem(args.problem, args.problems, shapes=shapes_for(device))
    with Verifier(device, VerifyOptions()) as verifier, Console(stderr=True).status(f"profiling {args.candidate} …"):
        found = profile(verifier, problem, text, args.backend)
    if args.json:
        print_json(
            {**found.result.document(), "profile": found.profile, "text": found.profile and found.profile.text()}
        )
    elif found.profile is None:
        from kbrl_async.cli.verify import show

        show(found.result)
    else:
        say(f"{problem.problem_id} · {found.result.backend}\n{found.profile.text()}")
    return found.result.exit_code
