"""Prompts: what the policy sees, and what is taken from its answer.

Owns templates (`templates`), their length (`budget`) and the extraction of a candidate from a response (`extraction`).
Never runs code.
"""

from kbrl_async.kernels.answers.extraction import Extraction, extract, kernel_span
from kbrl_async.rollouts.prompts.budget import UNBOUNDED, TokenBudget
from kbrl_async.rollouts.prompts.feedback import Feedback, feedback_of, render_result, render_turn
from kbrl_async.rollouts.prompts.templates import TEMPLATES, render_prompt

__all__ = [
    "TEMPLATES",
    "UNBOUNDED",
    "Extraction",
    "Feedback",
    "TokenBudget",
    "extract",
    "feedback_of",
    "kernel_span",
    "render_prompt",
    "render_result",
    "render_turn",
]
