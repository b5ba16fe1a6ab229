"""What people see of a run: TensorBoard, a line per update, the best kernels on disk, and the summary at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kbrl_async.durable import numbered, write_atomically
from kbrl_async.evaluation.heldout import AFTER, BEFORE
from kbrl_async.evaluation.metrics import heldout_scalars
from kbrl_async.evaluation.rounds import Round
from kbrl_async.kernels.problems.split import held_out_kinds
from kbrl_async.learning.policies import manifests
from kbrl_async.rollouts.buffer.events import BatchTrained
from kbrl_async.rollouts.scoring import ScoredTurn
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs import origins, summary
from kbrl_async.runs.commands import Command
from kbrl_async.runs.config import config_hash
from kbrl_async.runs.config.keys import flat
from kbrl_async.runs.demonstrations import dataset
from kbrl_async.runs.folder import SUMMARY_FILE
from kbrl_async.runs.run_state import RunState
from kbrl_async.runs.settling import SettledVersions
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry import by_version, progress, system_metrics, training_metrics
from kbrl_async.runs.telemetry.by_version import Answers, VersionRange
from kbrl_async.runs.telemetry.live import RESULT_FACTS
from kbrl_async.runs.telemetry.progress import Reporter
from kbrl_async.runs.telemetry.sinks import open_output, open_sinks
from kbrl_async.runs.telemetry.system_metrics import SystemSample, Tail
from kbrl_async.runs.telemetry.tensorboard import event_folder
from kbrl_async.runs.telemetry.tracing import open_traces
from kbrl_async.weights import POLICY_PREFIX
from protocols.records import UpdateReport
from protocols.rollout import Record
from services.runtime.service import Service

KERNELS = "kernels"
_SHORT = {"answers_of": "", "reward_mean": "reward", "speedup_mean": ""}
CHEATING_TOLD = 0.1
"""Share of an update's rollouts caught cheating above which it is said: the policy cheats, or a defence is wrong."""


