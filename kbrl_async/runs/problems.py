"""The problems of a configuration: from where it says, in its shapes and precision, split as it says."""

from __future__ import annotations

from collections.abc import Sequence

from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems import load_problems
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
