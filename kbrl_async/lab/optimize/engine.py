"""The engine of `kbrl optimize`: any policy that `kbrl eval` takes, in this process, or an endpoint."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import load_problems
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.lab.indexing import IndexOptions, build_index
from kbrl_async.lab.small_policy.configured import is_made
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.rollouts.retrieval import Entry, Hit, Query, Retriever, SourceOptions, open_source
from kbrl_async.rollouts.retrieval.corpora import folders
from kbrl_async.rollouts.retrieval.store import MANIFEST
from kbrl_async.rollouts.settings import Prompt
from kbrl_async.runs import origins, publishing, targets
from kbrl_async.runs.config import CONFIG_FILE, Config, environment, load
from kbrl_async.runs.folder import load_run
from kbrl_async.sampling.engine import Engine
from protocols.records import Problem

Told = Callable[[str, float], None]
SIMILAR = 0.6
"""Share of operations that a kernel's module and the target must have in common to be tried as it is."""
PLANTED = 4
LOCAL_SLOTS = 16
"""More at once would only wait for the verifier."""
_ENDLESS = 1 << 30


class Opened(msgspec.Struct, frozen=True):
    """An engine, ready, and what prompts need to know of it."""

    engine: Engine
    label: str
    count_tokens: Callable[[str], int]
    at_once: int
    """Answers that it writes at once."""
    positions: int
    """Longest prompt and answer together, in tokens."""


def resolve(
    policy: str, version: str, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[targets.Target, Config]:
    """The policy, and its configuration: that of its run, below what was said."""
    env = environment(os.environ)
    words = list(overrides)
    plain = load(files, words, env)
    own = plain.sampler.base_url if plain.sampler.engine == "openai" else ""
    found = targets.resolve(str(policy or own or plain.model_name), Path(plain.log_path), version)
    if found.kind == "endpoint":
        words = [f"sampler.base_url={found.name}", "sampler.engine=openai", *words]
    elif found.kind == "model":
        words = [f"model_name={found.name}", *words]
    elif found.run and not policy:  # named by model_name, which is the run's own again: prompts go by it
        words = [*words, f"model_name={load_run(found.run).model_name}"]
    inherited = [Path(found.run) / CONFIG_FILE] if found.run else []
    made = load([*inherited, *files], words, env)
    if found.run is None and not any(word.startswith("mode=") for word in words):
        # The small policy can use feedback only where it was made with turns; one that is made already saves minutes.
        turns = load([*inherited, *files], ["mode=multi_turn", *words], env)
        if found.name != origins.SMALL or is_made(turns) or not is_made(made):
            made = turns
    return found, made


@contextlib.contextmanager
def published(policy: targets.Target, config: Config, told: Told) -> Iterator[Path]:
    """A folder with the policy's version, for `open_engine`; the small one is made first where need be, for minutes.
    Outside of any event loop, so that Ctrl-C ends it at once.

    :raises KbrlError: it can't be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="kbrl-optimize-") as folder:
        if policy.kind != "endpoint":
            publishing.publish(policy, Path(folder), config, told)
        yield Path(folder)


def in_words(policy: targets.Target) -> str:
    """Who writes, as the written file, the evidence and the screen name it."""
    if policy.kind in ("policy", "checkpoint"):
        whose = f"policy {Path(policy.run).name}" if policy.run else f"policy {Path(policy.name).parent.name}"
        return f"{whose} at version {policy.version}"
    if policy.name == targets.SMALL:
        return "policy small at version 0, before any training with rewards"
    return f"{policy.kind} {policy.name}"


@contextlib.asynccontextmanager
async def open_engine(policy: targets.Target, config: Config, threads: int, folder: Path) -> AsyncIterator[Opened]:
    """Loads what was `published` into `folder`.

    :raises KbrlError: it can't be loaded, or the endpoint refuses.
    """
    if policy.kind == "endpoint":
        async with _endpoint(config) as opened:
            yield opened
        return
    from kbrl_async.sampling.transformers.engine import TransformersEngine

    found = versions.newest(folder)
    assert found is not None, "a policy was published"
    manifest, place = found
    tokenizer = load_tokenizer(manifest.base_model)
    model = load_model(manifest.base_model, device=_device(config))
    settings = msgspec.structs.replace(config.sampler, slots=LOCAL_SLOTS)
    engine = TransformersEngine(model, tokenizer, settings, threads=threads, seed=config.seed)
    try:
        await engine.load(manifest, place)
        limit = getattr(model.config, "max_position_embeddings", None)

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        yield Opened(engine, in_words(policy), count, LOCAL_SLOTS, limit if isinstance(limit, int) else _ENDLESS)
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _endpoint(config: Config) -> AsyncIterator[Opened]:
    from kbrl_async.sampling.openai.engine import OpenAIEngine

    engine = OpenAIEngine(config.sampler, config.model_name)
    try:
        await engine.check()
        # four characters a token is what providers tell people to reckon with
        label = f"{config.model_name} at {config.sampler.base_url}"
        yield Opened(engine, label, lambda t: len(t) // 4, config.sampler.slots, _ENDLESS)
    finally:
        await engine.close()


def _device(config: Config) -> str:
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# ── worked examples ──────────────────────────────────────────────────────────────────────────────────────────────


def examples(place: str, problem: Problem, backend: str, prompt: Prompt) -> list[Hit]:
    """Worked examples for the prompt, from an index, or from what an index can be made of (a run, a folder)."""
    path = Path(place).expanduser()
    if not path.is_dir():
        raise UserError(f"--examples {place} is no folder", "Give an index, a run folder, or a folder of kernels")
    query = Query(problem.source, "", backend, True, prompt.examples)
    if (path / MANIFEST).is_file():
        return Retriever.open(path, embedder=prompt.embedder or "").retrieve(query).hits
    with tempfile.TemporaryDirectory(prefix="kbrl-index-") as folder:
        source = open_source(str(path), SourceOptions(), _sources)
        build_index([source], Path(folder) / "index", IndexOptions(embedder="lexical"), lambda *_: None)
        return Retriever.open(Path(folder) / "index").retrieve(query).hits


def similar_kernels(place: str, problem: Problem, backend: str) -> Iterator[Entry]:
    """Verified kernels of a run whose modules do nearly the same: worth trying as they are."""
    path = Path(place).expanduser()
    if not folders.is_run(path):
        return
    wanted = set(operations(Scope(problem.source)))
    found = [e for e in folders.run_entries(path, _sources(folders.run_problems(path))) if isinstance(e, Entry)]
    shared = [(_overlap(wanted, set(operations(Scope(e.reference)))), e.speedup or 0.0, e) for e in found]
    near = [item for item in shared if item[0] >= SIMILAR and item[2].backend == backend]
    for _, _, entry in sorted(near, key=lambda item: item[:2], reverse=True)[:PLANTED]:
        yield entry


def _sources(setting: str) -> Mapping[str, str]:
    return {problem.problem_id: problem.source for problem in load_problems(setting)}


def _overlap(one: set[str], other: set[str]) -> float:
    return len(one & other) / max(1, len(one | other))
