"""Roles on the turn mechanism: a solver writes, a verifier predicts what will become of it, a corrector repairs.

::

    solver ─ kernel ─▶ verifier ─ prediction ─▶ corrector ─ kernel ─▶ verifier ─▶ …
               └─ the real verdict, which the verifier never sees, is what its prediction is paid by
"""

from __future__ import annotations

import re

from kbrl_async.kernels.answers.thoughts import without_thoughts
from kbrl_async.rollouts.prompts.feedback import CATEGORIES
from kbrl_async.rollouts.prompts.templates import render_prompt
from protocols.records import CORRECTOR, SOLVER, VERIFIER, Problem

OUTCOMES = (*dict.fromkeys(CATEGORIES.values()), "slow", "fast")
"""What a verifier may predict: why a kernel fails, or how fast a right one is."""
_WORD = re.compile(r"\b(" + "|".join(OUTCOMES) + r")\b")
_QUESTION = """A strict checker compiles the kernel below, compares it with the module on secret inputs and times it
against PyTorch. Predict its verdict. End with one line `VERDICT: word`, where the word is one of
{outcomes}.

The module:

```python
{source}```

The kernel:

```python
{kernel}
```
"""


def role_of(turn: int) -> str:
    """The schedule of `mode=agents`: the solver first, then verifier and corrector take turns."""
    if turn == 0:
        return SOLVER
    return VERIFIER if turn % 2 else CORRECTOR


def render_verifier(option: str, problem: Problem, kernel: str) -> str:
    """Asks for the verdict of `kernel` before it is known."""
    shown = kernel.rstrip()
    if option == "compact":
        body = render_prompt(option, problem).removesuffix("### ModelNew\n")
        return f"{body}### Attempt\n{shown}\n### Verdict\n"
    filled = _QUESTION.replace("{outcomes}", ", ".join(OUTCOMES)).replace("{kernel}", shown)
    return filled.replace("{source}", problem.source)


def predicted(response: str) -> str:
    """The outcome that a verifier's answer names, in its last `VERDICT:` line or else anywhere; empty for none."""
    text = without_thoughts(response).lower()
    found = _WORD.findall(text.rpartition("verdict:")[2])
    return found[0] if found else ""


def prediction_reward(guess: str, actual: str) -> float:
    """1 for the right outcome; .5 for knowing at least whether it is right; 0 else."""
    if not guess:
        return 0.0
    if guess == actual:
        return 1.0
    right = ("slow", "fast")
    return 0.5 if (guess in right) == (actual in right) else 0.0