class MetricsWriter:
    """Reads the run's state, never changes it."""

    def __init__(self, service: Service, state: RunState, history: Iterable[Command] = ()) -> None:
        """`history`: the commands of a run that is continued; their versions have been told."""
        self._service = service
        self._state = state
        settings = service.config.tensorboard
        folder = event_folder(service.run_dir, settings.log_dir) if settings.enabled else None
        self._sinks = open_sinks(service.config.metrics, service.run_dir, flat(service.config))
        without = ("Turns",) if service.config.mode == "single_turn" else ()
        self._traces = open_traces(service.run_dir.name, service.config.metrics.otlp_endpoint)
        self._begun: float | None = None
        # a continued run reads the broker's lines from their beginning; the first part has been written
        self._from = time.time() if state.clock else 0.0
        self._training = open_output("training", folder, self._sinks, without)
        self._system = open_output("system", folder, self._sinks, without)
        self._per_level = settings.per_level
        self._lines = service.run_dir / "metrics" / "system.jsonl"
        self._tail = Tail(self._lines)
        self._previous: SystemSample | None = None
        self._versions = SettledVersions()
        self._versions.note(history)
        self._last_update: tuple[float, int] | None = None
        self._newest: VersionRange | None = next(reversed(self._versions.new(state.version)), None)
        self._reporter = Reporter(service.run_dir, service.log)
        self._has_policy = False
        """Until there is one, the learner says how things stand."""
        self._best = dict(state.fastest)
        for stats in [*state.heldout(BEFORE), *state.heldout(AFTER)]:
            if stats.file:
                self._best[stats.problem_id] = max(stats.speedup_lo or 0.0, self._best.get(stats.problem_id, 0.0))

    def keep_kernel(self, scored: ScoredTurn) -> RolloutStats:
        """The rollout's statistics; with a file where its kernel is the fastest of its problem so far, as
        far as its time can be compared."""
        stats, timing = scored.stats, scored.timing
        if timing is None or scored.candidate is None or timing.is_disturbed:
            return stats
        if timing.lo <= self._best.get(stats.problem_id, 0.0):
            return stats
        self._best[stats.problem_id] = timing.lo
        name = f"{KERNELS}/{stats.problem_id.replace('/', '_')}.py"
        path = self._service.run_dir / name
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, scored.candidate.source)
        return msgspec.structs.replace(stats, file=name)

    def trace(self, record: Record, scored: ScoredTurn | None) -> None:
        """The way of one turn, if the run is traced."""
        if self._traces is not None:
            self._traces.add(record, scored.sample.reward if scored else None)

    def note(self, commands: Sequence[Command]) -> None:
        """What was done; a version whose last answers have come in is told."""
        self._versions.note(commands)
        if any(isinstance(command, BatchTrained) for command in commands):
            self._tell_versions(self._state.version)

    def _tell_versions(self, newest: float) -> None:
        for part in self._versions.new(newest):
            self._newest = part
            if self._training is not None:
                self._training.scalars(by_version.scalars(part, per_level=self._per_level), part.last)

    def updated(self, report: UpdateReport, rollouts: list[RolloutStats], counters: RunCounters) -> None:
        """One update: a line on the terminal, and everything of it in TensorBoard.

        What the line says of answers is of the newest version all of whose answers are in. Those that cheat are told of
        at once.
        """
        caught = training_metrics.outcome_rates(rollouts).get("cheat_rate", 0.0)
        rates = training_metrics.outcome_rates(self._newest.stats) if self._newest else {}
        told = {name: value for name, value in rates.items() if name not in ("format_rate", "cheat_rate")}
        told |= {"cheat_rate": caught} if caught else {}
        shown: dict[str, float] = {"answers_of": self._newest.last} if self._newest else {}
        shown |= {name: round(value, 3) for name, value in told.items()}
        if not rollouts and "loss" in report.metrics:  # demonstrations: nobody wrote them here
            shown = {name: round(report.metrics[name], 4) for name in ("loss", "perplexity") if name in report.metrics}
        ages = [r.staleness for r in rollouts if r.staleness is not None]
        words = f"update {report.policy_version}/{self._service.config.max_steps} {in_words(shown)}"
        self._service.log.info(
            "update", policy_version=report.policy_version, **shown, age=max(ages, default=0), shown=words
        )
        if caught > CHEATING_TOLD:
            self._tell_of_cheating(caught, [r for r in rollouts if r.cheated])
        settings, step = self._service.config.tensorboard, report.policy_version
        scalars = (
            training_metrics.scalars(rollouts)
            | training_metrics.policy_scalars(report.metrics)
            | {f"groups/{name}": float(value) for name, value in msgspec.structs.asdict(counters).items()}
            | {f"alarm/{name}": float(level) for name, level in self._state.alarm_levels.items()}
            | self._progress(report, counters)
        )
        self._tell(rates, max(ages, default=0), step, scalars)
        if self._training is None:
            return
        self._training.scalars(scalars, step)
        if step == 1:
            self._tell_heldout(BEFORE, 0)
        if step % settings.histograms_every == 0:
            for tag, values in msgspec.structs.asdict(training_metrics.histograms(rollouts)).items():
                self._training.histogram(f"histogram/{tag}", values, step)
        self._training.flush()

    def _progress(self, report: UpdateReport, counters: RunCounters) -> dict[str, float]:
        """How far the run is, and what the update took; rates are since the update before, if that was seen."""
        now = (report.finished_at, counters.rollouts)
        before, self._last_update = self._last_update, now
        return training_metrics.progress(
            report.policy_version,
            self._service.config.max_steps,
            train_s=report.finished_at - report.started_at,
            since=None if before is None else (now[0] - before[0], now[1] - before[1]),
        )

    def _tell_heldout(self, phase: str, version: int) -> None:
        """What the evaluation before or after training says of its version."""
        if self._training is not None:
            self._training.scalars(heldout_scalars(self._state.heldout(phase)), version)

    def _tell_of_cheating(self, share: float, caught: list[RolloutStats]) -> None:
        problem, times = Counter(r.problem_id for r in caught).most_common(1)[0]
        example = next(r.rollout_id for r in caught if r.problem_id == problem)
        self._service.log.warning(
            "many are caught cheating, or a defence is wrong",
            share=round(share, 3),
            most=f"{problem} ×{times}",
            look=f"kbrl inspect {example}",
        )

    def _tell(self, rates: dict[str, float], age: int, updates: int, scalars: dict[str, float]) -> None:
        config = self._service.config
        limits = {"max_steps": config.max_steps, "max_staleness": config.max_staleness}
        shown = {name: rates[name] for name in RESULT_FACTS if name in rates}
        if self._newest is not None:
            shown["answers_of"] = self._newest.last
            scalars = scalars | training_metrics.version_scalars(self._newest.stats, per_level=self._per_level)
        self._service.tell({**shown, "updates": updates, "age": age, **limits}, scalars)

    def round_begun(self, version: int) -> None:
        """Held-out problems are asked of this version, so the learner keeps it until it is known what it is worth."""
        manifests.hold(self._service.policies, best=self._state.best_version, evaluated=version)

    def evaluated(self, done: Round) -> None:
        """What the held-out problems say of a version, on the terminal and in TensorBoard at that version."""
        manifests.hold(self._service.policies, best=self._state.best_version, evaluated=None)
        figures = done.figures
        shown = {tag.removeprefix("eval/"): round(value, 3) for tag, value in figures.items()}
        words = f"evaluated version {done.version}  {in_words(shown)}"
        self._service.log.info("evaluated", policy_version=done.version, **shown, shown=words)
        if self._training is not None:
            self._training.scalars(figures, done.version)
            self._training.flush()

    def tick(self, now: float | None = None) -> None:
        """Takes in what the broker has written about the whole system since the last tick, and says how far the run is.

        :param now: of the run's own clock.
        """
        if now is not None and (self._has_policy or numbered(self._service.policies, POLICY_PREFIX)):
            self._has_policy = True
            self._reporter.tell(*phase_of(self._state, now))
        for sample in self._tail.new():
            if self._begun is None:
                self._begun = system_metrics.begun(self._service.run_dir, sample.t)
            if self._system is not None and sample.t >= self._from:
                seconds = max(0, int(sample.t - self._begun))
                self._system.scalars(system_metrics.scalars(self._previous, sample), seconds, sample.t)
            self._previous = sample
        if self._system is not None:
            self._system.flush()

    def finish(self, seconds: float, answers: Answers) -> summary.Summary:
        """Writes `summary.json`, the sign that the run has ended; returns its content.

        :param answers: all of training.
        """
        self.tick()
        self._tell_versions(math.inf)
        self._tell_heldout(AFTER, self._state.version)
        state = self._state
        ended = time.time() - max(0.0, seconds - state.last_update)
        begun = ended - max(0.0, state.last_update - (state.first_result or 0.0))
        content = summary.build(
            counters=state.counters(),
            answers=answers,
            wall_s=ended - begun,
            busy=self._busy(begun, ended),
            heldout_before=state.heldout(BEFORE),
            heldout_after=state.heldout(AFTER),
            kinds=held_out_kinds([*state.plan.training, *state.plan.heldout]),
            extra={
                "run": self._service.run_dir.name,
                "seed": self._service.config.seed,
                **dataset.described(self._service.config, self._service.run_dir),
                "config_hash": config_hash(self._service.config),
                "failed_reasons": dict(state.reasons),
                "heldout_by_version": {str(done.version): done.figures for done in state.rounds_ended},
                "total_s": seconds,
                **self._beginning(),
                "versions": summary.versions(),
            },
        )
        for writer in (self._training, self._system, self._sinks):
            if writer is not None:
                writer.close()
        summary.write(self._service.run_dir / SUMMARY_FILE, content)
        return content

    def _beginning(self) -> dict[str, str]:
        """Where the small policy was cut, if it was."""
        found = manifests.newest(self._service.policies)
        reached = origins.cut(found[0].base_model) if found else ""
        return {"small_policy_cut": reached} if reached else {}

    def _busy(self, begun: float, ended: float) -> dict[str, float]:
        """Of what the broker's lines still say: those of a very long run's first days are gone."""
        oldest = next((sample.t for sample in system_metrics.written(self._lines)), begun)
        return system_metrics.busy_fractions(system_metrics.written(self._lines), max(begun, oldest), ended)


