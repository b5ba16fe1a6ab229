"""`kbrl export`: a policy as a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from kbrl_async.cli.shared import completed, find, run_names
from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.runs.folder import LATEST

POLICIES = "policies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument(
        "source",
        metavar="RUN|POLICY",
        nargs="?",
        default=LATEST,
        help="a run (its newest policy; default: the newest run), or the folder of a policy",
    )
    completed(source, run_names)
    parser.add_argument("target", metavar="DIR", type=Path, help="the folder to write; must not exist, or be empty")
    parser.add_argument("--version", type=int, metavar="N", help="of a run: this policy version, not the newest")
    parser.add_argument("--merge", action="store_true", help="add the LoRA adapter to its base model")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights")
    parser.add_argument("--role", default="default", help="mode=agents: whose adapter; default: the solver's")


def run(args: argparse.Namespace) -> int:
    from kbrl_async.learning.policies.exporting import export

    policy = source(args.source, args.version)
    made = export(policy, args.target, merge=args.merge, dtype=args.dtype, role=args.role)
    print(
        f"{args.target}: version {made.policy_version} ({made.kind}, {made.dtype}); "
        f"loads with AutoModelForCausalLM, canary log-probs differ by at most {made.canary_difference:.1g}"
    )
    return 0


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
