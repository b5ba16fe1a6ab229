"""One record of a file, in any of the common formats, becomes a conversation. Pure.

| format | keys | who answers |
|---|---|---|
| OpenAI chat | `messages: [{role, content}]` | role `assistant` |
| ShareGPT | `conversations: [{from, value}]` | `gpt`, `assistant`, `model`, `bot` |
| Alpaca | `instruction`, `input` (may be missing or empty), `output`, optional `system` | `output` |
| completion | `prompt`, `completion`: two texts, or two lists of messages | `completion` |
| plain | `prompt` (or `question`), `response` (or `answer`); `input`, `output` | `response` |
| ours | `asked`, `answer`: what `kbrl distill` writes; put before the model as a sampler does | `answer` |

Each record may have a `weight`, or a `reward`, by which it counts beside the others.

To add one: a function from the record to a conversation and a line in `_READERS`, whose keys say when it is meant.

Invariant: every assistant message is a target, unless its own `weight` or `train` says 0 or false; nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_ROLES = {
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing"), ASSISTANT),
    **dict.fromkeys(("user", "human"), USER),
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}


class FormatError(ValueError):
    """Why a record is no conversation; the message is what a person reads."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    is_target: bool = False


class Conversation(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    is_chat: bool = True
    """It is put into the model's chat template; else the texts stand as they are, the prompt before its answer."""
    is_asked: bool = False
    """Its prompt is one of ours: it is put before the model as a sampler does."""
    weight: float = 1.0
    """How much it counts beside the others; only proportions matter."""

    @property
    def targets(self) -> list[int]:
        """Places of the messages that are learned."""
        return [place for place, message in enumerate(self.messages) if message.is_target]


def conversation_of(record: Any) -> Conversation:
    """:raises FormatError: it is none, and why."""
    if not isinstance(record, Mapping):
        raise FormatError(f"a JSON object is needed, not {_kind(record)}")
    for keys, read in _READERS:
        if all(key in record for key in keys):
            return msgspec.structs.replace(_checked(read(record)), weight=_weight(record))
    known = (
        "messages · conversations · instruction+output · input+output · prompt+completion · prompt+response · "
        "asked+answer"
    )
    have = ", ".join(map(str, list(record)[:6])) or "none"
    raise FormatError(f"no known format: its keys are {have}; known: {known}")


def _weight(record: Mapping[str, Any]) -> float:
    """`weight`, else `reward`, else 1."""
    name = next((name for name in ("weight", "reward") if record.get(name) is not None), "")
    given = record.get(name, 1.0)
    if not isinstance(given, int | float) or not math.isfinite(given):
        raise FormatError(f"{name} is {given!r}, not a number")
    if given <= 0:
        raise FormatError(f"its {name} is {given:g}: nothing of it is to be learned")
    return float(given)


def _checked(found: Conversation) -> Conversation:
    if not found.targets:
        raise FormatError("it has no assistant turn to learn")
    first = found.targets[0]
    if not any(message.role != SYSTEM for message in found.messages[:first]):
        raise FormatError("nothing is asked before its first assistant turn")
    for place in found.targets:
        if not found.messages[place].content.strip():
            raise FormatError(f"assistant turn {found.targets.index(place) + 1} is empty")
    return found


def _chat(messages: Any, role_key: str, text_key: str, where: str) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise FormatError(f"{where} is {_kind(messages)}, not a list of messages")
    return [_message(entry, role_key, text_key, f"{where}[{place}]") for place, entry in enumerate(messages)]


def _message(entry: Any, role_key: str, text_key: str, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise FormatError(f"{where} is {_kind(entry)}, not an object")
    role = _ROLES.get(str(entry.get(role_key, "")).lower())
    if role is None:
        raise FormatError(f"{where}.{role_key} is {entry.get(role_key)!r}; known: {', '.join(sorted(_ROLES))}")
    if entry.get("tool_calls"):
        raise FormatError(f"{where} calls tools, which can't be rendered")
    is_wanted = bool(entry.get("weight", 1)) and bool(entry.get("train", True))
    return Message(role, _text(entry.get(text_key), f"{where}.{text_key}"), role == ASSISTANT and is_wanted)


def _text(value: Any, where: str) -> str:
    """A text, or OpenAI's list of text parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        parts = [part.get("text") for part in value if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(parts) == len(value) and all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
        raise FormatError(f"{where} has parts that are no text")
    raise FormatError(f"{where} is {_kind(value)}, not a text")


def _openai(record: Mapping[str, Any]) -> Conversation:
    return Conversation(tuple(_chat(record["messages"], "role", "content", "messages")))


def _sharegpt(record: Mapping[str, Any]) -> Conversation:
    messages = record["conversations"]
    first = messages[0] if isinstance(messages, list) and messages else {}
    is_openai = isinstance(first, Mapping) and "role" in first
    keys = ("role", "content") if is_openai else ("from", "value")
    found = _chat(messages, *keys, "conversations")
    system = record.get("system")
    return Conversation((*([Message(SYSTEM, system)] if isinstance(system, str) and system else []), *found))


def _alpaca(record: Mapping[str, Any]) -> Conversation:
    given = record.get("input")
    asked = _text(record["instruction"], "instruction")
    if given not in (None, ""):
        asked = f"{asked}\n\n{_text(given, 'input')}"
    return _pair(asked, _text(record["output"], "output"), is_chat=True, system=record.get("system"))


def _completion(record: Mapping[str, Any]) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _pair(prompt, completion, is_chat=False)
    asked = [Message(USER, prompt)] if isinstance(prompt, str) else _chat(prompt, "role", "content", "prompt")
    answered = _chat(completion, "role", "content", "completion")
    return Conversation((*_untargeted(asked), *answered))


def _plain(prompt: str, response: str) -> Callable[[Mapping[str, Any]], Conversation]:
    return lambda record: _pair(_text(record[prompt], prompt), _text(record[response], response), is_chat=False)


def _asked(record: Mapping[str, Any]) -> Conversation:
    found = _pair(_text(record["asked"], "asked"), _text(record["answer"], "answer"), is_chat=False)
    return msgspec.structs.replace(found, is_asked=True)


def _untargeted(messages: Sequence[Message]) -> list[Message]:
    return [msgspec.structs.replace(message, is_target=False) for message in messages]


def _pair(asked: str, answered: str, *, is_chat: bool, system: Any = None) -> Conversation:
    before = [Message(SYSTEM, system)] if isinstance(system, str) and system else []
    return Conversation((*before, Message(USER, asked), Message(ASSISTANT, answered, True)), is_chat)


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Conversation]], ...] = (
    (("messages",), _openai),
    (("conversations",), _sharegpt),
    (("instruction", "output"), _alpaca),
    (("input", "output"), _plain("input", "output")),
    (("prompt", "completion"), _completion),
    (("asked", "answer"), _asked),
    (("prompt", "response"), _plain("prompt", "response")),
    (("question", "answer"), _plain("question", "answer")),
    (("prompt", "answer"), _plain("prompt", "answer")),
    (("question", "response"), _plain("question", "response")),
)


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
