"""`kbrl export`: a policy as a plain Hugging Face folder, or verdicts as a data set."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kbrl_async.cli.shared import completed, find, run_names
from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.runs.folder import LATEST

POLICIES = "policies"
VERDICTS = "verdicts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_argument(
        "words",
        metavar="RUN|POLICY DIR",
        nargs="+",
        help="a run (its newest policy; default: the newest run) or the folder of a policy or checkpoint, and the "
        "folder to write, which must not exist or be empty; or: verdicts RUN … FILE, what was found of every candidate "
        "of runs and services, as FILE.jsonl or FILE.parquet",
    )
    completed(words, run_names)
    parser.add_argument("--version", type=int, metavar="N", help="of a run: this policy version, not the newest")
    parser.add_argument("--merge", action="store_true", help="add the LoRA adapter to its base model")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights")
    parser.add_argument("--role", default="default", help="mode=agents: whose adapter; default: the solver's")


def run(args: argparse.Namespace) -> int:
    if args.words[0] == VERDICTS:
        return _verdicts(args.words[1:])
    if len(args.words) > 2:
        raise UserError(f"kbrl export has no argument {args.words[2]}", "See 'kbrl export --help'")
    from kbrl_async.learning.policies.exporting import export

    wanted, target = ([LATEST, *args.words])[-2:]
    with policy_of(wanted, args.version) as policy:
        made = export(policy, Path(target), merge=args.merge, dtype=args.dtype, role=args.role)
    print(
        f"{target}: version {made.policy_version} ({made.kind}, {made.dtype}); "
        f"loads with AutoModelForCausalLM, canary log-probs differ by at most {made.canary_difference:.1g}"
    )
    return 0


def _verdicts(words: list[str]) -> int:
    """`verdicts RUN … FILE`; without a run, the newest."""
    if not words:
        raise UserError("kbrl export verdicts needs a file", "Such as: kbrl export verdicts default verdicts.jsonl")
    from kbrl_async.lab.verdicts import export_verdicts
    from kbrl_async.serving.journal import FILE as JOBS

    *named, target = words
    folders = [Path(name) if (Path(name) / JOBS).is_file() else find(name) for name in named or [LATEST]]
    count = export_verdicts(folders, Path(target))
    print(f"{target}: {count} verdicts; datasets.load_dataset('{_kind(target)}', data_files='{target}') reads them")
    return 0


def _kind(target: str) -> str:
    return "json" if target.endswith(".jsonl") else "parquet"


@contextlib.contextmanager
def policy_of(wanted: str, version: int | None = None) -> Iterator[Path]:
    """`source`, or a run's checkpoint as a policy, whoever wrote it."""
    from kbrl_async.learning import checkpoints

    if not (Path(wanted) / checkpoints.STATE).is_file():
        yield source(wanted, version)
        return
    from kbrl_async.learning.policies import versions
    from kbrl_async.runs.folder import load_run
    from kbrl_async.runs.target_weights import published
    from kbrl_async.runs.targets import resolve

    target = resolve(wanted, Path())
    if target.run is None:
        raise UserError(f"{wanted} is in no run's folder, which says what its base is", "Put it back where it was")
    with tempfile.TemporaryDirectory() as scratch:
        made = published(target, Path(scratch), load_run(target.run), lambda *_: None)
        yield versions.version_folder(Path(scratch), made.version)


def source(wanted: str, version: int | None = None) -> Path:
    """The folder of a policy: itself, or one of a run."""
    from kbrl_async.learning.policies import versions

    if (Path(wanted) / versions.MANIFEST).is_file():
        if version is not None:
            raise UserError("--version chooses a policy of a run, and this is a policy's folder", "Leave it out")
        return Path(wanted)
    folder = find(wanted) / POLICIES
    if version is not None:
        return versions.version_folder(folder, version)
    newest = versions.newest(folder)
    if newest is None:
        raise CheckpointError(f"{folder} holds no policy", "The run publishes one once its learner is ready")
    return newest[1]
