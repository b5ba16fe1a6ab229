"""What the aggregator does beside deciding: it archives, answers alarms and tells where rollouts grow old."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import RunError
from kbrl_async.evaluation.heldout import AFTER
from kbrl_async.learning import kept
from kbrl_async.rollouts.alarms import AlarmChange
from kbrl_async.rollouts.buffer.events import Admitted, BatchMade, Closed
from kbrl_async.rollouts.settings import Alarms as AlarmSettings
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.commands import Watched
from kbrl_async.runs.config import Config
from kbrl_async.runs.planning import plan_of
from kbrl_async.runs.run_memory import RunSnapshot
from kbrl_async.runs.run_state import RunState
from kbrl_async.runs.settings import Archive as ArchiveSettings
from protocols.messages import Stage, Status, Task
from protocols.records import (
    BenchReport,
    BuildReport,
    Fault,
    Generation,
    GroupOutcome,
    Problem,
    RolloutRequest,
    SamplingParams,
    TrainBatch,
    TrainGroup,
    TrainSample,
    UpdateReport,
    Verdict,
)
from protocols.rollout import Record
from services.reward_aggregator.ageing import ages_by_stage
from services.reward_aggregator.guards import AlarmResponder
from tests.unit.services.log import Log


def record() -> Record:
    request = RolloutRequest("g000001.r0", "g000001", Problem("L1/a", 1, "a", ""), "p", "c", SamplingParams(8))
    return Record.of(
        request,
        Generation(2, [1], [2], [-1.0], "text", "stop", finished_at=10.0),
        BuildReport(Fault.OK, finished_at=20.0),
        BenchReport(Verdict(Fault.INCORRECT), finished_at=30.0),
    )


def task(status: str = Status.OK, group_id: str = "g000001") -> Task:
    return Task("g000001.r0", "lease", Stage.SCORE, 1, 60.0, 2, status, group_id)


def archived(folder: Path, keep: Any, *, is_best: bool = False, group_id: str = "g000001") -> ArchiveReader | None:
    frames = record().encode()

    async def write() -> None:
        with RolloutRecorder(ArchiveSettings(keep=keep), folder) as archiving:
            await archiving.scored(task(group_id=group_id), frames, record(), None, 1.0, is_best=is_best)
            sample = TrainSample("g000001.r0", [], [], [], -0.5, 0.25, 2)
            groups = [TrainGroup("g000001", "L1/a", 1, [sample])]
            await archiving.batch(BatchMade("batch-000000", 3, ["g000001"], 2.0), groups)
            await archiving.ended([Closed("g000001", "L1/a", GroupOutcome.TRAINED, "")], 3.0)
            await archiving.updated(UpdateReport("batch-000000", 4, {"loss": 0.1}))

    asyncio.run(write())
    return ArchiveReader(folder / FILE) if (folder / FILE).exists() else None


def test_a_scored_turn_is_archived_with_its_record_and_later_with_what_became_of_it(tmp_path: Path) -> None:
    archive = archived(tmp_path, "all")
    assert archive is not None
    (row,) = archive.rows()
    assert (row.purpose, row.batch_id, row.trained_on, row.advantage) == ("train", "batch-000000", 3, -0.5)
    assert archive.record("g000001.r0") == record()
    assert archive.groups()["g000001"].outcome == "trained"
    assert archive.updates()[0].metrics == {"loss": 0.1}
    archive.close()


def test_of_the_best_the_records_are_kept_and_of_the_others_the_columns(tmp_path: Path) -> None:
    for name, is_best in (("best", True), ("other", False)):
        (tmp_path / name).mkdir()
        archive = archived(tmp_path / name, "best", is_best=is_best)
        assert archive is not None
        assert bool(archive.record("g000001.r0")) is is_best
        assert archive.count() == 1
        archive.close()


def test_no_archive_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    assert archived(tmp_path, "none") is None


def test_an_evaluation_is_told_from_training(tmp_path: Path) -> None:
    archive = archived(tmp_path, "all", group_id=AFTER)
    assert archive is not None
    assert [row.purpose for row in archive.rows()] == ["after"]
    archive.close()


# ── alarms ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Watch:
    """A run's state and what answers its alarms, without the queues."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = Config(eval_samples=0, alarms=AlarmSettings(window=1, **settings))
        self.state, self.log = RunState(plan_of(self.config)), Log()
        self.responder = AlarmResponder(self.config, folder, self.log)

    def update(self, index: int, failure: str = "", **metrics: float) -> None:
        report = UpdateReport(f"batch-{index:06d}", index + 1, metrics, failure=failure)
        frames = [msgspec.msgpack.encode(TrainBatch(report.batch_id, index, 1.0, [])), b"group"]
        effects = self.state.do(Watched(index + 1, {**metrics, "nonfinite": float(bool(failure))}, float(index)))
        changes = [effect for effect in effects if isinstance(effect, AlarmChange)]
        self.responder.respond(changes, self.state.alarms_raised, report, frames)

    def room(self) -> int:
        """Groups that are admitted now, one after the other, by a state of the same past."""
        again = RunState(self.state.plan)
        again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(self.state.snapshot()), type=RunSnapshot))
        count = 0
        while (admitted := again.admission(0.0)) is not None:
            again.do(admitted)
            count += 1
        return count


