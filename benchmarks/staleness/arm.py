"""One arm of the staleness study: a training run in one process whose samples are exactly S versions old.

::

    versions v0 … vt in memory ─ v(t−S) ─▶ sampler ─▶ build, verify (or the verdict of the same source) ─▶ reward
          ▲                                                                                              │
          └──────────────── v(t+1) ◀─ Trainer.step ◀─ groups with advantages ◀─────────────────────────────┘

All but the order of events is the run's own: prompts, running batch, builder, bench, scoring, advantages, trainer.

Invariants
* Update t trains on samples of version max(0, t − S), never on others.
* Problems and random numbers depend on seed and update alone, so arms of a seed differ by S and correction only.
* A verdict is taken from the cache only for the same problem and the same source, and host faults are never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.harness import CORES, CORRECT_ONLY, ONE_THREAD, Result, rounded
from benchmarks.harness.crew import Work
from kbrl_async.errors import InfraError, NonFiniteLoss
from kbrl_async.kernels.funnel import Verifier, VerifyOptions
from kbrl_async.kernels.settings import CompileFarm, TimingBench
from kbrl_async.kernels.verify import bench_options
from kbrl_async.learning.policies.models import DTYPES, load_model, load_tokenizer
from kbrl_async.learning.trainer import Trainer
from kbrl_async.rollouts.buffer.batching import train_groups
from kbrl_async.rollouts.buffer.buffer import rollout_ids
from kbrl_async.rollouts.buffer.group import Group
from kbrl_async.rollouts.buffer.rules import BatchRules
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.scoring import ScoredTurn, score
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.planning import plan_of
from kbrl_async.sampling.engine import Completion
from kbrl_async.sampling.transformers.engine import completion_of
from kbrl_async.sampling.transformers.running_batch import BatchStats, RunningBatch, RunningSequence
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    SamplingParams,
    TrainGroup,
    TrainSample,
    Verdict,
)
from protocols.rollout import Frame, Record
from services.learner.policy import make_trainer
from services.sampler.generation import to_generation

EVALUATION = -1
"""Less the version, it stands for the update in the random numbers of an evaluation."""
UPDATE_FACTS = ("ess", "mismatch_kl", "grad_norm", "grad_norm_max", "entropy", "dropped_share", "masked_share",
                "ratio_max", "staleness_max", "loss")  # fmt: skip


class StudySetting(msgspec.Struct, frozen=True):
    """What all arms of a study share."""

    name: str = "default"
    updates: int = 20
    words: tuple[str, ...] = ()
    """Settings as `kbrl train` takes them."""
    problems: int = 8
    """So many of the training problems, spread over them: few, so that a policy can learn all in a short run."""
    sampler: str = "fp32"
    """Number format of the sampler's weights and arithmetic; the learner's is fp32."""
    eval_samples: int = 4
    """Answers to each training problem by each policy that is evaluated."""
    eval_last: int = 3
    """So many of the last policies are evaluated together: an unstable run goes up and down from one to the next."""


class Arm(msgspec.Struct, frozen=True):
    setting: str
    correction: str
    staleness: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.setting}/{self.correction}/S{self.staleness}/seed{self.seed}"


class ArmResult(msgspec.Struct, frozen=True):
    """One line of the results."""

    arm: Arm
    updates: int
    """That were made: fewer than asked for where a loss or gradient was not finite."""
    before: dict[str, float]
    after: dict[str, float]
    """`reward`, `correct`, `compiled` of fresh answers of the first policy, and of the last ones."""
    history: list[dict[str, float]]
    """By update: the batch's `reward`, `correct`, `compiled`, and the trainer's own metrics."""
    seconds: dict[str, float]
    """Of this process for writing and training; of the wall clock for verdicts, which come from other processes."""
    verified: int
    """Candidates that were built and verified for this arm; the others had a verdict already."""
    failure: str = ""


def source_version(update: int, staleness: int) -> int:
    """The version that writes the samples of an update; the first ones have nothing older than version 0."""
    return max(0, update - staleness)


def evaluated_versions(updates: int, last: int) -> list[int]:
    """The last policies of a run of so many updates, never the one that it began with."""
    return list(range(max(min(1, updates), updates + 1 - last), updates + 1))


def spread(problems: Sequence[Problem], wanted: int) -> list[Problem]:
    """`wanted` of them at even distances: a suite lists its easy problems first."""
    count = min(wanted, len(problems))
    return [problems[number * len(problems) // count] for number in range(count)]


def config_of(setting: StudySetting, words: Sequence[str], seed: int, policy: str) -> Config:
    """As `kbrl train` would make it: checked, and `words` of the arm win over those of the setting."""
    given = [f"model_name={policy}", f"seed={seed}", f"max_steps={setting.updates}", "max_minutes=null"]
    fixed = ["prompt.option=compact", "learner.threads=1"]
    return load([], [*CORRECT_ONLY, *given, *fixed, *setting.words, *words])


class Verdicts:
    """Builds and verifies candidates, each source of a problem once: in a file that several processes share."""

    def __init__(self, path: Path, verifier: Verifier | None = None) -> None:
        self._verifier, self.verified = verifier, 0
        self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        for words in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=OFF"):
            self._db.execute(words)
        self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, frames BLOB) WITHOUT ROWID")

    def get(self, problem: Problem, candidate: Candidate) -> list[BuildReport | BenchReport] | None:
        row = self._db.execute("SELECT frames FROM verdicts WHERE key = ?", (_key(problem, candidate),)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0], type=list[BuildReport | BenchReport])

    def put(self, problem: Problem, candidate: Candidate, frames: Sequence[BuildReport | BenchReport]) -> None:
        value = msgspec.msgpack.encode([_plain(frame) for frame in frames])
        self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (_key(problem, candidate), value))

    def frames(self, problem: Problem, candidate: Candidate) -> list[BuildReport | BenchReport]:
        found = self.get(problem, candidate)
        if found is None:
            try:
                found = self._both(problem, candidate)
            except InfraError:  # a crowded host; what it ended is made anew
                found = self._both(problem, candidate)
            self.verified += 1
            self.put(problem, candidate, found)
        return found

    def _both(self, problem: Problem, candidate: Candidate) -> list[BuildReport | BenchReport]:
        assert self._verifier is not None
        build = self._verifier.build(candidate, problem)
        if build.fault is not Fault.OK:
            return [build]
        return [build, self._verifier.judge("cpu").judge(problem, candidate, build, timing=False)]

    def close(self) -> None:
        self._db.close()


def _plain(frame: BuildReport | BenchReport) -> BuildReport | BenchReport:
    """What a reward depends on: words and clock times go."""
    if isinstance(frame, BuildReport):
        return BuildReport(frame.fault)
    return BenchReport(Verdict(frame.verdict.fault, frame.verdict.passed, frame.verdict.total))


def _key(problem: Problem, candidate: Candidate) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode([problem.source, candidate.backend, candidate.source])).digest()


@contextlib.contextmanager
def working(policy: str, cache: Path, first_core: int, number: int, jobs: int) -> Iterator[Work]:
    """What a worker does with an arm, on a core of its own with one thread."""
    cores = [core for core in CORES if core >= first_core]
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    options = VerifyOptions(farm=CompileFarm(deadline_s=20.0), bench=bench_options(TimingBench(), "cpu", references=64))
    with Verifier("cpu", options) as verifier, contextlib.closing(Verdicts(cache, verifier)) as verdicts:

        def run(given: tuple[Arm, StudySetting, Sequence[str]]) -> Result:
            outcome = Study(*given, policy, verdicts).run()
            return {"state": "ok", **rounded(msgspec.to_builtins(outcome))}

        yield run


def with_advantages(
    problems: Mapping[str, Problem], samples: Mapping[str, Sequence[TrainSample]], version: int, rules: BatchRules
) -> list[TrainGroup]:
    """The same problems in every arm: a group whose rewards are all alike stays, with advantages of 0."""
    groups = [
        Group(name, problem.problem_id, problem.level, len(samples[name]), version,
              {one.rollout_id: [one] for one in samples[name]})
        for name, problem in problems.items()
    ]  # fmt: skip
    return train_groups(groups, rules)


class MemorySampler:
    """Writes with the weights of any version that is still in memory, in a number format of its own."""

    def __init__(self, policy: str, dtype: str, keep: int) -> None:
        self._model = load_model(policy).to(DTYPES[dtype]).requires_grad_(False)
        self._tokenizer = load_tokenizer(policy)
        self._versions: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=keep)

    def publish(self, version: int, model: torch.nn.Module) -> None:
        self._versions.append((version, {name: w.detach().clone() for name, w in model.state_dict().items()}))

    def write(self, version: int, requests: Sequence[RolloutRequest], seeds: Sequence[str]) -> list[Generation]:
        """One answer to each request, all at once; the random numbers of an answer depend on its seed alone."""
        self._model.load_state_dict(dict(self._versions)[version])
        batch = RunningBatch(version, self._model, frozenset({int(self._tokenizer.eos_token_id)}), BatchStats())
        sequences = [
            RunningSequence(r.rollout_id, self._tokenizer.encode(r.prompt, add_special_tokens=False), r.sampling,
                   random.Random(seed), started_at=time.time())
            for r, seed in zip(requests, seeds, strict=True)
        ]  # fmt: skip
        batch.join(sequences)
        while batch.rows:
            batch.step()
        return [
            to_generation(self._completion(s, version), r, "study") for s, r in zip(sequences, requests, strict=True)
        ]

    def _completion(self, done: RunningSequence, version: int) -> Completion:
        text = self._tokenizer.decode(done.token_ids, skip_special_tokens=True)
        return completion_of(done, text, version, time.time())


class Study:
    """One arm, from the first policy to the last."""

    def __init__(self, arm: Arm, setting: StudySetting, words: Sequence[str], policy: str, judge: Verdicts) -> None:
        self.arm, self.setting, self._judge = arm, setting, judge
        self._config = config_of(setting, words, arm.seed, policy)
        self._plan = plan_of(self._config)
        self._training = spread(self._plan.training, setting.problems)
        self._preset = find_presets(msgspec.structs.replace(self._config.reward, preset="stage2"))[0]
        self._trainer: Trainer = make_trainer(self._config, policy, "cpu")
        self._sampler = MemorySampler(policy, setting.sampler, max(arm.staleness + 1, setting.eval_last))
        self._sampler.publish(0, self._trainer.model)
        self.seconds = {"generate": 0.0, "verify": 0.0, "train": 0.0}

    def run(self) -> ArmResult:
        verified = self._judge.verified
        before = self.evaluate([0])
        history: list[dict[str, float]] = []
        failure = ""
        for update in range(self.setting.updates):
            try:
                history.append(self.update(update))
            except NonFiniteLoss as error:
                failure = str(error)
                break
        after = dict.fromkeys(before, 0.0)
        if not failure:
            after = self.evaluate(evaluated_versions(len(history), self.setting.eval_last))
        verified = self._judge.verified - verified
        return ArmResult(self.arm, len(history), before, after, history, self.seconds, verified, failure)

    def update(self, update: int) -> dict[str, float]:
        """One batch and the version that it makes."""
        version = source_version(update, self.arm.staleness)
        problems = {f"g{update}-{number}": problem for number, problem in enumerate(self._problems(update))}
        scored = self._rollouts(version, update, list(problems.items()), self._config.group_size)
        samples = {name: [one.sample for one in turns] for name, turns in scored.items()}
        given = with_advantages(problems, samples, version, self._plan.buffer)
        started = time.process_time()
        metrics = self._trainer.step(given, self._config.temperature, version=update)
        self.seconds["train"] += time.process_time() - started
        self._sampler.publish(update + 1, self._trainer.model)
        facts = {name: metrics[name] for name in UPDATE_FACTS if name in metrics}
        return {**_rates([one for members in scored.values() for one in members]), **facts}

    def evaluate(self, versions: Sequence[int]) -> dict[str, float]:
        """Fresh answers of these versions to all training problems."""
        asked = [(f"eval-{problem.problem_id}", problem) for problem in self._training]
        scored = [self._rollouts(v, EVALUATION - v, asked, self.setting.eval_samples) for v in versions]
        return _rates([one for each in scored for members in each.values() for one in members])

    def _problems(self, update: int) -> list[Problem]:
        """In turn, in an order that is drawn anew for each pass."""
        wanted, training = self._config.batch_size, self._training
        order: list[Problem] = []
        for lap in range(math.ceil((update + 1) * wanted / len(training))):
            members = list(training)
            random.Random(f"{self.arm.seed}/{lap}").shuffle(members)
            order += members
        return order[update * wanted : (update + 1) * wanted]

    def _rollouts(
        self, version: int, update: int, asked: Sequence[tuple[str, Problem]], size: int
    ) -> dict[str, list[ScoredTurn]]:
        """`size` scored answers for each (group, problem)."""
        config, sampling = self._config, SamplingParams(self._config.max_tokens, self._config.temperature)
        requests = [
            RolloutRequest(rollout_id, group_id, problem, render_prompt(config.prompt_option, problem, config.backend),
                           config.backend, sampling)
            for group_id, problem in asked
            for rollout_id in rollout_ids(group_id, size)
        ]  # fmt: skip
        seeds = [f"{self.arm.seed}/{update}/{number}" for number in range(len(requests))]
        started = time.process_time()
        written = self._sampler.write(version, requests, seeds)
        self.seconds["generate"] += time.process_time() - started
        began = time.perf_counter()
        scored: dict[str, list[ScoredTurn]] = {group_id: [] for group_id, _ in asked}
        for request, generation in zip(requests, written, strict=True):
            scored[request.group_id].append(self._scored(request, generation))
        self.seconds["verify"] += time.perf_counter() - began
        return scored

    def _scored(self, request: RolloutRequest, generation: Generation) -> ScoredTurn:
        frames: list[Frame] = [request, generation]
        if generation.candidate is not None:
            frames += self._judge.frames(request.problem, generation.candidate)
        found = score(Record.of(*frames), self._preset)
        if found is None:
            raise InfraError(f"{request.rollout_id} ended without a verdict", "Run the arm again")
        return found


def _rates(scored: Sequence[ScoredTurn]) -> dict[str, float]:
    n = len(scored)
    return {
        "reward": sum(one.sample.reward for one in scored) / n,
        "correct": sum(one.stats.correct for one in scored) / n,
        "compiled": sum(one.stats.compiled for one in scored) / n,
    }
