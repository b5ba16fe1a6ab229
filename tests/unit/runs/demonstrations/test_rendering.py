"""Prompt and target ids: the mask is right whatever the chat template is, and its end is learned."""

from __future__ import annotations

from typing import Any

import pytest

from kbrl_async.runs.demonstrations.formats import Conversation, FormatError, Message, conversation_of
from kbrl_async.runs.demonstrations.rendering import Renderer, TooLong
from tests.unit.runs.demonstrations.conftest import make_tokenizer

TWO_TURNS = conversation_of(
    {
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "<think>hm</think>one"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "two"},
        ]
    }
)


def texts(tokenizer: Any, conversation: Conversation) -> list[tuple[str, str]]:
    """(prompt, target) of every span, as text."""
    lesson = Renderer(tokenizer)(conversation)
    return [(tokenizer.decode(s.prompt_ids), tokenizer.decode(s.token_ids)) for s in lesson.spans]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_each_turn_is_a_target_behind_its_own_prompt_with_or_without_markers(
    name: str, tokenizers: dict[str, Any]
) -> None:
    first = "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n"
    second = first + "<think>hm</think>one<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizers[name], TWO_TURNS) == [
        (first, "<think>hm</think>one<|im_end|>"),
        (second, "two<|im_end|>"),
    ]


def test_the_targets_are_the_tokens_that_the_template_marks(tokenizers: dict[str, Any]) -> None:
    """What the markers say, and what is found without looking at them, are the same tokens."""
    tokenizer = tokenizers["marked"]
    plain = [{"role": m.role, "content": m.content} for m in TWO_TURNS.messages]
    marked = tokenizer.apply_chat_template(plain, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    wanted = [i for i, is_marked in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if is_marked]
    assert [i for span in Renderer(tokenizer)(TWO_TURNS).spans for i in span.token_ids] == wanted


def test_thoughts_that_history_drops_are_still_learned(tokenizers: dict[str, Any]) -> None:
    (_, first), (prompt, second) = texts(tokenizers["forgets"], TWO_TURNS)
    assert (first, second) == ("<think>hm</think>one<|im_end|>", "two<|im_end|>")
    assert "hm" not in prompt


def test_an_opened_thought_is_the_models_to_write(tokenizers: dict[str, Any]) -> None:
    header = "<|im_start|>assistant\n"
    spans = texts(tokenizers["opens"], TWO_TURNS)
    assert [target for _, target in spans] == ["<think>hm</think>one<|im_end|>", "two<|im_end|>"]
    assert all(prompt.endswith(header) for prompt, _ in spans)


def test_a_template_without_a_generation_prompt_keeps_its_space_in_the_target(tokenizers: dict[str, Any]) -> None:
    assert texts(tokenizers["llama"], TWO_TURNS)[0] == ("[INST] add [/INST]", " <think>hm</think>one<|im_end|>")


def test_what_a_template_refuses_is_a_reason(tokenizers: dict[str, Any]) -> None:
    with_system = Conversation((Message("system", "be short"), *TWO_TURNS.messages))
    with pytest.raises(FormatError, match="System role not supported"):
        Renderer(tokenizers["llama"])(with_system)


def test_without_a_template_texts_follow_one_another_and_end(tokenizers: dict[str, Any]) -> None:
    assert texts(tokenizers["none"], TWO_TURNS) == [
        ("add\n\n", "<think>hm</think>one<|im_end|>"),
        ("add\n\n<think>hm</think>one\n\nagain\n\n", "two<|im_end|>"),
    ]


def test_plain_pairs_are_never_put_into_the_template(tokenizers: dict[str, Any]) -> None:
    pair = conversation_of({"prompt": "add:", "response": " one"})
    assert texts(tokenizers["chatml"], pair) == [("add:", " one<|im_end|>")]


def test_a_template_that_hides_its_answers_is_refused() -> None:
    hiding = make_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(FormatError, match="does not show its assistant turn"):
        Renderer(hiding)(TWO_TURNS)


def test_a_lesson_longer_than_the_model_reads_is_named_with_both_lengths(tokenizers: dict[str, Any]) -> None:
    pair = conversation_of({"prompt": "a" * 30, "response": "b" * 30})
    assert Renderer(tokenizers["none"], 61)(pair).length == 61
    with pytest.raises(TooLong, match="61 tokens, and the model reads 60"):
        Renderer(tokenizers["none"], 60)(pair)


def test_our_own_prompts_are_put_before_the_model_as_the_sampler_does(tokenizers: dict[str, Any]) -> None:
    asked = Conversation(TWO_TURNS.messages[:2], is_chat=False, is_asked=True)
    renderer = Renderer(tokenizers["chatml"], ask=lambda prompt: f"[{prompt}]")
    assert [tokenizers["chatml"].decode(span.prompt_ids) for span in renderer(asked).spans] == ["[add]"]
