"""The learner's state: makes or loads the first policy, resumes, trains a batch, checkpoints and publishes."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.errors import InfraError, NonFiniteLoss, RunError
from kbrl_async.learning import checkpoints, kept
from kbrl_async.learning.engine import KeepsSnapshots, LearnerEngine
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.remote import RemotePolicies, open_remote
from kbrl_async.learning.replay_log import ReplayLog
from kbrl_async.learning.settings import LEARNER_ENGINES
from kbrl_async.learning.sft import without_behaviour
from kbrl_async.runs.telemetry.live import LEARNER_FACTS
from protocols.records import TrainBatch, TrainGroup, UpdateReport
from services.learner.policy import may_skip_files, sender_of, setup_of
from services.learner.publishing import Publisher
from services.runtime.service import Service, Stopped

KEPT_VERSIONS = 4
"""Published versions on disk beyond the allowed lag."""
REMEMBERED = 64
"""Batches that are known again. What a broker has lost of its journal is a second's work, not so many updates."""

LOOK_S = 0.05
LONG_S = 5.0
"""What training waits for less long needs no care."""
SHARE = 0.1
"""Of the time, that training may wait for checkpoints longer than that."""


class UpdateLost(RuntimeError):  # noqa: N818 - reads as the sentence it prints
    """Trained, and neither kept nor published. Not a KbrlError: the nanny starts this process again, which does that
    from the last checkpoint and the batches after it."""


