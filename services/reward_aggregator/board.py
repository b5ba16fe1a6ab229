"""What people see of a run: TensorBoard, a line per update, the best kernels on disk, and the summary at the end."""

from __future__ import annotations

import time

import msgspec

from kbrl_async.config import config_hash
from kbrl_async.config.rundir import SUMMARY_FILE
from kbrl_async.durable import write_atomically
from kbrl_async.telemetry import summary, system_metrics, training_metrics
from kbrl_async.telemetry.summary import RunCounters
from kbrl_async.telemetry.system_metrics import SystemSample, Tail
from kbrl_async.telemetry.tensorboard import Writer
from kbrl_async.telemetry.training_metrics import RolloutStats
from protocols.records import UpdateReport
from services.reward_aggregator.campaign import AFTER, BEFORE, Campaign
from services.reward_aggregator.scoring import Scored
from services.runtime.service import Service

KERNELS = "kernels"


class Board:
    """Reads the campaign, never changes it."""

    def __init__(self, service: Service, campaign: Campaign) -> None:
        self._service = service
        self._campaign = campaign
        settings = service.config.tensorboard
        folder = service.run_dir / "tensorboard"
        self._training = Writer(folder / "training") if settings.enabled else None
        self._system = Writer(folder / "system") if settings.enabled else None
        self._tail = Tail(service.run_dir / "metrics" / "system.jsonl")
        self._samples: list[SystemSample] = []
        scored = [*campaign.rollouts, *campaign.heldout(BEFORE), *campaign.heldout(AFTER)]
        self._best: dict[str, float] = {}
        for stats in scored:
            if stats.file:
                self._best[stats.problem_id] = max(stats.speedup_lo or 0.0, self._best.get(stats.problem_id, 0.0))

    def keep_kernel(self, scored: Scored) -> RolloutStats:
        """The rollout's statistics; with a file where its kernel is the fastest of its problem so far."""
        stats, timing = scored.stats, scored.timing
        if timing is None or scored.candidate is None or timing.lo <= self._best.get(stats.problem_id, 0.0):
            return stats
        self._best[stats.problem_id] = timing.lo
        name = f"{KERNELS}/{stats.problem_id.replace('/', '_')}.py"
        path = self._service.run_dir / name
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, scored.candidate.source)
        return msgspec.structs.replace(stats, file=name)

    def updated(self, report: UpdateReport, rollouts: list[RolloutStats], counters: RunCounters) -> None:
        """One update: a line on the terminal, and everything of it in TensorBoard."""
        rates = training_metrics.outcome_rates(rollouts)
        shown = {name: round(value, 3) for name, value in rates.items() if name not in ("format_rate", "cheat_rate")}
        ages = [r.staleness for r in rollouts if r.staleness is not None]
        self._service.log.info("update", policy_version=report.policy_version, **shown, age=max(ages, default=0))
        if self._training is None:
            return
        settings, step = self._service.config.tensorboard, report.policy_version
        self._training.scalars(
            training_metrics.scalars(rollouts, per_level=settings.per_level)
            | training_metrics.policy_scalars(report.metrics)
            | {f"groups/{name}": float(value) for name, value in msgspec.structs.asdict(counters).items()},
            step,
        )
        if step % settings.histograms_every == 0:
            for tag, values in msgspec.structs.asdict(training_metrics.histograms(rollouts)).items():
                self._training.histogram(f"histogram/{tag}", values, step)
        self._training.flush()

    def tick(self) -> None:
        """Takes in what the broker has written about the whole system since the last tick."""
        for sample in self._tail.new():
            previous = self._samples[-1] if self._samples else None
            self._samples.append(sample)
            if self._system is not None:
                self._system.scalars(system_metrics.scalars(previous, sample), int(sample.t), sample.t)
        if self._system is not None:
            self._system.flush()

    def finish(self, seconds: float) -> summary.Summary:
        """Writes `summary.json`, the sign that the run has ended; returns its content."""
        self.tick()
        campaign = self._campaign
        ended = time.time() - max(0.0, seconds - campaign.last_update)
        begun = ended - max(0.0, campaign.last_update - (campaign.first_result or 0.0))
        content = summary.build(
            counters=campaign.counters(),
            rollouts=campaign.rollouts,
            wall_s=ended - begun,
            busy=system_metrics.busy_fractions(self._samples, begun, ended),
            heldout_before=campaign.heldout(BEFORE),
            heldout_after=campaign.heldout(AFTER),
            extra={
                "run": self._service.run_dir.name,
                "seed": self._service.config.seed,
                "config_hash": config_hash(self._service.config),
                "failed_reasons": dict(campaign.book.reasons),
                "total_s": seconds,
            },
        )
        for writer in (self._training, self._system):
            if writer is not None:
                writer.close()
        summary.write(self._service.run_dir / SUMMARY_FILE, content)
        return content
