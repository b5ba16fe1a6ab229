"""What a thinking model says to itself, and what is left of its response for others.

::

    <think> … </think> answer       the thought is dropped
    … </think> answer               the chat template opened the thought in the prompt
    <think> …                       cut off while thinking: there is no answer

Invariant: no thought enters a candidate, a prediction or a later turn's prompt.
"""

from __future__ import annotations

import re

_NAMES = "think|thinking|thought|reasoning"
_CLOSED = re.compile(rf"<({_NAMES})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_CLOSING = re.compile(rf"</(?:{_NAMES})>", re.IGNORECASE)
_OPENING = re.compile(rf"<(?:{_NAMES})>", re.IGNORECASE)


def without_thoughts(response: str, *, opened: bool = False) -> str:
    """The part of a response that is meant for others; empty where it ended in thought.

    `opened`: the prompt ends in an open thought, so what comes before a closing tag is one.

    >>> [without_thoughts(text) for text in ("<think>two?</think>three", "two?</think>three", "<think>two")]
    ['three', 'three', '']
    """
    if opened and not _CLOSING.search(response):
        return ""
    text = _CLOSING.split(_CLOSED.sub("", response))[-1]
    begun = _OPENING.search(text)
    return text[: begun.start()] if begun else text


def is_cut_off(response: str, *, opened: bool = False) -> bool:
    """Whether nothing but thought came."""
    has_thought = opened or bool(_OPENING.search(response) or _CLOSING.search(response))
    return has_thought and not without_thoughts(response, opened=opened).strip()
