"""method=sft: training samples from demonstrations instead of rollouts, on the same way to the learner.

::

    demonstrations ─▶ SftDataset ─ samples(g000012.r3) ─▶ rollout buffer ─▶ batch ─▶ learner      (nothing is generated)

Invariants
* What a rollout id learns is a function of the id, the seed and the data: a restart goes on where the run stopped.
* Every demonstration once in random order, then again in another one.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.doors import Door
from kbrl_async.durable import write_atomically
from kbrl_async.kernels.problems.split import HELDOUT
from kbrl_async.rollouts.prompts.budget import UNLIMITED
from kbrl_async.rollouts.prompts.chat import chat_of
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.demonstrations import Conversation, Gathered, Lesson, Message, Renderer, gather
from kbrl_async.runs.demonstrations.formats import ASSISTANT, USER
from kbrl_async.runs.demonstrations.optimized import chains_of
from kbrl_async.runs.problems import problems_of
from kbrl_async.runs.prompting import positions
from protocols.records import Problem, TrainSample

SFT = "sft"
FILE = "demonstrations.json"
"""In the run folder: what was learned from, and all that was left out, with its place and reason."""
SHOWN = 5
"""Problems that the log names; the file has all."""
NOT_A_PROBLEM = Problem("demonstrations", 0, "demonstrations", "")
"""Stands for the problem of groups that are made of demonstrations."""


class SftDataset:
    """Demonstrations by rollout id."""

    def __init__(self, demonstrations: Sequence[Lesson], group_size: int, seed: int) -> None:
        assert demonstrations, "there is something to learn"
        # Arrays: a list of a large vocabulary's ids takes nine times the memory.
        self._spans = [[(array("i", s.prompt_ids), array("i", s.token_ids)) for s in x.spans] for x in demonstrations]
        self._weights = array("d", (x.weight for x in demonstrations))
        self._group_size = group_size
        self._order = lru_cache(maxsize=2)(
            lambda turn: random.Random(f"{seed}.{turn}").sample(range(len(demonstrations)), len(demonstrations))
        )

    def __len__(self) -> int:
        return len(self._spans)

    def samples(self, rollout_id: str, version: int) -> list[TrainSample]:
        """One sample for each turn of the demonstration that this rollout stands for."""
        group, _, member = rollout_id.partition(".r")
        number = int(group.removeprefix("g")) * self._group_size + int(member)
        turn, place = divmod(number, len(self))
        chosen = self._order(turn)[place]
        return [
            TrainSample(rollout_id, list(prompt), list(ids), [0.0] * len(ids), 0.0, self._weights[chosen], version, k)
            for k, (prompt, ids) in enumerate(self._spans[chosen])
        ]


CORPORA = Door("corpora", {"corpus": "kbrl_async.lab.small_policy.configured:right_answers"})
"""Demonstrations for who has no files: `(config) -> [(prompt, answer)]`."""


def corpus(config: Config) -> list[Conversation]:
    """The project's own corpus without a slip: right answers to the suite's training problems and to ones like them."""
    drawn = CORPORA.load("corpus")(config)
    pairs = [(Message(USER, prompt), Message(ASSISTANT, answer, True)) for prompt, answer in drawn]
    return [Conversation(pair, is_chat=False, is_asked=True) for pair in pairs]


def find(config: Config, renderer: Renderer) -> Gathered:
    """The demonstrations that the configuration names.

    :raises UserError: there are none.
    """
    settings = config.demonstrations
    if settings.files:
        heldout = [problem for problem in problems_of(config) if problem.split == HELDOUT]
        guarded = () if settings.include_eval else chains_of(heldout)
        return gather(settings.files, renderer, settings.keep, include_eval=settings.include_eval, guarded=guarded)
    lessons = [renderer(conversation, "corpus") for conversation in corpus(config)]
    return Gathered(lessons, counts={"read": len(lessons), "bad": 0, "too_long": 0, "double": 0})


def open_dataset(config: Config, run_dir: Path, log: Any) -> SftDataset:
    """What the configuration names, in the tokens of the run's policy, which has to be there.

    :raises UserError: there is nothing to learn from.
    """
    from kbrl_async.learning.policies import versions  # torch, which the other methods need not
    from kbrl_async.learning.policies.models import load_tokenizer

    published = versions.newest(run_dir / "policies")
    assert published is not None, "the policy was waited for"
    base = published[0].base_model
    limit = positions(base)
    tokenizer, prompt = load_tokenizer(base), config.prompt
    chat = chat_of(tokenizer, config.prompt_option, prompt.chat_template, prompt.thinking)
    found = find(config, Renderer(tokenizer, 0 if limit == UNLIMITED else limit, chat.render))
    _log(config, run_dir, log, found)
    return SftDataset(found.lessons, config.group_size, config.seed)


def _log(config: Config, run_dir: Path, log: Any, found: Gathered) -> None:
    account = found.account()
    write_atomically(run_dir / FILE, msgspec.json.format(msgspec.json.encode(account), indent=1).decode())
    shown = {name: value for name, value in account.items() if name != "left_out"}
    passes = config.max_steps * config.batch_size * config.group_size / len(found.lessons)
    log.info("demonstrations", **shown, passes=round(passes, 2))
    for problem in found.problems[:SHOWN]:
        log.warning("left out", where=problem.where, reason=problem.reason)
    if len(found.problems) > SHOWN:
        log.warning("left out", more=len(found.problems) - SHOWN, file=str(run_dir / FILE))


def described(config: Config, run_dir: Path) -> dict[str, Any]:
    """What the summary says of how the run learned."""
    how = {"method": config.method, "loss": config.loss, "advantage": config.advantage, "preset": config.preset}
    path = run_dir / FILE
    if not path.is_file():
        return how
    figures = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    figures["left_out"] = len(figures["left_out"])
    return {**how, "demonstrations": figures}
