"""The independent check of a run's figures: it agrees with what is true, and sees what is not."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.figures import __main__ as figures
from kbrl_async.evaluation.metrics import heldout_scalars
from kbrl_async.rollouts.rewards.presets import STAGE3
from kbrl_async.rollouts.scoring import score
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs import summary
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, GroupEnd, TurnOutcome, UpdateRow
from kbrl_async.runs.archive.rows import make_row
from kbrl_async.runs.telemetry.by_version import Tally
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    StageReport,
    Timing,
    Verdict,
)
from protocols.rollout import STEPS, Record

SIZE, TURNS, GROUPS = 4, 2, 60
TOOLCHAINS = (
    "gcc 12.2",
    "g++ 12 fast",
    "g++ 12 full: asks for gradients",
    "g++ 12 fast; g++ 12 full: cutlass is not here",
)
ENDS = {56: ("dropped_stale", "stale"), 57: ("failed", "run_ended"), 58: ("failed", "run_ended"), 59: None}
"""Of the last groups; all others were trained on."""


class MadeUp:
    """A run as the aggregator would have written it, of random candidates: quick failures, slow successes, losses,
    groups that were cut off, and answers that came too late."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.tally, self.clock = folder, random.Random(seed), Tally(), 10.0
        self.scored = self.staleness = 0

    def make(self) -> Path:
        with ArchiveWriter(self.folder / FILE) as archive:
            before, after = (self._heldout(archive, f"eval-{when}", when) for when in ("before", "after"))
            rounds = {"2": heldout_scalars(self._heldout(archive, "eval-v2", "eval"))}
            self._heldout(archive, "eval-v4", "eval", 7)  # the run ended meanwhile
            for number in range(GROUPS):
                self._group(archive, number)
            for update in range(14):
                archive.updated(UpdateRow(f"batch-{update:06d}", update + 1, {}))
        ends = {"groups_trained": 56, "groups_filtered": 0, "groups_dropped_stale": 1, "groups_failed": 2}
        counters = summary.RunCounters(
            groups_admitted=GROUPS, rollouts=self.scored, updates=14, max_staleness=self.staleness, **ends
        )
        made = summary.build(
            counters=counters,
            answers=self.tally.answers(),
            wall_s=self.trained - 10.0,
            busy={},
            heldout_before=before,
            heldout_after=after,
            kinds={f"L1/{number:02d}": ("instance", "family")[number % 2] for number in range(5)},
            extra={"failed_reasons": {"run_ended": 2, "stale": 1}, "heldout_by_version": rounds},
        )
        summary.write(self.folder / "summary.json", made)
        (self.folder / "config.yaml").write_text(f"group_size: {SIZE}\n")
        return self.folder

    def _heldout(self, archive: ArchiveWriter, name: str, purpose: str, count: int = 30) -> list[RolloutStats]:
        records = [self._record(f"{name}.{number}", name, 0, 0, number % 5) for number in range(count)]
        return [self._add(archive, record, purpose) for record in records]

    def _group(self, archive: ArchiveWriter, number: int) -> None:
        group, version = f"g{number:06d}", number // 4
        self.tally.admitted(group, SIZE, version)
        end = ENDS.get(number, ("trained", ""))
        for place in range(SIZE if end and end[0] == "trained" else SIZE - 2):
            self._rollout(archive, group, place, version)
        if end is None:
            return
        archive.ended([GroupEnd(group, "p", *end, self.clock)])
        if end[0] == "trained":
            self.trained = self.clock
        else:
            if end[0] == "dropped_stale":
                self.tally.swept([group])
            self._add(archive, self._record(f"{group}.r{SIZE - 1}", group, 0, version, number), "train")  # too late

    def _rollout(self, archive: ArchiveWriter, group: str, place: int, version: int) -> None:
        rollout, written = f"{group}.r{place}", max(0, version - self.random.choice((0, 0, 1)))
        if self.random.random() < 0.03:
            lost = Record.of(self._record(rollout, group, 0, version, 0).request, status="worker_lost")
            self._add(archive, lost, "train")
            return self.tally.ended(group, "worker_lost")
        for turn in range(TURNS):
            stats = self._add(archive, self._record(rollout, group, turn, version, int(group[1:]), written), "train")
            key = rollout if turn == 0 else f"{rollout}.t{turn}"
            archive.outcomes([TurnOutcome(key, "batch-000000", version + 1, 0.0, 0.0)])
            self.tally.answered(group, stats)
            self.scored += 1
            self.staleness = max(self.staleness, version + 1 - written)
        return self.tally.ended(group)

    def _add(self, archive: ArchiveWriter, record: Record, purpose: str) -> RolloutStats:
        self.clock += 0.5
        scored = score(record, STAGE3)
        request = record.request
        key = request.rollout_id if request.turn == 0 else f"{request.rollout_id}.t{request.turn}"
        row = make_row(
            key, record, at=0.0, clock=self.clock, purpose=purpose, reward=scored.sample.reward if scored else None
        )
        archive.add(row, record.encode())
        return scored.stats if scored else RolloutStats(problem_id="", level=1, reward=0.0)

    def _record(self, rollout: str, group: str, turn: int, admitted: int, problem: int, wrote: int = 0) -> Record:
        asked = Problem(f"L1/{problem % 9:02d}", 1, "p", "", flags=("zeros",) if problem % 5 == 4 else ())
        request = RolloutRequest(
            rollout, group, asked, "", "c", SamplingParams(64), turn=turn, admitted_version=admitted
        )
        end = self.random.choices(["format", "static", "compile", "bench", "right"], [1, 1, 4, 5, 3 + wrote])[0]
        if end == "format":
            return Record.of(request, Generation(wrote, [], [], [], "", "stop", None, Fault.FORMAT_ERROR))
        written = Generation(wrote, [], [5], [-0.5], "", "stop", Candidate("kernel", "c"))
        static = StageReport("static", Fault.OK, 0.01)
        if end == "static":
            fault = self.random.choice([Fault.STATIC_VIOLATION, Fault.FORMAT_ERROR])
            report = BuildReport(fault, rule="syntax", stages=(StageReport("static", fault, 0.01),))
            return Record.of(request, written, report)
        failed = Fault.COMPILE_ERROR if end == "compile" else Fault.OK
        took = StageReport("compile", failed, self.random.random())
        built = BuildReport(failed, toolchain=self.random.choice(TOOLCHAINS), stages=(static, took))
        return Record.of(request, written, built, *([] if end == "compile" else [self._bench(end == "right")]))

    def _bench(self, is_right: bool) -> BenchReport:
        if is_right:
            median = self.random.lognormvariate(0.0, 0.7)
            wide = self.random.choice([1.05, 1.3, 4.0])
            timing = Timing(9, median, median / wide, median * wide, 1.0, median)
            stages = tuple(StageReport(name, Fault.OK, self.random.random()) for name in STEPS[3:])
            trust = self.random.choice(("replayed", "observed", ""))
            return BenchReport(Verdict(Fault.OK, 4, 4, trust=trust), timing, stages=stages)
        fault = self.random.choice([Fault.INCORRECT, Fault.CHEATING, Fault.RUNTIME_ERROR])
        came_to = {name: self.random.choice([Fault.OK, fault]) for name in STEPS[3 : 3 + self.random.randrange(4)]}
        stages = tuple(StageReport(name, each, self.random.random()) for name, each in came_to.items())
        return BenchReport(Verdict(fault, 1, 4), stages=stages)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeUp(tmp_path_factory.mktemp("run"), 0).make()


