"""Replay: a run made again from its journal and archive comes out the same, and where it does not, it says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen2ForCausalLM

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.learning import checkpoints, kept
from kbrl_async.learning.policies import versions
from kbrl_async.rollouts.buffer.events import BatchMade
from kbrl_async.rollouts.manager import RolloutManager
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.runs.archive.archive import FILE, ArchiveReader, ArchiveWriter, TurnOutcome, UpdateRow, make_row
from kbrl_async.runs.commands import AskTurn, Command, Effect, RolloutEnded, batch_frames, closed_in
from kbrl_async.runs.config import Config, to_yaml
from kbrl_async.runs.planning import plan_of, preset_for, rollout_rules
from kbrl_async.runs.run_journal import FILE as JOURNAL_FILE
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.run_state import RunState
from kbrl_async.sampling.settings import Sampler
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    SamplingParams,
    TrainBatch,
    Verdict,
)
from protocols.rollout import Record, Work
from services.learner.policy import make_trainer
from services.replay.batches import replay_batch
from services.replay.runs import replay_run
from services.replay.updates import first_trainer
from tests.models import SMALLER, VOCABULARY, tiny_model

CANARY = [1, 2, 3, 4]
DEADLINE_S = 30.0


def saved_model(folder: Path) -> str:
    tiny_model(scale=1.0, max_position_embeddings=128, **SMALLER).save_pretrained(str(folder))  # type: ignore[operator]
    return str(folder)


class FakeRun:
    """A run as the aggregator and the learner would leave it: everything decided by the real state and trainer."""

    def __init__(self, folder: Path, updates: int = 2, **settings: object) -> None:
        self.path = folder / "run"
        self.path.mkdir()
        self.config = Config(
            model_name=saved_model(folder / "model"),
            level=[1],
            batch_size=2,
            group_size=3,
            max_steps=4,
            eval_samples=0,
            device="cpu",
            **settings,  # type: ignore[arg-type]
        )
        (self.path / "config.yaml").write_text(to_yaml(self.config))
        self._rng = random.Random(0)
        self._now = 0.0
        self.state = RunState(plan_of(self.config))
        first = FirstPrompts(self.config.prompt_option, self.config.backend)
        sampling = SamplingParams(self.config.max_tokens)
        self._manager = RolloutManager(rollout_rules(self.config), self.state, first, sampling)
        self._presets = find_presets(self.config.reward)
        torch.set_num_threads(1)
        self.trainer = make_trainer(self.config, self.config.model_name, "cpu")
        self.publish(0)
        with RunJournal(self.path / JOURNAL_FILE) as self.journal, ArchiveWriter(self.path / FILE) as self.archive:
            while self.state.updates < updates:
                self.update()

    def publish(self, version: int) -> None:
        model, step = self.trainer.model, self.trainer.optimizer_step
        versions.publish(self.path / "policies", model, version, None, step, CANARY, self.config.model_name)

    def update(self) -> None:
        while (batch := self.poll()) is None:
            self.group()
        groups = self.state.train_groups(batch.batch_id)
        self.archive.outcomes(
            [
                TurnOutcome(s.rollout_id, batch.batch_id, batch.index, s.reward, s.advantage)
                for group in groups
                for s in group.samples
            ]
        ).result(DEADLINE_S)
        metrics = self.trainer.step(groups, self.config.temperature, version=batch.index)
        self.archive.updated(UpdateRow(batch.batch_id, batch.index + 1, metrics)).result(DEADLINE_S)
        self.publish(batch.index + 1)
        progress = checkpoints.LearnerProgress(version=batch.index + 1)
        checkpoints.save(self.path / "checkpoints", self.trainer, progress, keep_checkpoints=2)
        metrics = {"ess": metrics["ess"]}
        self.do(*self.state.trained(batch.batch_id, batch.index + 1, metrics, "", self.tick()))

    def poll(self) -> BatchMade | None:
        step = self.state.batch_step(self.tick())
        self.do(step)
        return step if isinstance(step, BatchMade) else None

    def group(self) -> None:
        admitted = self.state.admission(self.tick())
        assert admitted is not None
        for place, ask in enumerate(self.do(admitted)):
            assert isinstance(ask, AskTurn)
            self.rollout(ask, place)

    def rollout(self, ask: AskTurn, place: int) -> None:
        rollout_id, group_id, problem, purpose = ask
        request = self._manager.request(rollout_id, group_id, problem, purpose, 0)
        record = Record.of(request, *self.work(place))
        scored = self._manager.score(rollout_id, record, preset_for(group_id, self._presets, self.state))
        assert isinstance(scored, ScoredTurn)
        row = make_row(rollout_id, record, at=1.0, reward=scored.sample.reward)
        self.archive.add(row, record.encode()).result(DEADLINE_S)
        self.do(*self.state.ended(group_id, rollout_id, scored.sample, scored.stats, self.tick()))

    def work(self, place: int) -> Iterator[Work]:
        tokens = [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(2, 8))]
        logprobs = [-self._rng.uniform(3.5, 4.5) for _ in tokens]
        version = self.state.version
        yield Generation(version, [1, 2, 3], tokens, logprobs, "text", "stop", Candidate("src", "c"))
        built = Fault.COMPILE_ERROR if place == 0 else Fault.OK
        yield BuildReport(built)
        if built is Fault.OK:
            verdict = Fault.OK if self._rng.random() < 0.5 else Fault.INCORRECT
            yield BenchReport(Verdict(verdict, passed=2, total=4))

    def do(self, *commands: Command | None) -> list[Effect]:
        done = [command for command in commands if command is not None]
        effects = [effect for command in done for effect in self.state.do(command)]
        self.journal.append(done, [group.group_id for group in closed_in(effects)])
        return effects

    def tick(self) -> float:
        self._now += 1.0
        return self._now

    def sql(self, statement: str, *values: object) -> None:
        import sqlite3

        db = sqlite3.connect(self.path / FILE)
        db.execute(statement, values)
        db.commit()
        db.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return FakeRun(tmp_path_factory.mktemp("finished"), updates=3)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path, updates=1)


def test_a_replayed_run_makes_the_same_batches_advantages_updates_and_weights(finished: FakeRun) -> None:
    report = replay_run(finished.path, with_learner=True)
    assert report.divergence is None
    assert (report.batches, report.unrecorded) == (3, 0)
    assert report.rescored == finished.state.turns_scored > 0
    assert report.advantages == 3 * 2 * 3
    assert report.curve is not None
    assert (report.curve.updates, report.curve.exact, report.curve.worst) == (3, 3, 0.0)
    assert report.weights == "policy version 3: all weights equal bit by bit"
    assert report.counters["groups_admitted"] == finished.state.counters().groups_admitted


def test_another_recorded_loss_is_the_first_divergence(run: FakeRun) -> None:
    with ArchiveReader(run.path / FILE) as archive:
        (update,) = archive.updates()
    changed = msgspec.msgpack.encode({**update.metrics, "loss": update.metrics["loss"] + 0.1})
    run.sql("UPDATE updates SET metrics = ?", changed)
    divergence = replay_run(run.path, with_learner=True).divergence
    assert divergence is not None
    assert divergence.where == "loss of batch-000000"


def test_another_recorded_advantage_is_the_first_divergence(run: FakeRun) -> None:
    run.sql("UPDATE outcomes SET advantage = advantage + 1e-9")
    divergence = replay_run(run.path, with_learner=False).divergence
    assert divergence is not None
    assert "advantage of g000000.r0" in divergence.where


def test_a_journaled_score_that_its_record_does_not_earn_is_the_first_divergence(run: FakeRun) -> None:
    import sqlite3

    db = sqlite3.connect(run.path / JOURNAL_FILE)
    rows = db.execute("SELECT id, entry FROM entries ORDER BY id").fetchall()
    decoder = msgspec.msgpack.Decoder(Command)
    for key, blob in rows:
        entry = decoder.decode(blob)
        if isinstance(entry, RolloutEnded):
            better = msgspec.structs.replace(entry, stats=msgspec.structs.replace(entry.stats, reward=0.99))
            db.execute("UPDATE entries SET entry = ? WHERE id = ?", (msgspec.msgpack.encode(better), key))
            break
    db.commit()
    db.close()
    divergence = replay_run(run.path, with_learner=False).divergence
    assert divergence is not None
    assert "RolloutEnded" in divergence.where


def test_records_that_were_evicted_leave_the_decisions_replayable_and_the_updates_not(run: FakeRun) -> None:
    run.sql("DELETE FROM frames")
    report = replay_run(run.path, with_learner=False)
    assert report.divergence is None
    assert (report.rescored, report.unrecorded) == (0, run.state.turns_scored)
    with pytest.raises(CheckpointError, match="no longer holds"):
        replay_run(run.path, with_learner=True)


def test_a_run_whose_base_model_is_another_one_is_not_replayed(run: FakeRun) -> None:
    torch.manual_seed(7)
    model = Qwen2ForCausalLM.from_pretrained(run.config.model_name)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    model.save_pretrained(run.config.model_name)
    with pytest.raises(CheckpointError, match="not what the run began with"):
        replay_run(run.path, with_learner=True)


def test_a_batch_whose_loss_was_not_finite_changes_nothing_in_a_replay(run: FakeRun) -> None:
    again = RunJournal(run.path / JOURNAL_FILE)
    with again as journal, ArchiveWriter(run.path / FILE) as archive:
        run.journal, run.archive = journal, archive
        while (batch := run.poll()) is None:
            run.group()
        archive.updated(UpdateRow(batch.batch_id, batch.index, {})).result(DEADLINE_S)
        run.do(*run.state.trained(batch.batch_id, batch.index, {}, "loss is nan", run.tick()))
    report = replay_run(run.path, with_learner=True)
    assert report.divergence is None
    assert (report.batches, report.curve.updates) == (2, 1)  # type: ignore[union-attr]


def test_one_batch_of_the_archive_goes_through_the_loss_again_with_the_same_metrics(finished: FakeRun) -> None:
    report = replay_batch(finished.path, "batch-000002")
    assert (report.version, report.groups, report.samples, report.made_of) == (2, 2, 6, "the archive")
    assert "step-000002" in report.policy
    for name in ("loss", "grad_norm", "ess", "entropy", "ratio_p99"):
        assert report.replayed[name] == report.recorded[name], name


def test_without_its_checkpoint_a_batch_is_replayed_on_the_published_policy(finished: FakeRun) -> None:
    report = replay_batch(finished.path, "batch-000001")
    assert "policy-v1" in report.policy
    assert report.replayed["optimizer_step"] == report.recorded["optimizer_step"]


def test_a_kept_batch_is_found_first_and_names_why_it_was_kept(run: FakeRun) -> None:
    while (batch := _made(run)) is None:
        pass
    groups = run.state.train_groups(batch.batch_id)
    bad = msgspec.structs.replace(groups[0].samples[0], advantage=float("nan"))
    groups[0].samples[0] = bad
    frames = [msgspec.msgpack.encode(TrainBatch(batch.batch_id, batch.index, 1.0, batch.group_ids))]
    about = kept.About(batch.batch_id, batch.index, "nonfinite")
    kept.keep(run.path, [*frames, *batch_frames(groups)], about, 1 << 20)
    report = replay_batch(run.path, batch.batch_id)
    assert (report.made_of, report.reason) == (f"batches/{batch.batch_id}", "nonfinite")
    assert "not finite" in report.failure
    assert report.replayed == {}


def _made(run: FakeRun) -> BatchMade | None:
    with RunJournal(run.path / JOURNAL_FILE) as run.journal, ArchiveWriter(run.path / FILE) as run.archive:
        run.group()
        return run.poll()


def test_a_batch_that_never_was_is_an_error_with_a_cure(finished: FakeRun) -> None:
    with pytest.raises(UserError, match="no batch batch-000099"):
        replay_batch(finished.path, "batch-000099")


def test_an_adapter_is_replayed_bit_by_bit_too(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, updates=2, lora_rank=2)
    report = replay_run(run.path, with_learner=True)
    assert report.divergence is None
    assert report.curve is not None
    assert report.curve.exact == 2
    assert report.weights == "policy version 2: all weights equal bit by bit"
    assert replay_batch(run.path, "batch-000001").policy.startswith("checkpoint")


def test_a_rehearsal_without_its_weights_says_how_it_can_be_replayed(tmp_path: Path) -> None:
    """They are deleted at its end; the message was that of a model that nobody knows."""
    run = FakeRun(tmp_path, sampler=Sampler(forced="answers.json"))
    (Path(run.config.model_name) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="random weights of this rehearsal are no longer") as told:
        first_trainer(run.path, run.config)
    assert "--no-train" in told.value.cure
