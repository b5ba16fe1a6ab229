"""What commands share: arguments that several take, finding a run, reading a configuration, tables, exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kbrl_async.errors import ConfigError, KbrlError, ProblemError, UserError
from kbrl_async.runs.config import KEYS, SCALABLE, Config, environment, load
from kbrl_async.runs.config.loading import gather
from kbrl_async.runs.config.loading import resolve as resolved
from kbrl_async.runs.config.sources import Setting
from kbrl_async.runs.folder import LATEST, latest, runs_in

EVALUATIONS = "evals"
"""In log_path: evaluations are runs, but never the newest one that other commands mean."""
SHOWN = 5
"""Names of runs that an error lists."""
OUR_FAULT = 3
"""Exit code where the host or the problem failed, not the candidate and not the words of the command."""


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def add_run(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument(
        "run_folder", metavar="RUN", nargs="?", default=LATEST, help="folder or name; default: the newest"
    )
    completed(run, run_names)


def add_old_run(parser: argparse.ArgumentParser) -> None:
    """`--run RUN`, as some commands took it until the last release; see `run_of`."""
    parser.add_argument("--run", dest="old_run", help=argparse.SUPPRESS)


def run_of(args: argparse.Namespace) -> Path:
    """The folder of the RUN that a command with `add_run` and `add_old_run` was given."""
    if args.old_run is not None:
        print(f"warning: --run is read for one more release; write RUN alone: {args.old_run}", file=sys.stderr)
        args.run_folder, args.old_run = args.old_run, None
    return find(args.run_folder)


def run_names(prefix: str = "", **_: object) -> list[str]:
    """What may stand for a RUN, for the shell."""
    root = log_path()
    return [path.name for folder in (root, root / EVALUATIONS) for path in runs_in(folder)]


def runs_and_settings(prefix: str = "", **_: object) -> list[str]:
    return [*run_names(), *setting_words(prefix)]


def completed(argument: argparse.Action, by: Callable[..., list[str]]) -> None:
    """The shell completes the argument `by(prefix)`."""
    argument.completer = by  # type: ignore[attr-defined] # argcomplete's name


def log_path() -> Path:
    """Where the runs of this folder are."""
    return Path(load(env=environment(os.environ)).log_path)


def find(wanted: str) -> Path:
    """A run folder by its path, or by its name in log_path; `latest`: the newest run that has begun.

    :raises UserError: there is no such run, or none at all.
    """
    root = log_path()
    if wanted == LATEST:
        return newest(root)
    for path in (Path(wanted), root / wanted, root / EVALUATIONS / wanted):
        if path.is_dir():
            return path.resolve()
    names = [path.name for folder in (root, root / EVALUATIONS) for path in runs_in(folder)]
    if not names:
        raise no_runs(root)
    near = difflib.get_close_matches(Path(wanted).name, names, 1)
    cure = f"Did you mean {near[0]}?" if near else f"There is {', '.join(names[:SHOWN])}; 'kbrl runs' lists all"
    raise UserError(f"there is no run {wanted}", cure)


def newest(root: Path) -> Path:
    """The newest run of `root`.

    :raises UserError: there is none.
    """
    found = latest(root)
    if found is None:
        raise no_runs(root)
    return found


def no_runs(root: Path) -> UserError:
    """The error where no run was made yet, or where this is not the folder that they were made from."""
    return UserError(f"there are no runs in {root}/", "Make one with 'kbrl train', or go to the folder that has them")


# ── a configuration ─────────────────────────────────────────────────────────────────────────────────────────────────


SETTINGS = ("key=value", "settings that win over files; 'kbrl config' lists them")


def add_settings(
    parser: argparse.ArgumentParser, metavar: str = SETTINGS[0], words: str = SETTINGS[1]
) -> argparse.Action:
    """Files, `key=value` words, and counts of processes; see `add_config`."""
    settings = add_config(parser, metavar, words)
    parser.add_argument(
        "--processes",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help=f"how many of {', '.join(SCALABLE)} to start, such as compile_farm=2,sampler=1",
    )
    return settings


def add_config(
    parser: argparse.ArgumentParser, metavar: str = SETTINGS[0], words: str = SETTINGS[1]
) -> argparse.Action:
    """Files and `key=value` words; who takes other words too says so by `metavar` and `words`."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, action="append", default=[], help="YAML or TOML; later files win"
    )
    settings = parser.add_argument("overrides", metavar=metavar, nargs="*", help=words)
    completed(settings, setting_words)
    return settings


