"""A run folder of any size that no run made, written by the writers that runs use: for tests and the benchmark.

The policy gets better, problems differ in hardness, and every fault occurs. Times are those of a run in which the bench
is the bottleneck.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec

from kbrl_async.rollouts.buffer.events import Admitted, BatchMade, BatchTrained, RolloutScored
from kbrl_async.rollouts.stats import RolloutStats, StepOutcome
from kbrl_async.runs import summary
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, GroupEnd, TurnOutcome, TurnRow, UpdateRow, make_row
from kbrl_async.runs.commands import Command, Evaluated, RolloutEnded
from kbrl_async.runs.run_journal import RunJournal
from kbrl_async.runs.telemetry import training_metrics
from kbrl_async.runs.telemetry.by_version import Tally
from kbrl_async.runs.telemetry.tensorboard import Writer
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    Timing,
    Verdict,
)  # fmt: skip
from protocols.rollout import Frame, Record

EPOCH = 1_780_000_000.0
WARM_UP_S = 40.0
GROUP, BATCH = 8, 8
SOURCE = '''import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel
SOURCE = r"""
#include <math.h>
void run(const float *a, float *out, long n) {{
    for (long i = 0; i < n; i++) out[i] = {expression};  // attempt {number}
}}
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "run")

    def forward(self, x):
        out = torch.empty_like(x)
        self.kernel(x, out, x.numel())
        return out
