"""Answers that are given token by token instead of drawn: all of a run is real but the words (`kbrl rehearse`).

::

    script (problem → answers, length) ─ Reciter: tokens + filler + end-of-text ─▶ ForcedParams ─▶ engine

The engine computes what it always computes, and takes the next token of the answer in place of one that it draws; the
log-probs are the model's own of those tokens. So canaries and off-policy corrections see nothing unusual.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.sampling.engine import Tokenizer
from protocols.records import RolloutRequest, SamplingParams

FILLER = """\
Each output element depends on few inputs, so the loop over rows comes first and the one over columns is innermost.
Neighbouring iterations then read neighbouring addresses. Sums are kept in a local variable, and written once.
The bounds are those of the reference; what is constant is computed before the loop.
"""
"""What a longer answer begins with, again and again."""


FORCED = "forced"
"""The key of vLLM's `SamplingParams.extra_args`."""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is answered: the file that `sampler.forced` names, as JSON."""

    answers: dict[str, list[str]]
    """By problem id, as a policy would write them."""
    median: float = 0.0
    """Tokens of an answer; 0: as long as it is."""
    spread: float = 1.0
    """Factor between the median and what five in six answers stay below; lengths are log-normal."""
    seed: int = 0


class ForcedParams(SamplingParams, frozen=True, kw_only=True):
    """For an engine of this process; never sent."""

    forced: tuple[int, ...] = ()


def forced_ids(params: SamplingParams) -> tuple[int, ...]:
    """The answer that is given; empty where one is drawn."""
    return params.forced if isinstance(params, ForcedParams) else ()


def read_script(path: str) -> Script:
    """
    :raises ConfigError: no such file, or it is none.
    """
    try:
        return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=Script)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"sampler.forced={path} can't be read: {error}", "Let 'kbrl rehearse' write it") from None


class Reciter:
    """What is answered to a request: a function of the script, its seed and the rollout, so the same after a crash."""

    def __init__(self, script: Script, tokenizer: Tokenizer, *, opens_thought: bool = False) -> None:
        self._script, self._encode = script, tokenizer.encode
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._filler = self._ids(FILLER)
        self._before = self._ids("\n</think>\n\n" if opens_thought else "\n\n")
        self._needs_end = opens_thought

    def params(self, request: RolloutRequest) -> ForcedParams:
        """
        :raises ConfigError: the script has no answer to its problem.
        """
        answers = self._script.answers.get(request.problem.problem_id)
        if not answers:
            cause = f"sampler.forced has no answer to {request.problem.problem_id}"
            raise ConfigError(cause, "Leave its level out, or give 'kbrl rehearse --answers FILE'")
        rng = random.Random(f"{self._script.seed}.{request.rollout_id}.{request.turn}")
        answer = self._ids(rng.choice(answers)) + self._end
        wanted = self._script.median * math.exp(rng.gauss(0.0, 1.0) * math.log(self._script.spread))
        plain = request.sampling
        forced = tuple(self._lead(round(wanted) - len(answer)) + answer)
        return ForcedParams(plain.max_tokens, plain.temperature, plain.top_p, plain.seed, forced=forced)

    def _lead(self, room: int) -> list[int]:
        """Thinking before the answer, `room` tokens long with what closes it; nothing where there is no room."""
        if room <= len(self._before):
            return self._before if self._needs_end else []
        return [*itertools.islice(itertools.cycle(self._filler), room - len(self._before)), *self._before]

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False))
