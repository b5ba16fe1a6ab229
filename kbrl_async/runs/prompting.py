"""Prompts as a run's configuration asks for them: the template or index, their length, the machine that they name."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbrl_async.durable import write_atomically
from kbrl_async.kernels.backends import runs_on_gpu
from kbrl_async.learning.policies import manifests
from kbrl_async.rollouts.prompts import TokenBudget
from kbrl_async.rollouts.prompts.budget import UNLIMITED
from kbrl_async.rollouts.prompts.chat import chat_of
from kbrl_async.rollouts.prompts.first import ExamplePrompts, FirstPrompts
from kbrl_async.rollouts.prompts.hardware import facts_for
from kbrl_async.rollouts.retrieval import Entry, Retriever
from kbrl_async.rollouts.retrieval.corpora.folders import run_entries
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.problems import problems_of

UNKNOWN_CONTEXT = 16_000
"""Tokens that an endpoint's model is trusted to read where prompt.max_tokens does not tell."""


def needs_policy(config: Config) -> bool:
    """Whether prompts are bounded by the tokens of a policy that has to be there first."""
    return config.prompt.option == "raicl" and config.sampler.engine != "openai"


def template_prompts(config: Config, run_dir: Path, *, may_ask: bool = False) -> FirstPrompts:
    """The template alone.

    :param may_ask: this machine is the run's; else only what the run has written down of it is told.
    """
    hardware = told_hardware(config, run_dir, may_ask=may_ask)
    budget = functools.partial(budget_of, config, run_dir / "policies")
    return FirstPrompts(config.prompt_option, config.backend, budget, hardware)


def prompts_of(config: Config, run_dir: Path, log: Any) -> FirstPrompts:
    """What the configuration asks for, once there is a policy if it `needs_policy`.

    Held-out problems are guarded whether or not this run trains on their level.
    """
    wanted, policies = config.prompt, run_dir / "policies"
    if wanted.option != "raicl" or wanted.index is None:
        return template_prompts(config, run_dir, may_ask=True)
    hardware = told_hardware(config, run_dir)
    problems = problems_of(config)
    heldout = [(problem.problem_id, problem.source) for problem in problems if problem.split == "heldout"]
    retriever = Retriever.open(Path(wanted.index).expanduser(), heldout, wanted.embedder or "")
    budget = budget_of(config, policies)
    count, room = budget.count_tokens, wanted.max_tokens or UNKNOWN_CONTEXT
    if needs_policy(config):
        count = token_counter(_base_model(policies) or config.model_name)
        room = min(wanted.max_tokens or UNLIMITED, budget.limit)
    prompts = ExamplePrompts(config.prompt_option, config.backend, retriever, count, room, wanted, hardware)
    training = {problem.problem_id: problem.source for problem in problems if problem.split != "heldout"}
    for entry in run_entries(run_dir, training) if prompts.live is not None else ():
        if isinstance(entry, Entry):
            prompts.add(entry)
    log.info("examples", index=retriever.build, guarded=len(heldout), prompt_tokens=room)
    return prompts


def budget_of(config: Config, policies: Path) -> TokenBudget:
    """What a prompt of this run may be long: the context of its policy less the longest answer."""
    if config.sampler.engine == "openai":
        return TokenBudget(UNKNOWN_CONTEXT, _about)
    base = _base_model(policies)
    if base is None or (context := positions(base)) >= UNLIMITED:
        return TokenBudget()
    count = token_counter(base)
    around = _chat_tokens(config, base, count)
    return TokenBudget(max(1, context - config.max_tokens - around), count)


def _base_model(policies: Path) -> str | None:
    found = manifests.newest(policies)
    return None if found is None else found[0].base_model


def _chat_tokens(config: Config, base_model: str, count: Callable[[str], int]) -> int:
    """What the chat template adds to a prompt."""
    wanted = config.prompt
    if wanted.chat_template == "off" or (wanted.chat_template == "auto" and config.prompt_option == "compact"):
        return 0
    from kbrl_async.learning.policies.models import load_tokenizer

    chat = chat_of(load_tokenizer(base_model), config.prompt_option, wanted.chat_template, wanted.thinking)
    return count(chat.render("x")) - count("x")


HARDWARE_FILE = "hardware.txt"


def told_hardware(config: Config, run_dir: Path, *, may_ask: bool = True) -> str:
    """What prompts say of the machine: asked once a run, so that a continued or replayed run says the same."""
    if not config.prompt.hardware or config.prompt_option == "compact":
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
