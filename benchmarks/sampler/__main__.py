"""How fast the sampler writes. `python -m benchmarks.sampler COMMAND`

::

    bare:     this process ─────────────────────────────────────────────────────▶ AsyncLLM.generate
    service:  clients (a process) ─▶ broker (a process) ─▶ Worker ─▶ Sampling ─▶ VLLMEngine ─▶ the same AsyncLLM
    swap:     the same, and a new policy version is published every 30 s
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from benchmarks.harness import Commands, Result, command, in_turn, say, services
from benchmarks.sampler.clients import most_of, work
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
from services.runtime import HandlerOutcome, Worker, WorkerOptions, addresses
from services.runtime.quiet import PauseGate
from services.runtime.service import Service
from services.sampler.actor import Sampling

commands = Commands("sampler", __doc__)
Number = TypeVar("Number", int, float)
CANARY = list(range(2, 34))
WARM = 0.4
"""Share of a leg until the engine is full and steady."""


class LegSizes(msgspec.Struct, frozen=True):
    """What all legs of a measurement have in common."""

    shape: str
    update: str
    rank: int
    prompt_tokens: int
    max_tokens: int
    every_s: float

    @property
    def tokens(self) -> str:
        return f"{self.prompt_tokens}+{self.max_tokens}"

    def of(self, prompt_tokens: int, max_tokens: int) -> LegSizes:
        return msgspec.structs.replace(self, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


@commands
async def service(
    shape: Literal["tiny", "1b", "7b", "32b"] = "7b",
    at_once: tuple[int, ...] = (64, 256),
    leg_s: Annotated[tuple[float, ...], "one, or one for each of --prompt-tokens"] = (14.0,),
    rounds: Annotated[tuple[int, ...], "one, or one for each of --prompt-tokens"] = (2,),
    update: Annotated[Literal["adapter", "full"], "what a new version replaces"] = "adapter",
    swap_s: Annotated[float, "of the leg with new versions; 0: none"] = 62.0,
    swap_at: Annotated[tuple[int, ...], "of --at-once; empty: all"] = (),
    every_s: Annotated[float, "from one version to the next"] = 30.0,
    rank: Annotated[int, "of the adapters"] = 32,
    prompt_tokens: Annotated[tuple[int, ...], "several: one measurement after the other, on one engine"] = (512,),
    max_tokens: Annotated[tuple[int, ...], "of an answer in the mean: half to three halves; as many"] = (512,),
    memory_share: float = 0.9,
    kv_gb: Annotated[float, "of the KV cache; 0: vLLM measures, and nobody else may use the GPU meanwhile"] = 0.0,
    eager: bool = False,
    compiled: Annotated[Literal["yes", "no"], "no: CUDA graphs of decoding alone, as sampler.compile=false"] = "yes",
    tensor_parallel: Annotated[int, "GPUs that the model is split over"] = 1,
    device: Annotated[str, "by default cpu for the shape tiny, else cuda"] = "",
) -> Result:
    """Tokens per second through the whole sampler service against bare vLLM, on one engine, in turns.

    Weights are random, so that nobody stops early, and adapters too: their canaries are taken from the engine
    beforehand. All legs are of the same adapter rank, answer length and groups of 8 that share a prompt. Tokens are
    those that the engine wrote in the second part of each leg, when it is full; medians of the legs of a kind are
    compared. A pause is the longest time in there without a token of anybody. With --update full the weights themselves
    are replaced while everybody writes: two sets of them are made in the temporary folder, 31 GB for the shape 7b.
    On a CPU: --shape tiny.
    """
    from benchmarks.harness.models import word_tokenizer
    from benchmarks.sampler.model import SHAPES, make_weights

    tokens = list(zip(prompt_tokens, max_tokens, strict=True))
    sizes = LegSizes(shape, update, 0 if update == "full" else rank, 0, 0, every_s)
    longest = max(prompt + most_of(answer) for prompt, answer in tokens)
    with tempfile.TemporaryDirectory(prefix="kbrl-sampler-") as name:
        folder, drawn = Path(name), SHAPES[shape]
        drawn = msgspec.structs.replace(drawn, positions=max(drawn.positions, longest))
        make_weights(folder, drawn, sizes.rank)
        say("weights are made")
        device = device or ("cpu" if shape == "tiny" else "cuda")
        settings = Sampler(
            slots=max(at_once), update=update, eager=eager, compile=compiled == "yes", memory_share=memory_share,
            tensor_parallel=tensor_parallel,
        )  # fmt: skip
        options = VLLMOptions(
            settings=settings, model=str(folder / "base"), temperature=1.0, max_staleness=2, device=device, threads=1,
            seed=0, lora_rank=sizes.rank, roles=1, max_model_len=drawn.positions,
            load_format="dummy" if sizes.rank else "auto", kv_bytes=int(kv_gb * 1e9),
        )  # fmt: skip
        begun = time.monotonic()
        engine = await launch(options, word_tokenizer(drawn.vocabulary))
        start_s = time.monotonic() - begun
        say(f"vLLM has started in {start_s:.0f} s")
        rates, swaps, pauses = dict[str, list[float]](), list[float](), dict[str, float]()
        try:
            await note_facts(engine, folder, sizes.rank)
            for of, seconds, times in zip(tokens, _each(leg_s, tokens), _each(rounds, tokens), strict=True):
                bench = SamplerLegs(sizes.of(*of), folder, engine, drawn.vocabulary, max(at_once))
                rates |= await _found(bench, at_once, times, seconds, (swap_at or at_once) if swap_s else (), swap_s)
                swaps += bench.swaps
                pauses |= bench.pauses
        finally:
            stats = engine.stats()
            await engine.close()
    middle = {leg: statistics.median(values) for leg, values in rates.items()}
    ratios = {
        leg: rate / max(1e-9, middle[f"bare {leg.partition(' ')[2]}"])
        for leg, rate in middle.items()
        if "bare" not in leg
    }
    least = {"service": 0.97, "swap": 0.95 if sizes.rank else 0.0}
    return {
        "ok": all(ratio >= least[leg.split()[0]] for leg, ratio in ratios.items()),
        "ratios": ratios,
        "tokens_per_s": rates,
        "swap_s": swaps,
        "longest_pause_s": pauses,
        "start_s": start_s,
        "canary_error": stats.canary_max_error,
        "tensor_parallel": tensor_parallel,
        "preemptions": stats.preemptions,
        "prefix_cached_tokens": stats.cached_tokens,
        **msgspec.structs.asdict(sizes),
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
    }


def _each(given: tuple[Number, ...], of: Sequence[object]) -> tuple[Number, ...]:
    return given * len(of) if len(given) == 1 else given


async def _found(
    bench: SamplerLegs, at_once: tuple[int, ...], rounds: int, leg_s: float, swap_at: tuple[int, ...], swap_s: float
) -> dict[str, list[float]]:
    """With a broker of its own, in which nothing waits that others asked for."""
    await publish(bench.run_dir / "policies", bench.folder, 0)
    with services(bench.run_dir, "broker.1"):
        gate = PauseGate(time.monotonic, lambda _: None, lambda: True)
        await Sampling(make_service(bench.run_dir, bench.config), bench.engine, gate, lambda: None).catch_up()
        say(f"policy v0 is served; canary error {bench.engine.stats().canary_max_error:.2g}")
        rates = await _rates(bench, at_once, rounds, leg_s)
        for n in swap_at:
            swap = f"swap {n} {bench.sizes.tokens}"
            rates[swap] = [await bench.service(n, swap_s, swapping=True)]
            say(f"{swap}: {rates[swap][0]:.0f} tokens/s")
    return rates


async def _rates(bench: SamplerLegs, at_once: tuple[int, ...], rounds: int, leg_s: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for n in at_once:
        for _, leg in in_turn((f"bare {n} {bench.sizes.tokens}", f"service {n} {bench.sizes.tokens}"), rounds):
            rate = await (bench.bare(n, leg_s) if leg.startswith("bare") else bench.service(n, leg_s))
            found.setdefault(leg, []).append(rate)
            say(f"{leg}: {rate:.0f} tokens/s")
    return found


class Quiet:
    """A log that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_facts: None


