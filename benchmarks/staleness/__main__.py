"""Stale samples: what they do to training, and what time they save. `python -m benchmarks.staleness COMMAND`"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.harness import CORES, ONE_THREAD, Commands, Result, command, environment, say
from benchmarks.staleness import overlap
from benchmarks.staleness.arm import Arm, ArmResult, Remembering, Study, StudySetting, Verdicts
from benchmarks.staleness.report import (
    SettingFigures,
    findings,
    hardest,
    merge,
    picture,
    reward_table,
    stability_table,
    with_figures,
)
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config

commands = Commands("staleness", __doc__)
commands(overlap.overlap)
commands(overlap.async_vs_sync)
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
WORKERS_PER_CORE = 3
"""Processes that may be started on a core, one after another's death."""
WORK = msgspec.json.Decoder(Arm)
OUTCOMES = msgspec.json.Decoder(ArmResult)


def planned(
    settings: Sequence[str], corrections: Sequence[str], staleness: Sequence[int], seeds: Sequence[int]
) -> list[Arm]:
    """The whole grid, in the order of what is given: whoever stops early has complete comparisons."""
    return [Arm(name, c, s, seed) for s in staleness for name in settings for c in corrections for seed in seeds]


def read(paths: Iterable[Path]) -> list[ArmResult]:
    lines = (path.read_bytes().splitlines() for path in paths if path.exists())
    return merge([OUTCOMES.decode(line) for line in part if line.strip()] for part in lines)


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
    minutes: Annotated[float, "no arm is begun that would end later"] = 60.0,
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
        report.write_text(with_figures(page, figures_of(found, report)), encoding="utf-8")
        return None
    policy = policy or str(origins.base_model(Config(), lambda what, share: say(what)))
    have = {outcome.arm.key for outcome in found}
    arms = [arm for arm in planned(settings, corrections, staleness, seeds) if arm.key not in have]
    Verdicts(cache).close()  # made once, before workers open it all at the same time
    crew = ArmCrew(results, policy, cache, minutes, arms)
    started = time.monotonic()
    crew.run([core for core in CORES if core >= first_core], jobs)
    return {"arms": crew.done, "left": len(arms) - crew.done, "s": time.monotonic() - started}


class ArmCrew:
    """Worker processes on a core each; arms go out while there is time for one more."""

    def __init__(self, results: Path, policy: str, cache: Path, minutes: float, arms: Sequence[Arm]) -> None:
        self._results, self._policy, self._cache = results, policy, cache
        self._left = queue.SimpleQueue[Arm]()
        self._deadline = time.monotonic() + 60 * minutes
        self._longest = 0.0
        self._lock = threading.Lock()
        self.done = 0
        for arm in arms:
            self._left.put(arm)

    def run(self, cores: Sequence[int], jobs: int) -> None:
        threads = [threading.Thread(target=self._serve, args=(cores[n % len(cores)],)) for n in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, core: int) -> None:
        """A worker on this core, and a new one where it dies, until nothing or no time is left."""
        for _ in range(WORKERS_PER_CORE):
            if self._employ(core):
                return

    def _employ(self, core: int) -> bool:
        """Whether the worker lived to the end."""
        words = command("staleness", "work", core, self._policy, self._cache)
        pipe = subprocess.PIPE
        with subprocess.Popen(words, env=environment(**ONE_THREAD), stdin=pipe, stdout=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            while (arm := self._next()) is not None:
                started = time.monotonic()
                process.stdin.write(msgspec.json.encode(arm) + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    say(f"the worker on core {core} ended in {arm.key}")
                    return False
                self._keep(line, time.monotonic() - started)
            process.stdin.close()
        return True

    def _next(self) -> Arm | None:
        if time.monotonic() + 1.1 * self._longest > self._deadline:
            return None
        try:
            return self._left.get_nowait()
        except queue.Empty:
            return None

    def _keep(self, line: bytes, seconds: float) -> None:
        outcome = OUTCOMES.decode(line)
        with self._lock:
            with self._results.open("ab") as file:
                file.write(line)
            self._longest = max(self._longest, seconds)
            self.done += 1
        after = {name: round(value, 3) for name, value in outcome.after.items()}
        say(outcome.arm.key, after, outcome.seconds, f"{outcome.verified} verified, {seconds:.0f} s")


@commands.inner
def work(core: int, policy: str, cache: Path, /) -> None:
    """A worker process: arms come as lines, outcomes go as lines. One core, one thread."""
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not come between the lines
    with Remembering.open(cache) as judge:
        for line in sys.stdin.buffer:
            arm = WORK.decode(line)
            outcome = Study(arm, SETTINGS[arm.setting], CORRECTIONS[arm.correction], policy, judge).run()
            answers.write(msgspec.json.encode(outcome) + b"\n")


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
