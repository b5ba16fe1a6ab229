"""Tokens per second through the whole sampler service against bare vLLM, on one engine, in turns.

    python -m benchmarks.sampler [--shape 7b] [--update full] [--at-once 64,256] [--swap-s 62] [--every-s 30]

::

    bare:     this process ─────────────────────────────────────────────────────▶ AsyncLLM.generate
    service:  clients (a process) ─▶ broker (a process) ─▶ Worker ─▶ Sampling ─▶ VLLMEngine ─▶ the same AsyncLLM
    swap:     the same, and a new policy version is published every 30 s

Weights are random, so that nobody stops early, and adapters too: their canaries are taken from the engine beforehand.
All legs are of the same adapter rank, answer length and groups of 8 that share a prompt. Tokens are those that the
engine wrote in the second part of each leg, when it is full; legs of a kind alternate and their medians are compared.
A pause is the longest time in there without a token of anybody. With --update full the weights themselves are replaced
while everybody writes: two sets of them are made in the temporary folder, 31 GB for the shape 7b.
On a CPU: --shape tiny. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.sampler_clients import work
from benchmarks.sampler_model import Shape, make_tokenizer, shape_of, write_adapter, write_config, write_weights
from kbrl_async.durable import file_sha256
from kbrl_async.runs.config import Config, available_cores, cpu_layout, load
from kbrl_async.runs.folder import prepare
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.vllm.engine import VLLMEngine
from kbrl_async.sampling.vllm.options import VLLMOptions
from kbrl_async.sampling.vllm.proof import COMPARED, rows
from kbrl_async.sampling.vllm.start import launch
from kbrl_async.sampling.vllm.versions import Served
from kbrl_async.weights import FILES
from protocols.messages import Stage, Task
from protocols.records import PolicyVersion
from services.runtime import Outcome, Worker, addresses
from services.runtime.quiet import Gate
from services.runtime.service import Service
from services.sampler.actor import Sampling

CANARY = list(range(2, 34))
WARM = 0.4
"""Share of a leg until the engine is full and steady."""
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


class Quiet:
    """A log that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_facts: None


