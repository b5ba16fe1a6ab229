"""`kbrl problems`: what the policy can be trained on."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from kbrl_async.problems import load_problems

NAME = "problems"
HELP = "list the problems of the suite, or of a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list"], help="what to do")
    parser.add_argument("--folder", default="", help="problems in the KernelBench layout; default: the project's suite")
    parser.add_argument("--level", type=int, action="append", default=[], help="only this level; may be repeated")


def run(args: argparse.Namespace) -> int:
    table = Table()
    for heading in ("problem", "level", "difficulty", "split"):
        table.add_column(heading)
    problems = load_problems(args.folder, levels=args.level)
    for problem in problems:
        table.add_row(problem.problem_id, str(problem.level), f"{problem.difficulty:.2f}", problem.split)
    console = Console()
    console.print(table)
    heldout = sum(problem.split == "heldout" for problem in problems)
    console.print(f"{len(problems)} problems, {heldout} of them held out")
    return 0
