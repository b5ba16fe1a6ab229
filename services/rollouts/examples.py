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
import functools
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.kernels.problems import load_problems
from kbrl_async.rollouts.prompts import Feedback, TokenBudget, render_prompt, render_turn
from kbrl_async.rollouts.prompts.budget import UNBOUNDED, UNLIMITED
from kbrl_async.rollouts.prompts.chat import chat_of
from kbrl_async.rollouts.prompts.examples import render_with_examples
from kbrl_async.rollouts.prompts.hardware import facts_for
from kbrl_async.rollouts.retrieval import NO_ADDITIONS, Entry, LiveIndex, Query, Retriever
from kbrl_async.rollouts.retrieval.corpora.folders import run_entries
from kbrl_async.runs.config import Config
from protocols.records import Problem, Purpose, RolloutRequest
from services.rollouts.scoring import Scored
from services.runtime.service import Service

UNKNOWN_CONTEXT = 16_000
"""Tokens that an endpoint's model is trusted to read where raicl_tokens does not tell."""


class FirstPrompt(msgspec.Struct, frozen=True):
    """A prompt and what was retrieved for it."""

    text: str
    examples: tuple[str, ...] = ()
    version: str = ""


class FirstPrompts:
    """Without an index: the template alone."""

    def __init__(
        self, option: str, backend: str, budget: Callable[[], TokenBudget] = TokenBudget, hardware: str = ""
    ) -> None:
        """`budget` is asked for at the first refinement: by then there is a policy, whose tokens count."""
        self._option, self._backend, self._hardware = option, backend, hardware
        self._budget = functools.cache(budget)

    def refined(self, problem: Problem, feedback: Feedback) -> str:
        """The prompt of the turn after `feedback`."""
        return render_turn(self._option, problem, feedback, self._backend, self._budget(), self._hardware)

    def make(self, problem: Problem, purpose: Purpose) -> FirstPrompt:
        budget = self._budget() if "shot" in self._option or self._option.startswith("custom:") else UNBOUNDED
        return FirstPrompt(render_prompt(self._option, problem, self._backend, self._hardware, budget))

    def learn(self, request: RolloutRequest, scored: Scored) -> None:
        """Takes in what became of a rollout."""


class ExamplePrompts(FirstPrompts):
    """With retrieved examples. `max_tokens` bounds the whole prompt."""

    def __init__(
        self,
        config: Config,
        retriever: Retriever,
        count_tokens: Callable[[str], int],
        max_tokens: int,
        hardware: str = "",
    ) -> None:
        budget = TokenBudget(max_tokens, count_tokens)
        super().__init__(config.prompt_option, config.backend, lambda: budget, hardware)
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
                self._option,
                problem,
                found.hits,
                self._count_tokens,
                self._max_tokens,
                self._backend,
                self._hardware,
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
        return FirstPrompts(
            config.prompt_option,
            config.backend,
            lambda: budget_of(config, service.policies),
            told_hardware(config, service.run_dir),
        )
    problems = load_problems(config.problems or "")
    heldout = [(problem.problem_id, problem.source) for problem in problems if problem.split == "heldout"]
    retriever = Retriever.open(Path(builder.rag_index_path).expanduser(), heldout)
    count: Callable[[str], int]
    if config.sampler.engine == "openai":
        count, room = _about, builder.raicl_tokens or UNKNOWN_CONTEXT
    else:
        from kbrl_async.learning.policies import versions  # torch, which an endpoint needs not

        while (found := versions.newest(service.policies)) is None:
            if stop.is_set():
                return FirstPrompts(config.prompt_option, config.backend)
            await asyncio.sleep(0.2)
        budget = budget_of(config, service.policies)
        count, room = token_counter(found[0].base_model), min(builder.raicl_tokens or UNLIMITED, budget.limit)
    prompts = ExamplePrompts(config, retriever, count, room, told_hardware(config, service.run_dir))
    training = {problem.problem_id: problem.source for problem in problems if problem.split != "heldout"}
    for entry in run_entries(service.run_dir, training) if prompts.live is not None else ():
        if isinstance(entry, Entry):
            prompts.add(entry)
    service.log.info("examples", index=retriever.build, guarded=len(heldout), prompt_tokens=room)
    return prompts


def budget_of(config: Config, policies: Path) -> TokenBudget:
    """What a prompt of this run may be long: the context of its policy less the longest answer."""
    if config.sampler.engine == "openai":
        return TokenBudget(UNKNOWN_CONTEXT, _about)
    from kbrl_async.learning.policies import versions  # torch, which an endpoint needs not

    found = versions.newest(policies)
    if found is None or (context := positions(found[0].base_model)) >= UNLIMITED:
        return TokenBudget()
    count = token_counter(found[0].base_model)
    around = _chat_tokens(config, found[0].base_model, count)
    return TokenBudget(max(1, context - config.max_tokens - around), count)


def _chat_tokens(config: Config, base_model: str, count: Callable[[str], int]) -> int:
    """What the chat template adds to a prompt."""
    builder = config.dataset_builder
    if builder.chat_template == "off" or (builder.chat_template == "auto" and config.prompt_option == "compact"):
        return 0
    from kbrl_async.learning.policies.models import load_tokenizer

    chat = chat_of(load_tokenizer(base_model), config.prompt_option, builder.chat_template, builder.thinking)
    return count(chat.render("x")) - count("x")


HARDWARE_FILE = "hardware.txt"


def told_hardware(config: Config, run_dir: Path, *, may_ask: bool = True) -> str:
    """What prompts say of the machine: asked once a run, so that a continued or replayed run says the same."""
    if not config.dataset_builder.prompt_hardware or config.prompt_option == "compact":
        return ""
    path = run_dir / HARDWARE_FILE
    if may_ask and not path.is_file():
        write_atomically(path, facts_for(runs_on_gpu(config.backend)))
    return path.read_text() if path.is_file() else ""


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
    from kbrl_async.learning.policies.models import load_tokenizer

    tokenizer = load_tokenizer(base_model)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
