"""One record, in any of the common formats, as a conversation; or the reason why it is none."""

from __future__ import annotations

from typing import Any

import pytest

from kbrl_async.runs.demonstrations.formats import Conversation, FormatError, conversation_of

ASKED, ANSWERED = {"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}


def told(conversation: Conversation) -> list[tuple[str, str, bool]]:
    return [(m.role, m.content, m.is_target) for m in conversation.messages]


ONE_TURN = [("user", "add", False), ("assistant", "a + b", True)]


@pytest.mark.parametrize(
    ("record", "is_chat"),
    [
        ({"messages": [ASKED, ANSWERED]}, True),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "a + b"}]}]}, True),
        ({"conversations": [{"from": "human", "value": "add"}, {"from": "gpt", "value": "a + b"}]}, True),
        ({"conversations": [ASKED, ANSWERED]}, True),
        ({"instruction": "add", "output": "a + b"}, True),
        ({"instruction": "add", "input": "", "output": "a + b"}, True),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, True),
        ({"prompt": "add", "completion": [ANSWERED]}, True),
        ({"prompt": "add", "completion": "a + b"}, False),
        ({"prompt": "add", "response": "a + b", "id": 7}, False),
        ({"question": "add", "answer": "a + b"}, False),
        ({"input": "add", "output": "a + b"}, False),
    ],
)
def test_every_format_gives_the_same_conversation(record: dict[str, Any], is_chat: bool) -> None:
    found = conversation_of(record)
    assert told(found) == ONE_TURN
    assert found.is_chat is is_chat


def test_alpaca_puts_the_input_under_the_instruction() -> None:
    found = conversation_of({"instruction": "add", "input": "1, 2", "output": "3", "system": "be short"})
    assert told(found)[:2] == [("system", "be short", False), ("user", "add\n\n1, 2", False)]


def test_every_assistant_turn_is_a_target() -> None:
    found = conversation_of({"messages": [ASKED, ANSWERED, ASKED, ANSWERED]})
    assert found.targets == [1, 3]


def test_a_turn_without_weight_is_history_only() -> None:
    found = conversation_of({"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED]})
    assert found.targets == [3]


def test_assistant_turns_of_a_prompt_are_history_only() -> None:
    found = conversation_of({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]})
    assert found.targets == [3]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "a JSON object is needed, not a list"),
        ({"text": "all"}, "no known format: its keys are text"),
        ({"messages": "hello"}, "messages is a text, not a list"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [ASKED]}, "no assistant turn"),
        ({"messages": [ANSWERED]}, "nothing is asked"),
        ({"messages": [{"role": "system", "content": "s"}, ANSWERED]}, "nothing is asked"),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "assistant turn 1 is empty"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, r"messages\[1\].content is null"),
        ({"messages": [ASKED, {"role": "robot", "content": "x"}]}, r"messages\[1\].role is 'robot'"),
        ({"messages": [ASKED, "x"]}, r"messages\[1\] is a text, not an object"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [1]}]}, "calls tools"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\].value is null"),
        ({"instruction": 3, "output": "x"}, "instruction is a number"),
        ({"prompt": "add", "response": ["x"]}, "response has parts that are no text"),
    ],
)
def test_what_is_wrong_is_said(record: Any, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        conversation_of(record)


@pytest.mark.parametrize(("more", "weight"), [({}, 1.0), ({"weight": 2}, 2.0), ({"reward": 0.5}, 0.5)])
def test_a_record_counts_by_its_weight_or_its_reward(more: dict[str, Any], weight: float) -> None:
    assert conversation_of({"input": "add", "output": "a + b", **more}).weight == weight


@pytest.mark.parametrize("weight", [0, -1, "much", float("nan")])
def test_a_weight_that_can_not_be_learned_by_is_refused(weight: object) -> None:
    with pytest.raises(FormatError, match="weight"):
        conversation_of({"input": "add", "output": "a + b", "weight": weight})