class Bench:
    """One engine, one broker, and the legs."""

    def __init__(self, asked: argparse.Namespace, folder: Path, engine: VLLMEngine, shape: Shape) -> None:
        self.asked, self.folder, self.engine, self.shape = asked, folder, engine, shape
        words = [f"log_path={folder / 'runs'}", f"sampler.slots={max(asked.at_once)}", "sampler.engine=vllm"]
        run = prepare(load(overrides=[*words, f"lora_rank={asked.rank}", f"max_tokens={asked.max_tokens}"]))
        self.run_dir, self.config = run.path, run.config
        self.swaps: list[float] = []
        self.pauses: dict[str, float] = {}
        self._legs = itertools.count()

    @property
    def meter(self) -> Any:
        return self.engine._meter

    async def bare(self, at_once: int) -> float:
        """`at_once` callers that ask the AsyncLLM itself, one answer after the other."""
        served = self.engine._live.acquire()
        sizes = self.shape.vocabulary, self.asked.prompt_tokens, self.asked.max_tokens
        source = work(*sizes, seed=next(self._legs) + 1000)
        encode = self.engine._tokenizer.encode

        async def caller(name: int) -> None:
            for turn in itertools.count():
                text, length = next(source)
                prompt = {"type": "token", "prompt_token_ids": encode(text, add_special_tokens=False)}
                params = self.engine._parts.sampling_params(
                    max_tokens=length,
                    temperature=1.0,
                    stop_token_ids=self.engine._stop_ids,
                    logprobs=0,
                    detokenize=False,
                    output_kind=self.engine._parts.final_only,
                    **({"flat_logprobs": True} if self.engine._parts.flat_logprobs else {}),
                )
                key = f"bare-{id(source)}-{name}-{turn}"
                async for _ in self.engine._llm.generate(prompt, params, key, **self.engine._with_lora(served)):
                    pass

        callers = [asyncio.create_task(caller(name)) for name in range(at_once)]
        try:
            rate = await self._rate(f"bare {at_once}", self.asked.leg_s)
            for task in callers:
                if task.done():
                    task.result()  # a caller never ends by itself
            return rate
        finally:
            for task in callers:
                task.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            self.engine._live.release(served)

    async def service(self, at_once: int, seconds: float, *, swapping: bool = False) -> float:
        """The whole service, with its own worker for this number of slots."""
        async with self._service(at_once):
            publisher = asyncio.create_task(self._publish()) if swapping else None
            try:
                return await self._rate(f"{'swap' if swapping else 'service'} {at_once}", seconds)
            finally:
                if publisher is not None:
                    publisher.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await publisher

    @contextlib.asynccontextmanager
    async def _service(self, at_once: int) -> AsyncIterator[None]:
        leg = f"leg{next(self._legs)}"
        found = addresses(self.run_dir, self.config)
        service = make_service(self.run_dir, self.config)

        async def generate(task: Task, frames: list[bytes]) -> Outcome:
            return await sampling.generate(task, frames)

        worker = Worker(found.work, f"sampler-{leg}", [Stage.GENERATE], at_once, generate, wedge_s=60.0)
        sampling = Sampling(service, self.engine, worker.gate, worker.progress)
        self.meter.tick = worker.progress
        stop = asyncio.Event()
        tasks = [asyncio.create_task(worker.run(stop)), asyncio.create_task(sampling.watch(0.1))]
        words = ["--run", str(self.run_dir), "--leg", leg, "--at-once", str(at_once), "--seed", leg.removeprefix("leg")]
        sizes = {"max-tokens": self.asked.max_tokens, "prompt-tokens": self.asked.prompt_tokens}
        sizes["vocabulary"] = self.shape.vocabulary
        words += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        clients = subprocess.Popen([sys.executable, "-m", "benchmarks.sampler_clients", *words], stdout=subprocess.PIPE)
        try:
            yield
        finally:
            clients.send_signal(signal.SIGTERM)
            out = await asyncio.to_thread(clients.communicate)
            say(f"{leg}: {out[0].decode().strip()}")
            stop.set()
            await tasks[0]
            tasks[1].cancel()

    async def _rate(self, leg: str, seconds: float) -> float:
        """Tokens per second in the later part of a leg, whose longest pause is noted."""
        warming = WARM * seconds if seconds < 30 else 10.0
        await asyncio.sleep(warming)
        tokens, since = self.meter.generated_tokens, time.monotonic()
        pause = await self._longest_pause(seconds - warming)
        self.pauses[leg] = round(max(pause, self.pauses.get(leg, 0.0)), 3)
        return float((self.meter.generated_tokens - tokens) / (time.monotonic() - since))

    async def _longest_pause(self, seconds: float) -> float:
        """Returns after so many seconds; the longest time meanwhile in which nobody got a token, to 10 ms."""
        begun = last = now = time.monotonic()
        tokens, longest = self.meter.generated_tokens, 0.0
        while now < begun + seconds:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            if self.meter.generated_tokens != tokens:
                tokens, last = self.meter.generated_tokens, now
            longest = max(longest, now - last)
        return longest

    async def _publish(self) -> None:
        """A new version at once, and then every so often: as a learner would."""
        while True:
            version = self.engine.policy_version + 1
            begun = time.monotonic()
            await publish(self.run_dir / "policies", self.folder, version, self.asked.base)
            while self.engine.policy_version < version:
                await asyncio.sleep(0.05)
            self.swaps.append(round(time.monotonic() - begun, 2))
            say(f"policy v{version} is served, {self.swaps[-1]} s after it was published")
            await asyncio.sleep(max(0.0, self.asked.every_s - (time.monotonic() - begun)))


def make_service(run_dir: Path, config: Config) -> Service:
    layout = cpu_layout(config, available_cores())
    return Service("sampler", "sampler.1", run_dir, config, addresses(run_dir, config), layout, Quiet())


async def publish(policies: Path, prepared: Path, version: int, base: str) -> None:
    """Two prepared sets of weights take turns; the manifest holds what the engine itself gave for them before."""
    source = prepared / f"weights{version % 2}"
    facts = json.loads((source / "facts.json").read_text())
    folder = policies / f"policy-v{version}"

    def fill() -> None:
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.name != "facts.json":
                os.link(file, folder / file.name)
        manifest = PolicyVersion(
            version, version - 1, version, facts["kind"], facts["sha256"], CANARY, facts["logprobs"], base_model=base
        )
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        (folder / "COMPLETE").touch()

    await asyncio.to_thread(fill)


def make_weights(folder: Path, shape: Shape, rank: int) -> None:
    """The base, and two adapters or, with `rank` 0, two sets of whole weights, of which the base has the first."""
    write_config(folder / "base", shape)
    for number in range(2):
        place = folder / f"weights{number}"
        if rank:
            write_adapter(place, shape, rank, number)
        else:
            write_weights(place, shape, number)
    if not rank:
        os.link(folder / "weights0" / FILES["full"], folder / "base" / FILES["full"])


async def note_facts(engine: VLLMEngine, folder: Path, rank: int) -> None:
    """Beside each of the two: kind, digest, and canaries as this engine gives them."""
    kind = "lora" if rank else "full"
    for number in range(2):
        place = folder / f"weights{number}"
        served = Served(1_000_000 + number, "", 1_000_000 + number, str(place)) if rank else Served(-1)
        await (engine._add(served) if rank else engine._reload(place))
        logprobs = await canary_logprobs(engine, served)
        if rank:
            await engine._remove(served)
        facts = {"kind": kind, "sha256": file_sha256(place / FILES[kind]), "logprobs": logprobs}
        (place / "facts.json").write_text(json.dumps(facts))


