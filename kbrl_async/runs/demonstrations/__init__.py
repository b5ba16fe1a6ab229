"""Demonstrations: what a policy is taught by imitation, from files and from the archives of earlier runs.

::

    files (JSON, JSONL, Parquet) ─ read ─▶ records ─ conversation_of ─▶ Conversation ─ Renderer ─▶ Lesson
    RUN/rollouts.sqlite ─ best verified answers ────────────────────────▶ Conversation ─────┘        └ one span a turn

Owns formats, chat templates and masks. Never touches a model or a socket. Whatever is left out is a `Skipped` with its
place and reason: nothing is dropped in silence.
"""

from kbrl_async.runs.demonstrations.formats import Conversation, Message, conversation_of
from kbrl_async.runs.demonstrations.gathering import Gathered, Skipped, gather
from kbrl_async.runs.demonstrations.rendering import LearnedTurn, Lesson, Renderer

__all__ = [
    "Conversation",
    "Gathered",
    "LearnedTurn",
    "Lesson",
    "Message",
    "Renderer",
    "Skipped",
    "conversation_of",
    "gather",
]
