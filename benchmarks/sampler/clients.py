"""The other ends of `benchmarks.sampler service`, in a process of their own, without torch."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.harness import Commands, packed
from kbrl_async.runs.folder import load_run
from protocols.messages import Stage, Task
from protocols.records import Generation, Problem, RolloutRequest, SamplingParams
from services.runtime import HandlerOutcome, Producer, Worker, addresses

commands = Commands("sampler.clients", __doc__)
GROUP = 8
AHEAD = 1.5
"""Rollouts under way for each that the engine takes at once: what the broker holds ready, as with (S+1)·P groups."""


def work(vocabulary: int, tokens: int, answer: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """(prompt, length of its answer): each prompt `GROUP` times; lengths differ by half, or all would end at once."""
    rng = random.Random(seed)
    while True:
        text = " ".join(f"t{rng.randrange(2, vocabulary)}" for _ in range(tokens))
        for _ in range(GROUP):
            yield text, rng.randint(answer // 2, most_of(answer))


def most_of(answer: int) -> int:
    """Tokens of the longest answer."""
    return answer + answer // 2


@commands
async def ask(
    run: Path, leg: str, at_once: int, vocabulary: int, prompt_tokens: int, max_tokens: int, seed: int, /
) -> None:
    """Asks for rollouts, and takes the results, until it is stopped."""
    found = addresses(run, load_run(run))
    room, stop = asyncio.Semaphore(int(at_once * AHEAD)), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    decode = msgspec.msgpack.Decoder(Generation).decode
    delivered = tokens = 0

    async def take(task: Task, frames: list[bytes]) -> HandlerOutcome:
        nonlocal delivered, tokens
        generation = decode(frames[1])
        assert len(generation.logprobs) == len(generation.token_ids)
        delivered, tokens = delivered + 1, tokens + len(generation.token_ids)
        room.release()
        return HandlerOutcome()

    sending: set[asyncio.Task[bool]] = set()

    async def send(producer: Producer) -> None:
        for number, (prompt, length) in enumerate(work(vocabulary, prompt_tokens, max_tokens, seed)):
            await room.acquire()
            name, problem = f"{leg}-{number}", Problem("L1/01_b", 1, "b", "")
            request = RolloutRequest(name, "", problem, prompt, "c", SamplingParams(length))
            sent = asyncio.create_task(producer.submit(name, Stage.GENERATE, [packed(request)]))
            sending.add(sent)
            sent.add_done_callback(sending.discard)

    worker = Worker(found.work, "consumer", [Stage.SCORE], 64, take)
    working = asyncio.create_task(worker.run(stop))
    async with Producer(found.submit) as producer:
        sender = asyncio.create_task(send(producer))
        await stop.wait()
        for waiting in (sender, *sending):
            waiting.cancel()
    worker.stop()
    await working
    print(json.dumps({"delivered": delivered, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    commands.main()
