"""The whole loop in one file and one process, step after step: what `kbrl train` does with six processes and queues.

    problem ─▶ prompt ─▶ sample ─▶ build ─▶ verify ─▶ time ─▶ reward ─▶ advantage ─▶ update ─▶ publish ─┐
                            ▲─────────────────────────── the next policy version ◀──────────────────────┘

    python examples/rl_loop.py --steps 2                      # the small policy, made at its first use
    python examples/rl_loop.py --steps 2 model_name=FOLDER    # a model of your own; any setting of `kbrl config`

On a CPU, for C kernels, at most one policy version old: every part is the one that a run uses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, Judge
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.verify import bench_options
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.learning.policies.versions import publish, version_folder
from kbrl_async.learning.trainer import Trainer
from kbrl_async.rollouts.prompts import render_prompt
from kbrl_async.rollouts.rewards.advantages import find_baseline
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.scoring import score
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config, load
from kbrl_async.sampling.engine import Engine
from kbrl_async.sampling.transformers.engine import TransformersEngine
from protocols.records import Candidate, Fault, Generation, Problem, RolloutRequest, SamplingParams, TrainGroup
from protocols.rollout import Record

SETTINGS = ("level=1", "batch_size=2", "group_size=4")
"""Two groups of four answers an update: enough to see how it works, too few to learn much."""


class Parts(NamedTuple):
    config: Config
    engine: Engine
    builder: Builder
    judge: Judge
    trainer: Trainer


async def sample(parts: Parts, request: RolloutRequest) -> Generation:
    """An answer: its tokens, the log-probs under which they were drawn, and the kernel in its text."""
    done = await parts.engine.generate(request.rollout_id, request.prompt, request.sampling)
    kernel = extract(done.text).source
    return Generation(
        done.policy_version,
        done.prompt_ids,
        done.token_ids,
        done.logprobs,
        done.text,
        done.finish_reason,
        Candidate(kernel, request.backend) if kernel else None,
        Fault.OK if kernel else Fault.FORMAT_ERROR,
    )


def follow(parts: Parts, request: RolloutRequest, answer: Generation) -> Record:
    """What becomes of an answer. It leaves at the first stage that it fails."""
    if answer.candidate is None:
        return Record.of(request, answer)
    build = parts.builder.build(answer.candidate, request.problem)  # static checks, then a confined compiler
    if build.fault is not Fault.OK:
        return Record.of(request, answer, build)
    # Secret inputs go to one process, another compares; what is correct is timed beside the reference.
    bench = parts.judge.judge(request.problem, answer.candidate, build)
    return Record.of(request, answer, build, bench)


async def roll_out(parts: Parts, problem: Problem, group_id: str) -> list[Record]:
    """`group_size` answers to one problem, each with what became of it."""
    config = parts.config
    prompt = render_prompt(config.prompt_option, problem, config.backend)
    sampling = SamplingParams(config.max_tokens, config.temperature)
    requests = [
        RolloutRequest(f"{group_id}.r{i}", group_id, problem, prompt, config.backend, sampling)
        for i in range(config.group_size)
    ]
    answers = await asyncio.gather(*(sample(parts, request) for request in requests))
    return [follow(parts, request, answer) for request, answer in zip(requests, answers, strict=True)]


def credit(config: Config, records: Sequence[Record]) -> TrainGroup:
    """Each answer's reward, and its advantage over the others of its group."""
    preset, *_ = find_presets(config.reward)
    turns = [turn for record in records if (turn := score(record, preset)) is not None]
    advantages = find_baseline(config.advantage, config.best_of_n)([turn.sample.reward for turn in turns])
    samples = [replace(turn.sample, advantage=a) for turn, a in zip(turns, advantages, strict=True)]
    request = records[0].request
    return TrainGroup(request.group_id, request.problem.problem_id, request.problem.level, samples)


async def serve(parts: Parts, base: str, policies: Path, version: int) -> None:
    """Publishes the policy with log-probs that prove which one it is; the engine loads it and checks them."""
    ids, texts = origins.canaries(parts.config, load_tokenizer(base))
    model = parts.trainer.model
    manifest = publish(policies, model, version, version - 1 if version else None, version, ids, base, texts=texts)
    await parts.engine.load(manifest, version_folder(policies, version))


def making(what: str, share: float) -> None:
    print(f"\rmaking the small policy: {share:4.0%} {what:30}", end="\n" if share >= 1 else "", file=sys.stderr)


def line(version: int, records: Sequence[Record], groups: Sequence[TrainGroup], metrics: dict[str, float]) -> str:
    """One step in one line."""
    compiled = sum(r.build is not None and r.build.fault is Fault.OK for r in records)
    correct = sum(r.fault is Fault.OK for r in records)
    speedups = [f"{r.timing.speedup:.2f}×" for r in records if r.timing is not None]
    rewards = [s.reward for group in groups for s in group.samples]
    return (
        f"policy {version}: {', '.join(g.problem_id for g in groups)}: {len(records)} answers, {compiled} compiled, "
        f"{correct} correct ({', '.join(speedups) or 'nothing to time'}), mean reward {sum(rewards) / len(rewards):.3f}"
        f" ─▶ policy {version + 1}, loss {metrics['loss']:.4f}"
    )


async def run(config: Config, steps: int) -> None:
    problems = [problem for problem in load_problems(levels=config.levels) if problem.split != "heldout"]
    draw = random.Random(config.seed)
    base = str(origins.base_model(config, making))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = ArtifactStore(folder / "artifacts")
        builder = stack.enter_context(Builder(store, config.compile_farm))
        judge = stack.enter_context(Judge(store, bench_options(config.timing_bench)))
        engine = TransformersEngine(load_model(base), load_tokenizer(base), config.sampler)
        trainer = Trainer(load_model(base, lora_rank=config.lora_rank), config)
        parts = Parts(config, engine, builder, judge, trainer)
        await serve(parts, base, folder, 0)
        for version in range(steps):
            groups, records = [], []
            for number, problem in enumerate(draw.sample(problems, config.batch_size)):
                answers = await roll_out(parts, problem, f"g{version * config.batch_size + number:06d}")
                groups.append(credit(config, answers))
                records += answers
            metrics = trainer.step(groups, config.temperature, version=version)
            print(line(version, records, groups, metrics))
            await serve(parts, base, folder, version + 1)
        await engine.close()


def main(*settings: str) -> None:
    """`settings` stand before those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="updates of the policy")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, as of kbrl train")
    args = parser.parse_args()
    asyncio.run(run(load(overrides=[*SETTINGS, *settings, *args.settings]), args.steps))


if __name__ == "__main__":
    main()
