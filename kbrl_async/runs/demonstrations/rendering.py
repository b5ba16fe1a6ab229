"""A conversation becomes token ids: one prompt and one target for each assistant turn that is learned.

::

    messages[:k] ─ template, generation prompt ─▶ prompt text ─▶ prompt ids       (what a sampler would be given)
    messages[:k+1] ─ template ─▶ whole text, which begins with it; the rest ─▶ target ids, cut behind end-of-turn

Invariants
* A target holds the tokens that the model itself has to write, its end-of-turn included, and no other.
* The prompt of a target is tokenised alone, as a sampler does: what is learned is what is asked for later.
* A template that shows a turn otherwise once it is history (without its thoughts, say) changes prompts, never targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kbrl_async.runs.demonstrations.formats import Conversation, FormatError, Message


class LearnedTurn(NamedTuple):
    """One turn to learn."""

    prompt_ids: list[int]
    token_ids: list[int]


class Lesson(NamedTuple):
    """A conversation in tokens."""

    spans: tuple[LearnedTurn, ...]
    where: str = ""
    weight: float = 1.0

    @property
    def length(self) -> int:
        return max(len(span.prompt_ids) + len(span.token_ids) for span in self.spans)

    @property
    def targets(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)


class TooLong(FormatError):  # noqa: N818 - reads as the sentence it prints
    """The model can't read it."""


class Renderer:
    """`Renderer(tokenizer, limit)(conversation)`; `limit` is the model's context in tokens, 0 for none.

    `ask` makes of a prompt of ours what the sampler would put before the model.
    """

    def __init__(self, tokenizer: Any, limit: int = 0, ask: Callable[[str], str] = str) -> None:
        self._tokenizer, self._limit, self._ask = tokenizer, limit, ask
        self._end = int(tokenizer.eos_token_id)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def __call__(self, conversation: Conversation, where: str = "") -> Lesson:
        """:raises FormatError: it can't be put into the template, or is too long for the model."""
        messages = conversation.messages
        spans = []
        for place in conversation.targets:
            if conversation.is_chat and self.has_template:
                prompt, answer = self._chat(messages, place)
            else:
                prompt, answer = _plain(messages[:place], conversation.is_chat), messages[place].content
            if conversation.is_asked:
                prompt = self._ask(prompt)
            spans.append(self._span(prompt, answer))
        lesson = Lesson(tuple(spans), where, conversation.weight)
        if self._limit and lesson.length > self._limit:
            raise TooLong(f"{lesson.length} tokens, and the model reads {self._limit}")
        return lesson

    def _span(self, prompt: str, answer: str) -> LearnedTurn:
        prompt_ids, token_ids = self._ids(prompt), self._ids(answer)
        if not prompt_ids:
            raise FormatError("its prompt is empty")
        # What a template writes behind the end of a turn is not the model's.
        end = token_ids.index(self._end) if self._end in token_ids else len(token_ids)
        return LearnedTurn(prompt_ids, [*token_ids[:end], self._end])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _chat(self, messages: Sequence[Message], place: int) -> tuple[str, str]:
        """(prompt, what the model writes from there on) of the assistant turn at `place`."""
        whole = self._template(messages[: place + 1], generation=False)
        prompt = self._template(messages[:place], generation=True)
        split = len(prompt)
        if not whole.startswith(prompt):
            # The generation prompt holds more than a turn in history does, such as an opened thought. What both begin
            # with is the header of the turn; where that runs into the answer, the answer is learned whole.
            bare = self._template(messages[:place], generation=False)
            split = _common(whole, prompt)
            if split <= len(bare) or not whole.startswith(bare):
                raise FormatError("the chat template shows no prompt before its assistant turn")
            split -= _overlap(whole[len(bare) : split], messages[place].content)
        # A template may lay out thoughts anew, so only what follows them is looked for.
        if messages[place].content.rpartition("</think>")[2].strip() not in whole[split:]:
            raise FormatError("the chat template does not show its assistant turn behind the prompt")
        return whole[:split], whole[split:]

    def _template(self, messages: Sequence[Message], *, generation: bool) -> str:
        from jinja2 import TemplateError

        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise FormatError(f"the chat template refuses it: {reason}") from None
        return str(text)


def _plain(messages: Sequence[Message], is_chat: bool) -> str:
    """Without a template: the texts as they stand, those of a chat apart by an empty line."""
    return "".join(f"{message.content}\n\n" if is_chat else message.content for message in messages)


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _overlap(header: str, answer: str) -> int:
    """How many characters at the end of `header` are the beginning of the answer."""
    longest = min(len(header), len(answer))
    return next((n for n in range(longest, 0, -1) if header.endswith(answer[:n])), 0)