def setting_words(prefix: str = "", **_: object) -> list[str]:
    """`key=` of every setting, and `key=value` where it takes one of a few words; for the shell."""
    key, sign, _value = prefix.partition("=")
    if not sign:
        return [f"{name}=" for name in KEYS]
    return [f"{key}={word}" for word in KEYS[key].choices] if key in KEYS else []


def resolve(args: argparse.Namespace) -> Config:
    """The configuration: files < KBRL_* variables (.env, then the shell) < the command line."""
    return resolved(gathered(args))


def gathered(args: argparse.Namespace) -> list[Setting]:
    """The settings that make it, with their origins."""
    overrides = [*args.overrides, *process_overrides(args.processes)]
    return gather(args.config, overrides, environment(os.environ))


def process_overrides(words: Sequence[str]) -> Iterator[str]:
    for part in ",".join(words).split(","):
        name, _, count = part.partition("=")
        if part and name not in SCALABLE:
            raise ConfigError(f"--processes {part}: only {', '.join(SCALABLE)} can be several", "Write compile_farm=2")
        if part:
            yield f"processes.{name}={count}"


# ── one kernel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def add_kernel(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--problem", metavar="FILE|ID", help="a problem file, or an id such as L1/13_softmax or 1/13")
    group.add_argument(
        "--candidate", metavar="FILE", help="a Python file with ModelNew, or a model's answer; - is stdin"
    )
    group.add_argument("--backend", help="what the kernel is written in; default: guessed from its imports")


def add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules",
        choices=("open", "strict"),
        default="open",
        help="open: any Python that runs confined, with the files beside it that it uses; strict: as in training",
    )
    parser.add_argument(
        "--outputs",
        choices=("fresh", "kept"),
        help="kept: one output buffer may serve several calls; default: kept, and fresh with --rules strict",
    )


def judged(command: Callable[[], int], told: Callable[[KbrlError], None] = lambda _error: None) -> int:
    """The command's exit code, or `OUR_FAULT` with the reason on stderr, and to `told` before.

    :raises UserError: wrong usage; but a problem that does not hold the contract is our fault.
    """
    try:
        return command()
    except KbrlError as error:
        if isinstance(error, UserError) and not isinstance(error, ProblemError):
            raise
        told(error)
        print(f"error: {error}", file=sys.stderr)
        return OUR_FAULT


# ── what is printed ─────────────────────────────────────────────────────────────────────────────────────────────────


def say(text: str, console: Console | None = None) -> None:
    """One line as it is: no markup, no colours, no breaks."""
    (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any, *, pretty: bool = False) -> None:
    encoded = msgspec.json.encode(value, order="deterministic" if pretty else None)
    print((msgspec.json.format(encoded) if pretty else encoded).decode())


def check_suffix(path: Path | None, suffix: str, option: str, cure: str) -> None:
    """Refuse a file whose name promises another format than is written; None is no file.

    :raises UserError: it does.
    """
    if path is not None and path.suffix.lower() not in ("", suffix):
        raise UserError(f"{option} writes {suffix.removeprefix('.').upper()}, not {path.suffix}", cure)


def table(headings: Iterable[str], title: str = "", right: Iterable[str] = ()) -> Table:
    """Without rows yet; the columns of `right` are numbers, long cells are folded."""
    made = Table(title=title or None, title_justify="left")
    numbers = set(right)
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str]], style: str = "bold") -> Table:
    """Names and values without lines around them; an empty value is left out."""
    made = Table(show_header=False, box=None)
    made.add_column(style=style)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value:
            made.add_row(name, Text(value))
    return made