def different(run: Path) -> list[str]:
    return [str(name) for name in figures.check(run)["different"]]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_figure_of_a_run_is_made_again(tmp_path: Path, seed: int) -> None:
    found = figures.check(MadeUp(tmp_path, seed).make())
    assert found["different"] == []
    assert found["ok"]
    assert found["compared"] > 100
    assert found["not_compared"] == ["busy", "busy_total", "stale_by_length", "stale_warning"]


def changed(run: Path, tmp_path: Path, name: str, value: Any) -> list[str]:
    told = json.loads((run / "summary.json").read_text())
    for kept in (FILE, "config.yaml"):
        (tmp_path / kept).write_bytes((run / kept).read_bytes())
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode({**told, name: value}))
    return different(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("correct_rate_last", 0.9, ["correct_rate_last", "terminal: correct_rate_last"]),
        ("reward_mean_first_95", [0.0, 1.0], ["reward_mean_first_95", "terminal: reward_mean_first"]),
        ("heldout_fast_1_after", 0.99, ["heldout_fast_1_after", "terminal: heldout_fast_1_after"]),
        ("best_kernels", [], ["best_kernels", "terminal: fastest kernels"]),
        ("funnel", {}, ["funnel"]),
        ("groups_failed", 3, ["groups_failed"]),
        ("wall_s", 1.0, ["wall_s", "updates_per_hour"]),
    ],
)
def test_a_figure_that_is_not_true_is_named(run: Path, tmp_path: Path, name: str, value: Any, said: list[str]) -> None:
    assert changed(run, tmp_path, name, value) == said


def test_an_answer_that_the_archive_lacks_is_noticed(run: Path, tmp_path: Path) -> None:
    for kept in (FILE, "config.yaml", "summary.json"):
        (tmp_path / kept).write_bytes((run / kept).read_bytes())
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DELETE FROM rollouts WHERE task_id = 'g000000.r0.t1'")
    assert {"rollouts", "answers_first", "funnel"} <= set(different(tmp_path))


def test_the_exit_code_says_whether_all_are_true(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        figures.commands.main(["check", str(run)])
    assert ended.value.code == 0
    changed(run, tmp_path, "updates", 1)
    with pytest.raises(SystemExit) as ended:
        figures.commands.main(["check", str(tmp_path)])
    assert ended.value.code == 1
