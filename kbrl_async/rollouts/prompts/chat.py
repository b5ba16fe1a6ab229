"""How a prompt is put before a model that was trained on conversations: by the template that its tokenizer carries.

::

    request.prompt ─ render ─▶ "<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n<think>\\n" ─▶ engine

Invariants
* What travels is the plain prompt. The template is applied beside the engine, where the tokenizer is; an endpoint that
  is asked in the style `chat` applies its own.
* The small policy's compact prompts are no conversation and never get a template, unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kbrl_async.errors import ConfigError

COMPACT = "compact"


class Chat(msgspec.Struct, frozen=True):
    """`render` makes what the model reads of a prompt."""

    render: Callable[[str], str] = str
    opens_thought: bool = False
    """The template ends in an open `<think>`: the response begins inside of a thought."""


PLAIN = Chat()


def chat_of(tokenizer: Any, option: str, chat_template: str, thinking: str) -> Chat:
    """`chat_template`: `auto` uses what the tokenizer has, `on` insists on it, `off` sends prompts as they are.

    `thinking`: `on` and `off` are told to templates that know `enable_thinking`; `auto` leaves it to them.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat_template == "on" and not has_template:
        cure = "Use prompt.chat_template=auto, or another model"
        raise ConfigError("the model's tokenizer has no chat template", cure)
    if chat_template == "off" or not has_template or (chat_template == "auto" and option == COMPACT):
        return PLAIN
    told = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}

    def render(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **told)
        return text

    return Chat(render, render("x").rstrip().endswith("<think>"))
