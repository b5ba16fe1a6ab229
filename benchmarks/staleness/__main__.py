"""Stale samples: what they do to training, and what time they save. `python -m benchmarks.staleness COMMAND`"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.harness import Commands, Result, say, with_figures
from benchmarks.harness.crew import Crew, CrewTask
from benchmarks.staleness import forecast, lengths, overlap
from benchmarks.staleness.arm import Arm, ArmResult, StudySetting, working
from benchmarks.staleness.report import MARKS, SettingFigures, findings, hardest, picture, reward_table, stability_table
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config

commands = Commands("staleness", __doc__)
commands(lengths.lengths)
commands(overlap.overlap)
commands(overlap.async_vs_sync)
commands(forecast.forecast)
STALENESS = (4, 0, 8, 2, 1)
NONE, DEFAULT = "none", Config().loss
CORRECTIONS: dict[str, tuple[str, ...]] = {
    NONE: ("loss=reinforce",),
    **{loss: (f"loss={loss}",) for loss in ("dppo_tv", "ppo", "decoupled", "a3po", "cispo", "gspo")},
    **{
        name: ("loss=reinforce", f"corrections={name}")
        for name in ("tis", "tis_sequence", "icepop", "sequence_mask", "geometric_mask", "k3_reject", "veto", "opsm",
                     "m2po", "clip_cov")
    },
}  # fmt: skip
"""What each arm sets; all else is the setting's. `grpo` is `ppo` by another name, the loss `tis` the correction
`tis` on `reinforce`, and `importance_sampling` the same without its cap."""
_SMALL = ("level=1", "batch_size=4")
SETTINGS = {
    "default": StudySetting("default", 20, _SMALL),
    "fast": StudySetting("fast", 20, (*_SMALL, "learning_rate=5e-4")),
    "negative-3": StudySetting("negative-3", 20, (*_SMALL, "learning_rate=3e-4", "learner.negative_scale=1")),
    "negative-5": StudySetting("negative-5", 20, (*_SMALL, "learning_rate=5e-4", "learner.negative_scale=1")),
}
"""Eight problems, 32 answers an update; all else as in the default run but for what is said here."""


def planned(
    settings: Sequence[str], corrections: Sequence[str], staleness: Sequence[int], seeds: Sequence[int]
) -> list[Arm]:
    """The whole grid, in the order of what is given: whoever stops early has complete comparisons."""
    return [Arm(name, c, s, seed) for s in staleness for name in settings for c in corrections for seed in seeds]


def read(paths: Iterable[Path]) -> list[ArmResult]:
    """All arms of several files in order of their names; each counts once, and the first file that has it wins."""
    found: dict[str, ArmResult] = {}
    for path in paths:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            if b'"arm":' in line:  # a worker that died left a row without one
                outcome = msgspec.json.decode(line, type=ArmResult)
                found.setdefault(outcome.arm.key, outcome)
    return [found[key] for key in sorted(found)]


@commands
def study(
    results: Annotated[Path, "outcomes, a line each"] = Path("staleness.jsonl"),
    known: Annotated[tuple[Path, ...], "more files of outcomes: not run again"] = (),
    policy: Annotated[str, "folder of the policy that all arms start from; default: made for this"] = "",
    cache: Annotated[Path, "verdicts by source"] = Path("staleness.sqlite"),
    settings: tuple[str, ...] = tuple(SETTINGS),
    corrections: tuple[str, ...] = tuple(CORRECTIONS),
    staleness: tuple[int, ...] = STALENESS,
    seeds: tuple[int, ...] = (0, 1, 2),
    jobs: Annotated[int, "worker processes, one core each"] = 1,
    first_core: Annotated[int, "leave the cores before this one to others"] = 0,
    minutes: Annotated[float, "after which no further arm is begun"] = 60.0,
    report: Annotated[Path | None, "run nothing: write the figures into this page"] = None,
) -> Result | None:
    """Does training stay stable when samples are S versions old? Seeds × S × corrections on the small policy.

    Each arm is a training run whose samples are exactly S versions old; arms of a seed see the same problems and the
    same random numbers. An outcome is written when its arm ends, and arms that --results or --known hold are not run
    again, so that the study can be stopped, continued and spread over hosts. `--report docs/staleness.md` writes tables
    and picture. The anchor is S = 0 of the same seed and correction.
    """
    found = read([results, *known])
    if report:
        page = report.read_text(encoding="utf-8")
        report.write_text(with_figures(page, MARKS, figures_of(found, report)), encoding="utf-8")
        return None
    policy = policy or str(origins.base_model(Config(), lambda what, share: say(what)))
    have = {outcome.arm.key for outcome in found}
    arms = [arm for arm in planned(settings, corrections, staleness, seeds) if arm.key not in have]
    tasks = [CrewTask(arm.key, (arm, SETTINGS[arm.setting], CORRECTIONS[arm.correction])) for arm in arms]
    crew, done, started = Crew(jobs, 60 * minutes, 3600.0, results, again=("host",)), 0, time.monotonic()
    for row in crew.run(tasks, partial(working, policy, cache, first_core)):
        done += "arm" in row
        say(row["name"], {name: row.get(name) for name in ("state", "after", "seconds", "verified")})
    return {"arms": done, "left": len(arms) - done, "s": time.monotonic() - started}


def figures_of(outcomes: Sequence[ArmResult], page: Path) -> str:
    """Findings and tables, and the picture beside the page: the hard setting in full, of the others what was run."""
    hard = hardest(outcomes)
    parts = []
    for setting in (hard, *(name for name in SETTINGS if name != hard)):
        figures = SettingFigures([o for o in outcomes if o.arm.setting == setting])
        if not figures.outcomes:
            continue
        names = figures.ordered([NONE, DEFAULT])
        said = ", ".join(SETTINGS[setting].words[len(_SMALL) :]) or "the default run's own rate and scales"
        parts.append(f"### Setting `{setting}`: {said}")
        parts.append("\n".join(f"* {words}" for words in findings(figures, NONE, DEFAULT)))
        parts.append(f"Final reward over {len(figures.seeds)} seeds:\n\n{reward_table(figures, names)}")
        if setting == hard:
            parts += _in_full(figures, names, page)
    return "\n\n".join(part for part in parts if part)


def _in_full(figures: SettingFigures, names: Sequence[str], page: Path) -> list[str]:
    place = page.parent / "pictures" / "staleness.svg"
    place.write_text(picture(figures, names, "Final reward by staleness of the samples"), encoding="utf-8")
    tables = [f"Stability at S=4:\n\n{stability_table(figures, names, 4)}"]
    return [f"![Final reward by staleness and correction](pictures/{place.name})", *tables]


if __name__ == "__main__":
    commands.main()
