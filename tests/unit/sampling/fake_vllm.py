"""A small AsyncLLM in Python: the parts of vLLM 0.26 that the engine uses, as that version behaves, over a tiny model.

What it keeps to: `generate` yields deltas or the final output only; a closed or cancelled generator aborts its request,
and its KV is free at once; a pause freezes or aborts what is in flight; a request that finds no KV makes the youngest
one start over, its tokens kept; a dead engine fails everything; `prompt_logprobs` are at temperature 1 whatever the
request's is, recorded ones are processed.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.vllm.options import VLLMOptions, VLLMParts
from kbrl_async.sampling.vllm.scheduler import Meter
from kbrl_async.sampling.vllm.worker import WorkerExtension

FINAL_ONLY, DELTA = "final_only", "delta"


class EngineDeadError(Exception):
    """As vLLM's."""


@dataclasses.dataclass
class FakeSamplingParams:
    """Keyword names as vLLM has them: an unknown one is a TypeError, as there."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: str = FINAL_ONLY
    flat_logprobs: bool = False


@dataclasses.dataclass
class FakeLoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclasses.dataclass
class Flat:
    """vLLM's FlatLogprobs."""

    start_indices: list[int] = dataclasses.field(default_factory=list)
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def add(self, row: dict[int, float]) -> None:
        self.start_indices.append(len(self.logprobs))
        self.token_ids += row.keys()
        self.logprobs += row.values()
        self.end_indices.append(len(self.logprobs))


@dataclasses.dataclass
class Part:
    token_ids: list[int]
    logprobs: Flat
    finish_reason: str | None


@dataclasses.dataclass
class Output:
    outputs: list[Part]
    prompt_logprobs: Flat | None
    finished: bool


@dataclasses.dataclass
class Request:
    ids: list[int]
    params: FakeSamplingParams
    lora: FakeLoRARequest | None
    queue: asyncio.Queue[Output | Exception]
    rng: torch.Generator
    out: list[int] = dataclasses.field(default_factory=list)
    rows: list[dict[int, float]] = dataclasses.field(default_factory=list)
    told: int = 0

    @property
    def kv(self) -> int:
        return len(self.ids) + len(self.out)


PARTS = VLLMParts(FakeSamplingParams, FakeLoRARequest, FINAL_ONLY, DELTA)


