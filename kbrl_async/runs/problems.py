"""The problems of a configuration: from where it says, in its shapes and precision, split as it says."""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.errors import ConfigError
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems import load_problems, usable
from kbrl_async.kernels.problems.split import HELDOUT, Split
from kbrl_async.runs.config.schema import Config
from protocols.records import Problem


def problems_of(config: Config, levels: Sequence[int] = ()) -> list[Problem]:
    """Of these levels, or of all.

    :raises ProblemError: there is none, or a file breaks the contract.
    """
    return load_problems(
        config.problems or "",
        levels=levels,
        shapes="gpu" if runs_on_gpu(config.backend) else "cpu",
        precision=config.precision,
        heldout=Split(config.heldout_share, config.heldout_seed, config.split),
    )


def trainable(config: Config, problems: Sequence[Problem]) -> list[Problem]:
    """Those of them that are trained on: not held out, not excluded, and right verdicts mean something there."""
    learnable = usable(problems) if config.exclude_audited else problems
    excluded = frozenset(config.exclude)
    return [p for p in learnable if p.split != HELDOUT and p.problem_id not in excluded]


def excluded_told(config: Config, problems: Sequence[Problem]) -> str:
    """How many training problems `exclude` takes away; empty where it names nothing.

    :raises ConfigError: it takes none away, or all.
    """
    if not config.exclude:
        return ""
    training = [p.problem_id for p in problems if p.split != HELDOUT]
    left_out = sum(problem_id in config.exclude for problem_id in training)
    if not left_out:
        cause = f"exclude: {config.exclude[0]} and the like are no training problems of this run, and no folders"
        raise ConfigError(cause, "'kbrl problems list' shows the ids; a folder is a run or runs/evals/NAME")
    if not trainable(config, problems):
        raise ConfigError("exclude leaves no problem to train on", "Exclude fewer")
    return f"{left_out} of {len(training)} training problems are excluded"


def split_told(config: Config, problems: Sequence[Problem]) -> str:
    """What a person should know of a split that the source did not make; empty for our own suite."""
    if not config.problems or config.problems == "suite":
        return ""
    held = sum(problem.split == HELDOUT for problem in problems)
    if not held:
        cure = (
            "leave split=none out" if config.split == "none" else "raise heldout_share, or mark some with split=heldout"
        )
        return f"nothing of {config.problems} is held out, so nothing shows what is learned beyond it: {cure}"
    return (
        f"{held} of {len(problems)} problems are held out: never trained on, guarded by retrieval, evaluated. "
        f"Where the source marks none they are chosen by split={config.split} heldout_share={config.heldout_share:g} "
        f"heldout_seed={config.heldout_seed}"
    )
