"""What a new policy version costs, and how soon samplers answer by it. `python -m benchmarks.weights COMMAND`

Random weights: a model's shape is all that counts.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing as mp
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import msgspec
import torch

from benchmarks.harness import Commands, Result, say
from benchmarks.harness.models import config_of, random_model
from kbrl_async.learning.logprobs import sequence_logprobs
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import DTYPES
from kbrl_async.learning.policies.snapshot import HostCopy
from kbrl_async.runs.config import load
from kbrl_async.sampling.canary import rms
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.engine import TransformersEngine
from kbrl_async.weights import Canaries
from kbrl_async.weights.direct import Sender
from protocols.records import SamplingParams
from services.learner.publishing import Publisher
from services.sampler.line import LearnerLine
from tests.models import NumberTokenizer

commands = Commands("weights", __doc__)
CANARY = [5, 9, 14, 3, 27, 33, 8, 21, 40, 2, 17, 11]
Shape = Annotated[str, "tiny, 300m, or a public model such as qwen3-4b"]


def tied_config_of(shape: str) -> Any:
    """With one matrix for embeddings and head, and an end that the tokenizer of numbers has."""
    config = copy.deepcopy(config_of(shape))
    config.update({"tie_word_embeddings": True, "eos_token_id": 1})
    return config


def make_model(shape: str, device: str, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    return random_model(tied_config_of(shape), device, dtype, seed)


@torch.no_grad()
def take_step(model: torch.nn.Module, seed: int) -> None:
    """Stands for an optimiser's: another policy, which no canary confuses with the one before."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.manual_seed(seed)
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def finished(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.time()


@commands
def critical(
    shape: Shape = "300m",
    device: str = "cpu",
    dtype: Annotated[Literal["fp32", "bf16"], "of the published weights"] = "fp32",
    versions_made: int = 3,
) -> Result:
    """Seconds for which a version keeps the learner from its next update: written at once, and beside it."""
    model, on_host = make_model(shape, device, torch.float32, 0), HostCopy(DTYPES[dtype])
    at_once, beside, written, parts = [], [], [], {"snapshot_s": 0.0, "canary_s": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for version in range(versions_made):
            begun = finished(device)
            versions.publish(Path(folder), model, version, None, version, CANARY, rounded_to=dtype)
            at_once.append(time.time() - begun)
            publisher, begun = Publisher(Path(folder)), finished(device)
            pending = prepared(Path(folder), model, version, on_host, parts)
            publisher.begin(pending, lambda: None)
            beside.append(time.time() - begun)
            publisher.close()
            written.append(time.time() - begun)
            say(f"{parts} at once {at_once[-1]:.2f} s, beside {beside[-1]:.2f} s (on disk after {written[-1]:.2f} s)")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": dtype,
        "at_once_s": median(at_once),
        "critical_s": median(beside[1:] or beside),
        "first_critical_s": beside[0],
        "on_disk_s": median(written),
        **parts,
    }


def service_of(folder: Path, name: str) -> Any:
    """What a line to the learner needs of a process of a run."""
    log = SimpleNamespace(warning=lambda *a, **k: say(name, *a, k), debug=lambda *a, **k: None)
    config = load(overrides=["weights.transport=direct"])
    return SimpleNamespace(config=config, policies=folder, worker_id=name, log=log)


def sample(folder: Path, ways: Sequence[str], name: str, shape: str, device: str, told: Connection) -> None:
    """A sampler's process; version n travels by `ways[n]`. Tells (version, when its first answer was there, seconds to
    receive it, canary's error)."""

    async def main() -> None:
        # bf16 on a GPU, as vLLM holds it; the CPU's engine computes in fp32, as it does in a run.
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        engine = TransformersEngine(make_model(shape, device, dtype, 1), NumberTokenizer(), Sampler(slots=4))
        line: Any = LearnerLine(service_of(folder, name), engine)
        await line.load_newer(1 << 60)  # joins
        told.send(("ready", 0.0, 0.0, 0.0))
        for version, way in enumerate(ways):
            while engine.policy_version < version:
                await asyncio.sleep(0.02)
                begun = time.time()
                if way == "direct":
                    await line.load_newer(version - 1)
                elif (found := versions.newest(folder)) is not None and found[0].version == version:
                    await engine.load(*found)
            received = time.time() - begun
            await engine.generate("r", "3 4 5", SamplingParams(max_tokens=1))
            told.send((version, time.time(), received, engine.stats().canary_max_error))
        await engine.close()

    torch.set_num_threads(1)
    asyncio.run(main())


@commands
def flight(
    ways: Annotated[str, "of each version; the first of several is a warm-up"] = "direct,direct,files,files",
    shape: Shape = "300m",
    device: Annotated[str, "cuda: the learner's GPU is 0, samplers' are 1, 2, …"] = "cpu",
    dtype: Annotated[Literal["fp32", "bf16"], "of the published weights"] = "bf16",
    samplers: int = 1,
    write: Annotated[bool, "files are written beside direct transfers, as in a run"] = False,
) -> Result:
    """From the last optimiser step to all samplers' first answers by the new version, whose canaries are proven."""
    chosen = ways.split(",")
    context, root = mp.get_context("spawn"), Path(tempfile.mkdtemp())
    learner = f"{device}:0" if device == "cuda" else device
    publishers = {"files": Publisher(root)}
    if "direct" in chosen:
        publishers["direct"] = Publisher(root, Sender("127.0.0.1", torch.device(learner), 60.0, say))
    pipes = []
    for number in range(1, samplers + 1):
        ours, theirs = context.Pipe()
        place = f"{device}:{number}" if device == "cuda" else device
        args = (root, chosen, f"sampler.{number}", shape, place, theirs)
        context.Process(target=sample, args=args, daemon=True).start()
        pipes.append(ours)
    model, on_host = make_model(shape, learner, torch.float32, 0), HostCopy(DTYPES[dtype])
    say(f"the learner has {sum(p.numel() for p in model.parameters()):,} parameters")
    assert all(pipe.recv()[0] == "ready" for pipe in pipes)
    say("samplers are ready")
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in dict.fromkeys(chosen)}
    before: list[float] = []
    try:
        for version, way in enumerate(chosen):
            take_step(model, version)
            row: dict[str, float] = {}
            stepped = finished(learner)
            pending = prepared(root, model, version, on_host, row)
            if way == "direct" and not write:
                publishers[way].begin(msgspec.structs.replace(pending, fill=_nothing), lambda: None)
            else:
                publishers[way].begin(pending, lambda: None)
            row["critical_s"] = time.time() - stepped
            answers = [pipe.recv() for pipe in pipes]
            assert {answer[0] for answer in answers} == {version}
            row["first_answer_s"] = max(at for _, at, _, _ in answers) - stepped
            row["received_s"] = max(seconds for _, _, seconds, _ in answers)
            row["canary_error"] = max(error for _, _, _, error in answers)
            row["canary_distance"] = rms(pending.manifest.canary_logprobs, before) if before else 1.0
            before = pending.manifest.canary_logprobs
            rows[way].append(row)
            say(f"v{version} {way}: " + ", ".join(f"{name} {value:.3g}" for name, value in row.items()))
            assert pending.weights is not None
            size = sum(tensor.numel() * tensor.element_size() for tensor in pending.weights.values())
            publishers[way].free()
            versions.collect_garbage(root, 1)
    finally:
        for publisher in publishers.values():
            publisher.close()
        shutil.rmtree(root, ignore_errors=True)
    counted = {way: found[1:] or found for way, found in rows.items()}
    figures = {way: {name: median(row[name] for row in found) for name in found[0]} for way, found in counted.items()}
    for found in figures.values():
        found["gb_per_s"] = size / 1e9 / found["received_s"]
    proven = all(row["canary_error"] < row["canary_distance"] / 2 for found in rows.values() for row in found)
    return {"gigabytes": size / 1e9, **figures, "ok": proven}


def _nothing(folder: Path) -> dict[str, str]:
    return {"": ""}


def prepared(folder: Path, model: torch.nn.Module, version: int, on_host: HostCopy, row: dict[str, float]) -> Any:
    """A version that is ready to be published; `row` gets what its parts took."""

    def timing(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(given: Any) -> Any:
            begun = time.time()
            made = function(given)
            row[name] = time.time() - begun
            return made

        return timed

    return versions.prepare(
        folder, model, version, None, version, Canaries(CANARY, []), copied=timing("snapshot_s", on_host.of),
        logprobs_of=timing("canary_s", lambda ids: sequence_logprobs(model, ids)),
    )  # fmt: skip


if __name__ == "__main__":
    commands.main()