class SamplerLegs:
    """One engine, one broker, and the legs."""

    def __init__(self, sizes: LegSizes, folder: Path, engine: VLLMEngine, vocabulary: int, slots: int) -> None:
        self.sizes, self.folder, self.engine, self.vocabulary = sizes, folder, engine, vocabulary
        words = [f"log_path={folder / 'runs' / sizes.tokens}", f"sampler.slots={slots}", "sampler.engine=vllm"]
        run = prepare(load(overrides=[*words, f"lora_rank={sizes.rank}", f"max_tokens={sizes.max_tokens}"]))
        self.run_dir, self.config = run.path, run.config
        self.swaps: list[float] = []
        self.pauses: dict[str, float] = {}
        self._legs = itertools.count()

    @property
    def meter(self) -> Any:
        return self.engine.meter

    async def bare(self, at_once: int, seconds: float) -> float:
        """`at_once` callers that ask the AsyncLLM itself, one answer after the other."""
        served = self.engine._live.acquire()
        sizes = self.vocabulary, self.sizes.prompt_tokens, self.sizes.max_tokens
        source = work(*sizes, seed=next(self._legs) + 1000)
        encode = self.engine.tokenizer.encode

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
                async for _ in self.engine._llm.generate(prompt, params, key, **self.engine.with_lora(served)):
                    pass

        callers = [asyncio.create_task(caller(name)) for name in range(at_once)]
        try:
            rate = await self._rate(f"bare {at_once} {self.sizes.tokens}", seconds)
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
                return await self._rate(f"{'swap' if swapping else 'service'} {at_once} {self.sizes.tokens}", seconds)
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

        async def generate(task: Task, frames: list[bytes]) -> HandlerOutcome:
            return await sampling.generate(task, frames)

        worker = Worker(found.work, f"sampler-{leg}", [Stage.GENERATE], at_once, generate, WorkerOptions(wedge_s=60.0))
        sampling = Sampling(service, self.engine, worker.gate, worker.progress)
        self.meter.tick = worker.progress
        stop = asyncio.Event()
        tasks = [asyncio.create_task(worker.run(stop)), asyncio.create_task(sampling.watch(0.1))]
        sizes = self.vocabulary, self.sizes.prompt_tokens, self.sizes.max_tokens
        words = command("sampler.clients", "ask", self.run_dir, leg, at_once, *sizes, leg.removeprefix("leg"))
        clients = subprocess.Popen(words, stdout=subprocess.PIPE)
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
            await publish(self.run_dir / "policies", self.folder, version)
            while self.engine.policy_version < version:
                await asyncio.sleep(0.05)
            self.swaps.append(round(time.monotonic() - begun, 2))
            say(f"policy v{version} is served, {self.swaps[-1]} s after it was published")
            await asyncio.sleep(max(0.0, self.sizes.every_s - (time.monotonic() - begun)))


def make_service(run_dir: Path, config: Config) -> Service:
    layout = cpu_layout(config, available_cores())
    return Service("sampler", "sampler.1", run_dir, config, addresses(run_dir, config), layout, Quiet())


async def publish(policies: Path, prepared: Path, version: int) -> None:
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
            version, version - 1, version, facts["kind"], facts["sha256"], CANARY, facts["logprobs"],
            base_model=str(prepared / "base"),
        )  # fmt: skip
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        (folder / "COMPLETE").touch()

    await asyncio.to_thread(fill)


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
    output = await engine.ask_as(served)(CANARY, {"temperature": 1.0, "prompt_logprobs": 0, "logprobs": COMPARED})
    return [row[token] for row, token in zip(rows(output.prompt_logprobs)[1:], CANARY[1:], strict=True)]


if __name__ == "__main__":
    commands.main()