class CheckpointPace:
    """A checkpoint is due every `every` updates. It is put off while the one before is still being written, and, where
    that kept training waiting for long, until no more than `SHARE` of the time goes into them: the batches since the
    last checkpoint are on disk, so what is put off is only trained again after a crash.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._is_owed = False
        self._not_before = -float("inf")

    def is_due(self, version: int, is_saving: bool) -> bool:
        """After the update that made this version."""
        self._is_owed = self._is_owed or version % self._every == 0
        return self._is_owed and not is_saving and self._clock() >= self._not_before

    @property
    def is_put_off(self) -> bool:
        """Whether one is due and was not written, when last asked."""
        return self._is_owed

    def took(self, seconds: float) -> None:
        """One was begun, for which training waited so long."""
        self._is_owed = False
        if seconds > LONG_S:
            self._not_before = self._clock() + seconds * (1 - SHARE) / SHARE


class Learning:
    """The one owner of the weights."""

    def __init__(self, service: Service, engine: LearnerEngine) -> None:
        self._service = service
        self._engine = engine
        self.progress = checkpoints.LearnerProgress()
        self._remote = open_remote(service.config.policy_url)
        may_skip = isinstance(engine, KeepsSnapshots) and may_skip_files(service.config)
        self._publisher = Publisher(service.policies, sender_of(service, engine), skips=may_skip)
        self._replay_log = ReplayLog(self._checkpoints)
        self._pace = CheckpointPace(service.config.learner.checkpoint_every)
        self._trained_again = 0
        self._is_lost = False
        """Nobody knows what has become of the engine's weights."""

    @classmethod
    def open(cls, service: Service, is_stopped: Callable[[], bool]) -> Learning | None:
        """Loads or makes the policy, restores the newest checkpoint, publishes what is missing.

        Takes minutes where the small policy must be made; None when the run is stopped meanwhile.
        """
        try:
            engine: LearnerEngine = LEARNER_ENGINES.load(service.config.learner.engine)(setup_of(service, is_stopped))
        except Stopped:
            return None
        learning = cls(service, engine)
        learning.resume()
        return learning

    def close(self) -> None:
        self._publisher.finish()
        self._engine.close()
        self._publisher.close()

    async def failed(self) -> None:
        """Raises where a version could not be written, as `train` would; never returns."""
        try:
            await self._publisher.failed()
        except InfraError as error:
            raise UpdateLost(str(error)) from error

    @property
    def is_remote(self) -> bool:
        """It computes nothing here."""
        return self._engine.is_remote

    @property
    def version(self) -> int:
        return self.progress.version

    @property
    def _checkpoints(self) -> Path:
        return self._service.run_dir / "checkpoints"

    def resume(self) -> None:
        is_new = not self._rebuild(lambda: None)
        found = versions.newest(self._service.policies)
        is_there = found is not None and found[0].version == self.version
        if found is None or not is_there or (self._trained_again and not self._engine.adopt(found[1])):
            self.publish()
        if is_new:  # after the policy: samplers start meanwhile, and a new learner makes the same one again
            self._checkpoint()

    def _rebuild(self, tick: Callable[[], None]) -> bool:
        """The newest checkpoint that can be read, and what was trained since; False where there is none."""
        resumed = self._engine.resume()
        self._is_lost = False
        if resumed is None:
            return False
        for note in resumed.notes:
            self._service.log.warning("checkpoint passed over", note=note)
        self.progress = resumed.progress
        for batch, groups in self._replay_log.since(self.version):
            self._step(batch, groups, tick)
        self._trained_again = self.version - resumed.progress.version
        about = {"checkpoint": resumed.folder.name, "trained_again": self._trained_again}
        words = f"resumed at policy version {self.version}"
        self._service.log.info("resumed", policy_version=self.version, **about, shown=words)
        return True

    def train(self, batch: TrainBatch, groups: list[TrainGroup], tick: Callable[[], None]) -> UpdateReport:
        """One update on `batch`; the same report again for the batch that was trained last, one without metrics for an
        earlier one: a broker that has lost the end of its journal gives out once more what has ended.
        """
        started = time.time()
        if batch.batch_id == self.progress.last_batch_id:
            return UpdateReport(batch.batch_id, self.version, self.progress.last_metrics, started, time.time())
        if self.progress.trained.get(batch.batch_id) == _digest(batch):
            return UpdateReport(batch.batch_id, batch.index + 1, {}, started, time.time())
        if batch.index != self.version and not self._is_lost:
            raise RunError(
                f"{batch.batch_id} is for policy version {batch.index} and the learner has {self.version}",
                "The run's checkpoints and its journal belong to different states; restore both or start a new run",
            )
        try:
            metrics = self._made(batch, groups, tick)
        except NonFiniteLoss as error:
            return self._refuse(batch, error, started, tick)
        self._replay_log.add(batch, groups)
        try:
            metrics = {**metrics, **self._kept()}
        except InfraError as error:
            raise UpdateLost(str(error)) from error
        self._service.tell({name: metrics[name] for name in LEARNER_FACTS if name in metrics})
        self._service.log.info(
            "updated",
            policy_version=self.version,
            loss=round(metrics.get("loss", 0.0), 4),
            entropy=round(metrics.get("entropy", 0.0), 4),
            seconds=round(time.time() - started, 2),
            shown="",  # the aggregator's line of the update has what people look for
        )
        return UpdateReport(batch.batch_id, self.version, metrics, started, time.time())

    def keep(self, batch: TrainBatch, tick: Callable[[], None]) -> UpdateReport:
        """Returns when the newest version, `batch.index`, and a checkpoint of it are on disk; `batch` has no groups."""
        started = time.time()
        try:
            if self._is_lost:
                self._go_back(batch, tick)
            while self._is_being_written or checkpoints.newest(self._checkpoints) != self.version:
                if not self._is_being_written:
                    self._checkpoint()  # raises what has kept the one before from the disk
                tick()
                time.sleep(LOOK_S)
        except InfraError as error:
            raise UpdateLost(str(error)) from error
        if self.version != batch.index:
            self._service.log.warning("another version is the last", policy_version=self.version, expected=batch.index)
        return UpdateReport(batch.batch_id, self.version, {}, started, time.time())

    @property
    def _is_being_written(self) -> bool:
        return self._engine.is_saving or not self._publisher.is_done

    def _kept(self) -> dict[str, float]:
        """Checkpoint, if one is due, and publication of what was trained."""
        begun, is_due = time.monotonic(), self._pace.is_due(self.version, self._engine.is_saving)
        if is_due:
            self._checkpoint()
            self._pace.took(time.monotonic() - begun)
        elif self._pace.is_put_off:
            self._service.log.debug("checkpoint put off", policy_version=self.version)
        took = {"time/checkpoint_s": time.monotonic() - begun} if is_due else {}
        self.publish()
        return took

    def _made(self, batch: TrainBatch, groups: list[TrainGroup], tick: Callable[[], None]) -> dict[str, float]:
        """One update; made again from the last checkpoint where the engine has lost it. InfraError where it does so
        twice: the batch comes again."""
        for is_last in (False, True):
            try:
                if self._is_lost:
                    self._go_back(batch, tick)
                return self._step(batch, groups, tick)
            except InfraError as error:
                self._is_lost = True
                if is_last:
                    raise
                self._service.log.warning("update lost", batch=batch.batch_id, reason=str(error))
        raise AssertionError("unreachable")

    def _go_back(self, batch: TrainBatch, tick: Callable[[], None]) -> None:
        """To what it was before the batch: some of its optimiser steps may have been taken."""
        if not self._rebuild(tick) or self.version != batch.index:
            raise RunError(f"no checkpoint of version {batch.index} to go back to", "Continue the run")

    def _step(self, batch: TrainBatch, groups: list[TrainGroup], tick: Callable[[], None]) -> dict[str, float]:
        metrics = self._engine.step(groups, batch.temperature, tick, self.version)
        if self._service.config.method == "sft":
            metrics = without_behaviour(metrics)
        metrics |= self._engine.usage(metrics)
        self.progress = checkpoints.LearnerProgress(
            version=self.version + 1,
            last_batch_id=batch.batch_id,
            batches=self.progress.batches + 1,
            samples=self.progress.samples + sum(len(group.samples) for group in groups),
            tokens=self.progress.tokens + int(metrics["response_tokens"]),
            last_metrics=metrics,
            trained=dict([*self.progress.trained.items(), (batch.batch_id, _digest(batch))][-REMEMBERED:]),
        )
        return metrics

    def _refuse(
        self, batch: TrainBatch, error: NonFiniteLoss, started: float, tick: Callable[[], None]
    ) -> UpdateReport:
        self._go_back(batch, tick)
        self._service.log.error("batch refused", batch=batch.batch_id, reason=str(error), policy_version=self.version)
        return UpdateReport(batch.batch_id, self.version, {}, started, time.time(), str(error))

    def _checkpoint(self) -> None:
        self._engine.save(self.progress, self._service.config.learner.keep_checkpoints)
        self._replay_log.forget(before=checkpoints.oldest(self._checkpoints))

    def publish(self) -> None:
        """Begins to: a copy of the weights is taken, the rest goes on beside the next update."""
        being_written = self._publisher.free()
        if isinstance(self._engine, KeepsSnapshots):
            self._engine.keep(being_written)
        pending = self._engine.publish(self.version, self.version - 1 if self.version else None)
        then = functools.partial(self._published, self.version)
        if pending is None:
            then()
        else:
            self._publisher.begin(pending, then)

    def _published(self, version: int) -> None:
        """Deletes what is old, here and where versions are uploaded to. In the publisher's thread."""
        keep, held = KEPT_VERSIONS + self._service.config.max_staleness, versions.held(self._service.policies)
        needed = {*held.values(), *kept.versions_needed(self._service.run_dir)}
        self._engine.collect(keep, needed)
        if self._remote is not None:
            self._upload(self._remote, version, keep, needed)

    def _upload(self, remote: RemotePolicies, version: int, keep: int, needed: set[int]) -> None:
        """A store that is away for a while costs a version there, not the run."""
        try:
            remote.publish(versions.version_folder(self._service.policies, version))
            remote.collect_garbage(keep, needed)
        except InfraError as error:
            self._service.log.error("policy not uploaded", policy_version=version, reason=str(error))


def _digest(batch: TrainBatch) -> str:
    """What it is made of: an older journal that was put back has other groups in a batch of the same number."""
    return hashlib.sha256(msgspec.msgpack.encode(batch)).hexdigest()