class FakeWorker(WorkerExtension):
    """One of vLLM's workers, with our extension mixed in; all of them hold one model here, each of its own name."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_size=1, world_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        self._held = model.state_dict(keep_vars=True)

    @torch.no_grad()
    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self._held[name].copy_(tensor)


class FakeAsyncLLM:
    """`model` is the base. `kv_tokens` bounds prompt and answer tokens of all running requests together."""

    def __init__(self, model: torch.nn.Module, meter: Meter, kv_tokens: int = 10_000, workers: int = 1) -> None:
        self.model, self.meter, self.kv_tokens = copy.deepcopy(model), meter, kv_tokens
        self.adapters: dict[int, torch.nn.Module] = {}
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.paused = self.errored = False
        self.held_at: int | None = None
        """Answers wait at so many tokens, so that they are in flight for as long as a test needs; None: they go on."""
        self.logits: Callable[[torch.Tensor, float], torch.Tensor] = lambda z, temperature: z / temperature
        self.seen: list[tuple[str, str, str]] = []
        """(request, adapter, cache salt) of everything that was asked."""
        self.priorities: dict[str, int] = {}
        self.workers = [FakeWorker(self.model, rank) for rank in range(workers)]
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def generate(
        self,
        prompt: dict[str, Any],
        params: FakeSamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncIterator[Output]:
        self._alive()
        self.priorities[request_id] = priority
        assert request_id not in self.running
        if lora_request is not None and lora_request.lora_int_id not in self.adapters:
            await self.add_lora(lora_request)
        rng = torch.Generator().manual_seed(params.seed if params.seed is not None else len(self.seen))
        request = Request(list(prompt["prompt_token_ids"]), params, lora_request, asyncio.Queue(), rng)
        self.seen.append((request_id, lora_request.lora_name if lora_request else "", prompt["cache_salt"]))
        self.waiting[request_id] = request
        self._wake.set()
        try:
            while True:
                output = await request.queue.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            self.running.pop(request_id, None)
            self.waiting.pop(request_id, None)

    async def add_lora(self, request: FakeLoRARequest) -> bool:
        self._alive()
        from peft import PeftModel

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft asks transformers for a property by its deprecated name
                adapted = PeftModel.from_pretrained(copy.deepcopy(self.model), request.lora_path).eval()
            self.adapters[request.lora_int_id] = adapted
        except Exception as error:
            raise Exception(f"Call to add_lora method failed: {error}") from error  # what vLLM raises
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.adapters.pop(lora_id, None) is not None

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self._alive()
        self.paused = True
        if mode == "abort":
            for request in [*self.running.values(), *self.waiting.values()]:
                self._tell(request, "abort")
            self.running.clear()
            self.waiting.clear()

    async def resume_generation(self) -> None:
        self.paused = False
        self._wake.set()

    async def collective_rpc(self, method: str, kwargs: Any = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if method != "reload_weights":
            assert self.paused or method != "receive_weights"
            done = [asyncio.to_thread(getattr(worker, method), *args) for worker in self.workers]
            return list(await asyncio.gather(*done))
        assert self.paused
        self.model.load_state_dict(load_file(str(Path(kwargs["weights_path"]) / "model.safetensors")), strict=False)
        return [None] * len(self.workers)

    def die(self) -> None:
        """As when the engine's process is killed."""
        self.errored = True
        for request in [*self.running.values(), *self.waiting.values()]:
            request.queue.put_nowait(EngineDeadError("EngineCore encountered an issue"))

    def shutdown(self) -> None:
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _alive(self) -> None:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")

    async def _run(self) -> None:
        while True:
            if self.paused or self.errored or not (self.running or self.waiting):
                self._wake.clear()
                await self._wake.wait()
                continue
            self._admit()
            for request_id, request in list(self.running.items()):
                if self.held_at is None or len(request.out) < self.held_at:
                    self._step(request_id, request)
            usage = sum(r.kv for r in self.running.values()) / self.kv_tokens
            self.meter.saw(len(self.waiting), usage)
            self.meter.tick()
            await asyncio.sleep(0)

    def _admit(self) -> None:
        while sum(r.kv + 1 for r in self.running.values()) > self.kv_tokens and len(self.running) > 1:
            youngest = list(self.running)[-1]
            self.waiting = {youngest: self.running.pop(youngest), **self.waiting}
            self.meter.preemptions += 1
        for request_id, request in list(self.waiting.items()):
            if self.running and sum(r.kv + 1 for r in self.running.values()) + request.kv + 1 > self.kv_tokens:
                return
            self.running[request_id] = self.waiting.pop(request_id)

    @torch.inference_mode()
    def _step(self, request_id: str, request: Request) -> None:
        model = self.adapters[request.lora.lora_int_id] if request.lora else self.model
        params = request.params
        logits = model(input_ids=torch.tensor([request.ids + request.out])).logits[0].float()
        logp = torch.log_softmax(self.logits(logits[-1], params.temperature or 1.0), -1)
        token = (
            int(torch.multinomial(logp.exp(), 1, generator=request.rng)) if params.temperature else int(logp.argmax())
        )
        if params.prompt_logprobs is not None and not request.out:
            request.queue.prompt = _prompt_table(request.ids, logits, params.prompt_logprobs)  # type: ignore[attr-defined]
        request.out.append(token)
        request.rows.append(_row(logp, token, params.logprobs or 0))
        stopped = token in (params.stop_token_ids or [])
        reason = "stop" if stopped else "length" if len(request.out) == params.max_tokens else None
        if reason or params.output_kind == DELTA:
            self._tell(request, reason)
        if reason:
            self.running.pop(request_id, None)

    def _tell(self, request: Request, reason: str | None) -> None:
        start = request.told if request.params.output_kind == DELTA else 0
        table = Flat()
        for row in request.rows[start:]:
            table.add(row)
        request.told = len(request.out)
        prompt = getattr(request.queue, "prompt", None)
        request.queue.put_nowait(Output([Part(request.out[start:], table, reason)], prompt, reason is not None))


def _row(logp: torch.Tensor, token: int, count: int) -> dict[int, float]:
    top = logp.topk(count) if count else None
    rest = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return {token: float(logp[token]), **rest}


def _prompt_table(ids: list[int], logits: torch.Tensor, count: int) -> Flat:
    table, logp = Flat(), torch.log_softmax(logits, -1)
    table.add({})
    for position, token in enumerate(ids[1:]):
        table.add(_row(logp[position], token, count))
    return table


def vllm_options(model: str = "base", **given: Any) -> VLLMOptions:
    """Those of a run with temperature 1 and S = 2 on a CPU, but for what is given: fields, or keys of `sampler`."""
    mine = {
        "temperature": 1.0,
        "max_staleness": 2,
        "device": "cpu",
        "threads": 1,
        "seed": 0,
        "lora_rank": 0,
        "roles": 1,
    }
    mine |= {name: value for name, value in given.items() if name in VLLMOptions.__struct_fields__}
    settings = Sampler(**{name: value for name, value in given.items() if name not in mine})
    return VLLMOptions(settings=settings, model=model, **mine)