'''
REFERENCE = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)\n"
FAULTS = (
    Fault.FORMAT_ERROR, Fault.STATIC_VIOLATION, Fault.COMPILE_ERROR, Fault.RUNTIME_ERROR, Fault.INCORRECT,
    Fault.CHEATING,
)  # fmt: skip
WEIGHTS = (3, 2, 8, 2, 10, 0.3)


def make(
    folder: Path,
    rollouts: int,
    *,
    problems: int = 48,
    rate: float = 4.0,
    turns: int = 1,
    hostile: str = "",
    seed: int = 0,
) -> Path:
    """A finished run of so many training rollouts, `rate` a second. `hostile`: the source of the best kernel."""
    return _Maker(folder, problems, rate, turns, hostile, seed).run(rollouts)


class _Maker:
    def __init__(self, folder: Path, problems: int, rate: float, turns: int, hostile: str, seed: int) -> None:
        self.folder, self.rate, self.turns, self.hostile = folder, rate, turns, hostile
        self.random = random.Random(seed)
        self.problems = [
            Problem(f"L{i % 3 + 1}/{i:02d}_problem_{i}", i % 3 + 1, f"problem_{i}", REFERENCE, self.random.random())
            for i in range(problems)
        ]
        self.stats: list[RolloutStats] = []
        self.entries: list[Command] = []
        self.tally = Tally()

    def run(self, rollouts: int) -> Path:
        for name in ("logs", "metrics", "kernels"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        groups = max(BATCH, rollouts // (GROUP * self.turns))
        self.groups = groups
        with ArchiveWriter(self.folder / FILE) as archive, RunJournal(self.folder / "aggregator.sqlite") as journal:
            before = self._evaluate(archive, "eval-before", 0, WARM_UP_S)
            for number in range(groups // BATCH):
                self._batch(archive, number)
            self.length = WARM_UP_S + groups * GROUP * self.turns / self.rate + 20
            after = self._evaluate(archive, "eval-after", groups // BATCH, self.length - 10)
            journal.append(self.entries)
        self._system()
        self._curves()
        self._texts(before, after)
        return self.folder

    def _batch(self, archive: ArchiveWriter, number: int) -> None:
        group_ids = [f"g{number * BATCH + i:06d}" for i in range(BATCH)]
        seconds = BATCH * GROUP * self.turns / self.rate
        start = WARM_UP_S + number * seconds
        for i, group_id in enumerate(group_ids):
            problem = self.problems[(number * BATCH + i) % len(self.problems)]
            asked = start + i * seconds / BATCH
            self.entries.append(Admitted(group_id, problem.problem_id, problem.level, GROUP, number, asked))
            for r in range(GROUP):
                self._rollout(archive, group_id, f"{group_id}.r{r}", problem, number, asked)
        made, trained = start + seconds, start + seconds + 2.0
        batch = f"batch-{number:06d}"
        self.entries += [
            BatchMade(batch, number, group_ids, made), BatchTrained(batch, number + 1, trained),
        ]  # fmt: skip
        share = number * BATCH / self.groups
        metrics = {
            "loss": -0.2 - 0.1 * share,
            "entropy": 0.4 - 0.2 * share,
            "grad_norm": 0.3,
            "mismatch_kl": 0.01,
            "ess": 0.97,
        }
        archive.ended([GroupEnd(g, self.problems[0].problem_id, "trained") for g in group_ids])
        archive.updated(UpdateRow(batch, number + 1, metrics, EPOCH + made + 0.1, EPOCH + trained))

    def _rollout(
        self, archive: ArchiveWriter, group_id: str, rollout_id: str, problem: Problem, version: int, asked: float
    ) -> None:
        for turn in range(self.turns):
            key = rollout_id if turn == 0 else f"{rollout_id}.t{turn}"
            written = max(0, version - self.random.choice((0, 1, 1, 2)))
            record, stats = self._record(rollout_id, group_id, problem, written, asked + 3 * turn, turn)
            at = asked + 3 * turn + 2.5 + self.random.random()
            archive.add(self._row(key, record, stats, at, "train"), record.encode())
            archive.outcomes([TurnOutcome(key, f"batch-{version:06d}", version, stats.reward, 0.1)])
            self.entries += [RolloutEnded(rollout_id, group_id, stats), RolloutScored(group_id, rollout_id, [], at)]
            self.stats.append(stats)
            self.tally.answered(group_id, stats)

    def _evaluate(self, archive: ArchiveWriter, phase: str, version: int, asked: float) -> list[RolloutStats]:
        found = []
        for number, problem in enumerate(self.problems[: max(2, len(self.problems) // 8)]):
            for sample in range(4):
                heldout = msgspec.structs.replace(
                    problem, problem_id=f"L{problem.level}/{90 + number}_heldout_{number}"
                )
                key = f"{phase}.{heldout.problem_id}.{sample}"
                record, stats = self._record(key, phase, heldout, version, asked, 0)
                purpose = phase.removeprefix("eval-")
                archive.add(self._row(key, record, stats, asked + 3, purpose), record.encode())
                self.entries.append(Evaluated(phase, key, stats, asked + 3))
                found.append(stats)
        return found

    def _row(self, key: str, record: Record, stats: RolloutStats, at: float, purpose: str) -> TurnRow:
        return make_row(key, record, at=EPOCH + at, clock=at, purpose=purpose, reward=stats.reward)

    def _record(
        self, rollout_id: str, group_id: str, problem: Problem, version: int, asked: float, turn: int
    ) -> tuple[Record, RolloutStats]:
        draw = self.random
        skill = version * BATCH / self.groups + 0.2 * turn
        is_good = draw.random() < 1 / (1 + math.exp(4 * problem.difficulty - 3 * skill - 0.2))
        fault = Fault.OK if is_good else draw.choices(FAULTS, WEIGHTS)[0]
        speedup = (
            math.exp(draw.gauss(1.2 * (skill - 0.5) + 0.8 * (0.5 - problem.difficulty), 0.25)) if is_good else None
        )
        source = SOURCE.format(expression="tanhf(a[i])", number=draw.randrange(10**6))
        if self.hostile and is_good and version == 0 and not any(s.speedup == 50.0 for s in self.stats):
            source, speedup = self.hostile, 50.0
        start = EPOCH + asked + draw.random()
        candidate = None if fault is Fault.FORMAT_ERROR else Candidate(source, "c")
        frames: list[Frame] = [
            RolloutRequest(
                rollout_id, group_id, problem, "write a kernel", "c", SamplingParams(256), turn=turn,
                admitted_version=version, admitted_at=EPOCH + asked,
            ),
            Generation(
                version, [1] * 60, list(range(80)), [-0.1] * 80, source, "stop", candidate,
                Fault.FORMAT_ERROR if candidate is None else Fault.OK, "", "sampler.1", start, start + 0.4,
            ),
        ]  # fmt: skip
        built = fault not in (Fault.STATIC_VIOLATION, Fault.COMPILE_ERROR)
        if candidate is not None:
            rule = "calls_torch" if fault is Fault.STATIC_VIOLATION else ""
            frames.append(BuildReport(
                Fault.OK if built else fault, {}, "" if built else self._message(), "", rule,
                worker_id="compile_farm.1",
                started_at=start + 0.6, finished_at=start + 0.7,
            ))  # fmt: skip
            if built:
                frames.append(_bench(fault, speedup, start + 1.2))
        return Record.of(*frames), _stats(rollout_id, problem, fault, speedup, version, turn)

    def _message(self) -> str:
        """Of a compiler: one of three mistakes, on some line, or what a candidate made it say."""
        line, name = self.random.randrange(90), self.random.randrange(9)
        said = ["expected ';' before '}' token", f"'b{name}' undeclared (first use in this function)", self.hostile]
        return f"kernel.c:{line}:21: error: {self.random.choice(said) or 'stray'}\n   note: {self.hostile}"

    def _curves(self) -> None:
        with Writer(self.folder / "tensorboard" / "training") as board:
            for number in range(self.groups // BATCH):
                batch = self.stats[number * BATCH * GROUP * self.turns :][: BATCH * GROUP * self.turns]
                board.scalars(training_metrics.scalars(batch), number + 1)

    def _system(self) -> None:
        lines = []
        for second in range(int(self.length)):
            training = second > WARM_UP_S
            busy = self.random.random()
            workers = {
                "sampler.1": {"stages": ["generate"], "busy": 0.4 * busy * training},
                "compile_farm.1": {"stages": ["compile"], "busy": 0.6 * busy * training},
                "timing_bench.1": {"stages": ["bench"], "busy": 0.97 * training},
                "reward_aggregator.1": {"stages": ["score"], "busy": 0.02 * training},
                "learner.1": {"stages": ["train"], "busy": float(not training or second % 16 < 2)},
            }
            queues = {
                "generate": 0 if training else 200,
                "compile": int(6 * busy) * training,
                "bench": int(60 * busy) * training,
            }
            lines.append(json.dumps({
                "t": EPOCH + second, "queues": queues, "oldest_s": {"bench": 8.0 * busy * training},
                "workers": workers, "broker": {"busy": 0.02},
            }))  # fmt: skip
        (self.folder / "metrics" / "system.jsonl").write_text("\n".join(lines) + "\n")

    def _texts(self, before: list[RolloutStats], after: list[RolloutStats]) -> None:
        counts = summary.RunCounters(
            groups_admitted=self.groups, groups_trained=self.groups, groups_filtered=0, groups_dropped_stale=0,
            groups_failed=0, rollouts=len(self.stats), updates=self.groups // BATCH, max_staleness=2,
        )  # fmt: skip
        made = summary.build(
            counters=counts, answers=self.tally.answers(), wall_s=self.length, busy={}, heldout_before=before,
            heldout_after=after,
            extra={"run": self.folder.name, "seed": 0, "config_hash": "0123456789ab"},
        )  # fmt: skip
        summary.write(self.folder / "summary.json", made)
        (self.folder / "config.yaml").write_text(
            "model_name: small\nbackend: c\nloss: grpo\nmode: single_turn\napi_key: hidden-value\n"
        )
        warning = {
            "process": "sampler.1",
            "level": "warning",
            "event": "slow <b>step</b>",
            "timestamp": "2026-05-28T20:28:20Z",
        }
        (self.folder / "logs" / "sampler.1.jsonl").write_text(json.dumps(warning) + "\n{torn")


def _bench(fault: Fault, speedup: float | None, start: float) -> BenchReport:
    timing = None
    if speedup is not None:
        timing = Timing(20, speedup, speedup * 0.93, speedup * 1.08, 0.1 / speedup, 0.1, hardware="a CPU")
    rule = "returned_inputs" if fault is Fault.CHEATING else ""
    return BenchReport(Verdict(fault, 5, 5, rule=rule), timing, "timing_bench.1", start, start + 0.22)


def _stats(
    rollout_id: str, problem: Problem, fault: Fault, speedup: float | None, version: int, turn: int
) -> RolloutStats:
    has_code = fault is not Fault.FORMAT_ERROR
    is_built = has_code and fault not in (Fault.STATIC_VIOLATION, Fault.COMPILE_ERROR)
    steps = [StepOutcome("format", has_code)]
    if has_code:
        steps.append(StepOutcome("static", fault is not Fault.STATIC_VIOLATION, 0.001))
    if has_code and fault is not Fault.STATIC_VIOLATION:
        steps.append(StepOutcome("compile", is_built, 0.08))
    if is_built:
        steps.append(StepOutcome("full_inputs", fault is Fault.OK, 0.05))
    reward = 0.05 * has_code + 0.15 * is_built + (0.3 + min(0.5, 0.2 * (speedup or 0.0)) if fault is Fault.OK else 0.0)
    return RolloutStats(
        problem_id=problem.problem_id, level=problem.level, reward=reward, format=has_code, compiled=is_built,
        correct=fault is Fault.OK, cheated=fault is Fault.CHEATING, speedup=speedup,
        speedup_lo=speedup and speedup * 0.93, speedup_hi=speedup and speedup * 1.08, turn=turn, tokens=80,
        policy_version=version, seconds={"generate": 0.4, "compile": 0.1, "bench": 0.22, "queue": 0.7},
        rollout_id=rollout_id, fault=str(fault), funnel=tuple(steps),
    )  # fmt: skip
