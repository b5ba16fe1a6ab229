"""The other ends of `benchmarks/sampler.py`, in a process of its own: asks for rollouts, and takes the results."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kbrl_async.runs.folder import load_run
from protocols.messages import Stage, Task
from protocols.records import Generation, Problem, RolloutRequest, SamplingParams
from services.runtime import Outcome, Producer, Worker, addresses

GROUP = 8
AHEAD = 1.5
"""Rollouts under way for each that the engine takes at once: what the broker holds ready, as with (S+1)·P groups."""
encode = msgspec.msgpack.encode
_GENERATION = msgspec.msgpack.Decoder(Generation)


def work(vocabulary: int, tokens: int, answer: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """(prompt, length of its answer): each prompt `GROUP` times; lengths differ by half, or all would end at once."""
    rng = random.Random(seed)
    while True:
        text = " ".join(f"t{rng.randrange(2, vocabulary)}" for _ in range(tokens))
        for _ in range(GROUP):
            yield text, rng.randint(answer // 2, answer + answer // 2)


async def ask(asked: argparse.Namespace) -> None:
    found = addresses(asked.run, load_run(asked.run))
    room = asyncio.Semaphore(int(asked.at_once * AHEAD))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    delivered = tokens = 0

    async def take(task: Task, frames: list[bytes]) -> Outcome:
        nonlocal delivered, tokens
        generation = _GENERATION.decode(frames[1])
        assert len(generation.logprobs) == len(generation.token_ids)
        delivered, tokens = delivered + 1, tokens + len(generation.token_ids)
        room.release()
        return Outcome()

    problem = Problem("L1/01_b", 1, "b", "")
    worker = Worker(found.work, "consumer", [Stage.SCORE], 64, take)
    working = asyncio.create_task(worker.run(stop))
    async with Producer(found.submit) as producer:
        sending: set[asyncio.Task[bool]] = set()
        source = work(asked.vocabulary, asked.prompt_tokens, asked.max_tokens, asked.seed)
        for number, (prompt, length) in enumerate(source):
            await _either(room.acquire(), stop)
            if stop.is_set():
                break
            request = RolloutRequest(f"{asked.leg}-{number}", "", problem, prompt, "c", SamplingParams(length))
            sent = asyncio.create_task(producer.submit(f"{asked.leg}-{number}", Stage.GENERATE, [encode(request)]))
            sending.add(sent)
            sent.add_done_callback(sending.discard)
        for sent in sending:
            sent.cancel()
    worker.stop()
    await working
    print(msgspec.json.encode({"delivered": delivered, "tokens": tokens}).decode(), flush=True)


async def _either(work: object, stop: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]  # type: ignore[arg-type]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--leg", required=True)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(ask(parser.parse_args()))


if __name__ == "__main__":
    main()