async def canary_logprobs(engine: VLLMEngine, served: Served) -> list[float]:
    """Of the canary's tokens from the second on."""
    output = await engine._ask_as(served)(CANARY, {"temperature": 1.0, "prompt_logprobs": 0, "logprobs": COMPARED})
    return [row[token] for row, token in zip(rows(output.prompt_logprobs)[1:], CANARY[1:], strict=True)]


async def alternate(legs: dict[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in legs}
    for turn in range(rounds):
        order = list(legs) if turn % 2 == 0 else list(legs)[::-1]
        for name in order:
            found[name].append(await legs[name]())
            say(f"{name}: {found[name][-1]:.0f} tokens/s")
    return found


async def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = shape_of(asked.shape)
    make_weights(folder, shape, asked.rank)
    asked.base = str(folder / "base")
    say("weights are made")
    device = asked.device or ("cpu" if asked.shape == "tiny" else "cuda")
    options = VLLMOptions(
        settings=Sampler(slots=max(asked.at_once), eager=asked.eager, memory_share=asked.memory_share),
        model=asked.base, temperature=1.0, max_staleness=2, device=device, threads=1, seed=0, lora_rank=asked.rank,
        roles=1, max_model_len=shape.context, load_format="dummy" if asked.rank else "auto",
    )  # fmt: skip
    begun = time.monotonic()
    engine = await launch(options, make_tokenizer(shape))
    start_s = time.monotonic() - begun
    say(f"vLLM has started in {start_s:.0f} s")
    bench = Bench(asked, folder, engine, shape)
    await note_facts(engine, folder, asked.rank)
    await publish(bench.run_dir / "policies", folder, 0, asked.base)
    environment = {**os.environ, "KBRL_RUN_DIR": str(bench.run_dir), "HONCHO_PROCESS_NAME": "broker.1"}
    broker = subprocess.Popen([sys.executable, "-m", "services.broker"], env=environment)
    try:
        gate = Gate(time.monotonic, lambda _: None, lambda: True)
        await Sampling(make_service(bench.run_dir, bench.config), engine, gate, lambda: None).catch_up()
        say(f"policy v0 is served; canary error {engine.stats().canary_max_error:.2g}")
        rates: dict[str, Any] = {}
        for n in asked.at_once:
            legs = {f"bare {n}": lambda n=n: bench.bare(n), f"service {n}": lambda n=n: bench.service(n, asked.leg_s)}
            rates |= await alternate(legs, asked.rounds)
        for n in (asked.swap_at or asked.at_once) if asked.swap_s else []:
            rates[f"swap {n}"] = [await bench.service(n, asked.swap_s, swapping=True)]
            say(f"swap {n}: {rates[f'swap {n}'][0]:.0f} tokens/s")
    finally:
        broker.send_signal(signal.SIGTERM)
        broker.wait(20)
        stats = engine.stats()
        await engine.close()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        name: round(middle[name] / max(1e-9, middle[f"bare {name.split()[1]}"]), 3)
        for name in middle
        if "bare" not in name
    }
    least = {"service": 0.97, "swap": 0.95 if asked.rank else 0.0}
    return {
        "ok": all(ratio >= least[name.split()[0]] for name, ratio in ratios.items()),
        "ratios": ratios,
        "tokens_per_s": {name: [round(value) for value in values] for name, values in rates.items()},
        "swap_s": bench.swaps,
        "longest_pause_s": bench.pauses,
        "start_s": round(start_s, 1),
        "preemptions": stats.preemptions,
        "prefix_cached_tokens": stats.cached_tokens,
    }


def machine() -> dict[str, Any]:
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0))
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"gpu": gpu, "cores": cores, "load": os.getloadavg()[0], **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="7b", choices=["tiny", "1b", "7b"])
    parser.add_argument("--at-once", type=lambda text: [int(word) for word in text.split(",")], default=[64, 256])
    parser.add_argument("--leg-s", type=float, default=14.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--update", default="adapter", choices=["adapter", "full"], help="what a new version replaces")
    parser.add_argument("--swap-s", type=float, default=62.0, help="0: no leg with new versions")
    parser.add_argument("--swap-at", type=lambda text: [int(word) for word in text.split(",")], help="of --at-once")
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--memory-share", type=float, default=0.9)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cpu for the shape tiny, else cuda")
    asked = parser.parse_args()
    if asked.update == "full":
        asked.rank = 0
    with tempfile.TemporaryDirectory(prefix="kbrl-sampler-") as folder:
        found = asyncio.run(measure(asked, Path(folder)))
    sizes = {
        name: getattr(asked, name) for name in ("shape", "update", "rank", "prompt_tokens", "max_tokens", "every_s")
    }
    print(json.dumps({"benchmark": "sampler", **found, **sizes, "machine": machine()}))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
