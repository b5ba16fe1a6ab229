"""Prompts: what the policy sees, and what is taken from its answer.

Owns templates (`templates`) and the extraction of a candidate from a response (`extraction`). Never runs code.
"""

from kbrl_async.prompts.extraction import Extraction, extract
from kbrl_async.prompts.feedback import Feedback, feedback_of, render_turn
from kbrl_async.prompts.templates import TEMPLATES, render_prompt

__all__ = ["TEMPLATES", "Extraction", "Feedback", "extract", "feedback_of", "render_prompt", "render_turn"]