def test_a_warning_is_logged_and_its_batch_kept_and_training_goes_on(tmp_path: Path) -> None:
    watch = Watch(tmp_path, ess_below=0.5)
    watch.update(0, ess=0.9)
    watch.update(1, ess=0.1)
    assert [line.facts["alarm"] for line in watch.log.lines] == ["ess"]
    assert sorted(path.name for path in (tmp_path / kept.FOLDER).iterdir()) == ["batch-000001"]
    assert watch.room() == 3 * watch.config.batch_size


def test_an_alarm_lowers_the_window_of_admission_and_gives_it_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path, ess_below=0.5, ess_action="lower_staleness")
    sizes = []
    for index, ess in enumerate((0.1, 0.1, 0.9)):
        watch.update(index, ess=ess)
        sizes.append(watch.room() // watch.config.batch_size)
    assert sizes == [2, 1, 3]


def test_an_alarm_that_stops_names_the_batch_and_how_to_see_it(tmp_path: Path) -> None:
    watch = Watch(tmp_path, kl_above=1.0, kl_action="stop")
    with pytest.raises(RunError, match=r"kbrl replay \S+ batch-000004"):
        watch.update(4, mismatch_kl=3.0)
    assert (tmp_path / kept.FOLDER / "batch-000004").is_dir()


def test_a_loss_that_is_not_finite_stops_the_run_by_default(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="batch-000000 has no finite loss"):
        Watch(tmp_path).update(0, failure="loss is nan")


def test_told_to_go_on_the_run_stops_at_the_third_such_batch_in_a_row(tmp_path: Path) -> None:
    watch = Watch(tmp_path, nonfinite_action="warn")
    watch.update(0, failure="loss is nan")
    watch.update(0, ess=0.9)
    watch.update(1, failure="loss is nan")
    watch.update(2, failure="loss is nan")
    with pytest.raises(RunError):
        watch.update(3, failure="loss is nan")


def test_replaying_the_journal_gives_the_same_alarms(tmp_path: Path) -> None:
    watch = Watch(tmp_path, ess_below=0.5, ess_action="pause_admission")
    watch.update(0, ess=0.1)
    again = RunState(plan_of(watch.config))
    again.do(Watched(1, {"ess": 0.1, "nonfinite": 0.0}, 0.0))
    assert again.alarm_changes == watch.state.alarm_changes
    assert again.snapshot().buffer.is_paused
    again.do(Admitted("g000000", again.plan.training[0].problem_id, 1, 2, 0, 0.0))
    assert again.admission(0.0) is None


# ── ages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rollout_ages_where_versions_pass_it_by() -> None:
    published = [(5.0, 2), (15.0, 3), (25.0, 4), (28.0, 5), (99.0, 6)]
    assert ages_by_stage(record(), published) == {"generate": 0, "compile": 1, "bench": 3}
    assert ages_by_stage(record(), []) == {}