def in_words(figures: Mapping[str, float]) -> str:
    """`reward 0.41 compile 71% 0.83×`: short enough for one line of a terminal."""
    names = {name: _SHORT.get(name, name.removesuffix("_rate")) for name in figures if name != "fast_1_proven"}
    return " ".join(f"{short} {_figure(name, figures[name])}".strip() for name, short in names.items())


def _figure(name: str, value: float) -> str:
    if name == "speedup_mean":
        return f"{value:.2f}×"
    if name == "answers_of":
        return f"v{value:.0f}:"
    return f"{value:.0%}" if name.endswith("_rate") or name.startswith("fast_") else f"{value:.2f}"


class Phase(NamedTuple):
    """The arguments of `progress.Reporter.tell`."""

    phase: str
    note: str
    share: float
    limit_s: float | None = None


def phase_of(state: RunState, now: float) -> Phase:
    """At `now` of the run's own clock."""
    if state.has_trained:
        return _evaluation(state, AFTER, progress.AFTER)
    if not state.may_train:
        return _evaluation(state, BEFORE, progress.BEFORE)
    updates, wanted = state.updates, state.plan.buffer.max_steps
    limit, begun = state.plan.max_minutes, state.first_result
    left = None if limit is None or begun is None else 60 * limit - (now - begun)
    return Phase(progress.TRAINING, f"update {updates} of {wanted}", updates / wanted, left)


def _evaluation(state: RunState, phase: str, shown: str) -> Phase:
    ended, total = state.evaluated(phase)
    return Phase(shown, f"{ended} of {total} answers", ended / total if total else 1.0)
