"""The first prompt of a rollout: the template alone, or with examples from the index (prompt_option=raicl).

::

    problem ─▶ Retriever (held-out problems guarded) ─▶ render_with_examples ─▶ prompt, names of the examples, version
                  ▲
    verified kernels of training rollouts ─▶ LiveIndex (raicl_live)

Invariants
* An evaluation sees the index on disk only, so that before and after differ by the policy alone.
* Prompt and longest answer fit the model's positions: the sampler would refuse what does not.
* No prompt, of training or evaluation, holds a solution of its own problem or of a held-out one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.config import Config
from kbrl_async.problems import load_problems
from kbrl_async.prompts import render_prompt
from kbrl_async.prompts.examples import render_with_examples
from kbrl_async.retrieval import NO_ADDITIONS, Entry, LiveIndex, Query, Retriever
from kbrl_async.retrieval.corpora.folders import run_entries
from protocols.records import Problem, Purpose, RolloutRequest
from services.rollouts.scoring import Scored
from services.runtime.service import Service

UNLIMITED = 1 << 30
UNKNOWN_CONTEXT = 16_000
"""Tokens that an endpoint's model is trusted to read where raicl_tokens does not tell."""


class FirstPrompt(msgspec.Struct, frozen=True):
    """A prompt and what was retrieved for it."""

    text: str
    examples: tuple[str, ...] = ()
    version: str = ""


class FirstPrompts:
    """Without an index: the template alone."""

    def __init__(self, option: str, backend: str) -> None:
        self._option, self._backend = option, backend

    def make(self, problem: Problem, purpose: Purpose) -> FirstPrompt:
        return FirstPrompt(render_prompt(self._option, problem, self._backend))

    def learn(self, request: RolloutRequest, scored: Scored) -> None:
        """Takes in what became of a rollout."""


class ExamplePrompts(FirstPrompts):
    """With retrieved examples. `max_tokens` bounds the whole prompt."""

    def __init__(
        self, config: Config, retriever: Retriever, count_tokens: Callable[[str], int], max_tokens: int
    ) -> None:
        super().__init__(config.prompt_option, config.backend)
        self._retriever, self._count_tokens, self._max_tokens = retriever, count_tokens, max_tokens
        self._k = config.dataset_builder.raicl_k
        self.live = LiveIndex(config.dataset_builder.raicl_live) if config.dataset_builder.raicl_live else None
        self._made: dict[tuple[str, int], FirstPrompt] = {}

    def make(self, problem: Problem, purpose: Purpose) -> FirstPrompt:
        snapshot = self.live.snapshot() if self.live is not None and purpose is Purpose.TRAIN else NO_ADDITIONS
        key = problem.problem_id, snapshot.version
        if key not in self._made:
            if len(self._made) > 4096:
                self._made.clear()
            query = Query(problem.source, problem.problem_id, self._backend, self._option == "compact", self._k)
            found = self._retriever.retrieve(query, snapshot)
            prompted = render_with_examples(
                self._option, problem, found.hits, self._count_tokens, self._max_tokens, self._backend
            )
            names = tuple(found.hits[place].entry.uid for place in prompted.shown)
            self._made[key] = FirstPrompt(prompted.text, names, found.version)
        return self._made[key]

    def learn(self, request: RolloutRequest, scored: Scored) -> None:
        problem = request.problem
        is_training = request.purpose is Purpose.TRAIN and problem.split != "heldout"
        if self.live is None or not is_training or scored.timing is None or scored.candidate is None:
            return
        self.add(
            Entry(
                uid=f"live:{request.rollout_id}",
                corpus="live",
                reference=problem.source,
                kernel=scored.candidate.source,
                backend=scored.candidate.backend,
                problem_id=problem.problem_id,
                level=problem.level,
                speedup=scored.timing.lo,
                verified=True,
            )
        )

    def add(self, entry: Entry) -> None:
        if self.live is not None:
            self.live.add(entry, *self._retriever.read(entry.reference))


async def open_prompts(service: Service, stop: asyncio.Event) -> FirstPrompts:
    """What the configuration asks for; with an index it waits for the policy, whose tokens bound the prompts.

    Held-out problems are guarded whether or not this run trains on their level.
    """
    config = service.config
    builder = config.dataset_builder
    if builder.prompt_option != "raicl" or builder.rag_index_path is None:
        return FirstPrompts(config.prompt_option, config.backend)
    problems = load_problems(config.problems or "")
    heldout = [(problem.problem_id, problem.source) for problem in problems if problem.split == "heldout"]
    retriever = Retriever.open(Path(builder.rag_index_path).expanduser(), heldout)
    count: Callable[[str], int]
    if config.sampler.engine == "openai":
        count, room = _about, builder.raicl_tokens or UNKNOWN_CONTEXT
    else:
        from kbrl_async.learning import versions  # torch, which an endpoint needs not

        while (found := versions.newest(service.policies)) is None:
            if stop.is_set():
                return FirstPrompts(config.prompt_option, config.backend)
            await asyncio.sleep(0.2)
        base = found[0].base_model
        count, room = token_counter(base), min(builder.raicl_tokens or UNLIMITED, positions(base) - config.max_tokens)
    prompts = ExamplePrompts(config, retriever, count, room)
    training = {problem.problem_id: problem.source for problem in problems if problem.split != "heldout"}
    for entry in run_entries(service.run_dir, training) if prompts.live is not None else ():
        if isinstance(entry, Entry):
            prompts.add(entry)
    service.log.info("examples", index=retriever.build, guarded=len(heldout), prompt_tokens=room)
    return prompts


def _about(text: str) -> int:
    """Tokens of a model that runs elsewhere, counted high: three characters each."""
    return len(text) // 3 + 1


def positions(base_model: str) -> int:
    """The model's context in tokens; unlimited where its folder does not tell."""
    path = Path(base_model) / "config.json"
    limit = json.loads(path.read_text()).get("max_position_embeddings") if path.is_file() else None
    return limit if isinstance(limit, int) else UNLIMITED


def token_counter(base_model: str) -> Callable[[str], int]:
    """How many tokens the policy reads a text as."""
    path = Path(base_model) / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        plain = Tokenizer.from_file(str(path))
        return lambda text: len(plain.encode(text, add_special_tokens=False).ids)
    from kbrl_async.learning.models import load_tokenizer

    tokenizer = load_tokenizer(base_model)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
