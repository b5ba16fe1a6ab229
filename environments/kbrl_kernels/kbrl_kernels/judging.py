"""What all three have in common: problems as prompts, and answers as rewards with a feedback for the next turn.

A wrong answer is a reward. A fault of the host is tried again and then raised (`KbrlError`): the libraries record an
error and no score, as the model had no part in it.
"""

from __future__ import annotations

import atexit
import functools
from dataclasses import asdict, dataclass

import kbrl_async
from kbrl_async.rollouts.prompts import feedback_of, render_prompt, render_result

MOST_CHARACTERS = 1 << 20
"""Of an answer; what is longer is judged as none."""


@dataclass(frozen=True)
class Settings:
    """The same in all three."""

    problems: str = ""
    """A folder of problems; empty: the suite of kbrl-async."""
    backend: str = "c"
    preset: str = "stage3"
    """Of the reward."""
    option: str = "one_shot"
    """Of the prompt: zero_shot, one_shot, few_shot."""
    levels: tuple[int, ...] = ()
    split: str = ""
    """`train`, `heldout`, or empty for both."""
    timing: bool = True
    """False: correctness alone, several times as quick."""


@dataclass(frozen=True)
class Judged:
    reward: float
    ok: bool
    fault: str
    compiled: bool
    credit: float
    """Share of the secret input sets that were passed."""
    speedup: float
    """0 where it was not timed."""
    proven_faster: bool
    feedback: str
    """For a next turn of the same conversation."""

    def metrics(self) -> dict[str, float]:
        """The numbers, flags as 0 or 1."""
        return {k: float(v) for k, v in asdict(self).items() if k != "reward" and not isinstance(v, str)}


@functools.lru_cache(8)
def problems(settings: Settings) -> tuple[kbrl_async.Problem, ...]:
    """Those that the settings ask for, in order.

    :raises ProblemError: there are none.
    """
    return tuple(kbrl_async.load_problems(settings.problems, levels=settings.levels, split=settings.split or None))


def problem(settings: Settings, problem_id: str) -> kbrl_async.Problem:
    """:raises KbrlError: there is no such problem."""
    for found in problems(settings):
        if found.problem_id == problem_id:
            return found
    raise kbrl_async.KbrlError(f"there is no problem {problem_id!r} here", "See 'kbrl problems list'")


def prompt(settings: Settings, asked: kbrl_async.Problem) -> str:
    return render_prompt(settings.option, asked, settings.backend)


async def judge(settings: Settings, problem_id: str, answer: str) -> Judged:
    """Verify one answer.

    :raises KbrlError: it is not known what the answer is worth: the host's or the problem's fault.
    """
    asked = problem(settings, problem_id)
    text = answer if len(answer) <= MOST_CHARACTERS else ""
    result = await _verifier().verify(asked, text, settings.backend, timing=settings.timing, response=_fenced(text))
    timing = result.timing
    told = feedback_of(result.verdict, timing, "", settings.backend)
    return Judged(
        kbrl_async.reward(result, settings.preset, source=text, response=answer),
        result.ok,
        result.fault.value,
        result.compiled,
        result.credit,
        0.0 if timing is None else timing.speedup,
        timing is not None and timing.is_faster,
        render_result(told),
    )


def _fenced(text: str) -> bool | None:
    """An answer with a fence is a model's; else it is looked at, as a tool is given the bare file."""
    return True if "```" in text else None


@functools.cache
def _verifier() -> kbrl_async.AsyncVerifier:
    """One for the process, warm until it ends."""
    made = kbrl_async.AsyncVerifier()
    made.start()
    atexit.register(made.close)
    return made
