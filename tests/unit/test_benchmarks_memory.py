"""`benchmarks.memory` on a toy: every way of computing again gives one update, and what is not one is said."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import memory
from benchmarks.harness.models import word_tokenizer
from benchmarks.sampler.clients import most_of, work


def test_every_way_gives_the_same_update_and_stands_beside_its_prediction() -> None:
    found = memory.again(shape="tiny", device="cpu", group=2, count=1)
    assert found["ok"]
    assert list(found["ways"]) == ["none", "selective", "full", "full+host"]
    shared = memory.again(shape="tiny", device="cpu", group=2, count=1, ways=("full", "full+host+shared"))
    assert shared["ok"]
    for row in found["ways"].values():
        assert row["by"] == "fused"
        assert row["losses"] == pytest.approx(found["ways"]["none"]["losses"], abs=1e-6)
    predicted = [row["predicted_gb"] for row in found["ways"].values()]
    assert predicted == sorted(predicted, reverse=True)
    assert len(set(predicted)) == len(predicted)


def test_a_way_with_another_gradient_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(trainer: Any, groups: Any, count: int) -> dict[str, Any]:
        is_full = trainer.settings.learner.activation_checkpointing == "full"
        return {"tokens_per_s": 1.0, "losses": [0.0], "grad_norms": [1.05 if is_full else 1.0]}

    monkeypatch.setattr(memory, "measured", measured)
    found = memory.again(shape="tiny", device="cpu", ways=("none", "full"))
    assert not found["ok"]
    assert found["ways"]["full"]["grad_norm_off"] == pytest.approx(0.05)


def test_answers_of_many_lengths_stay_about_their_median() -> None:
    found = memory.gaps(
        shape="tiny", device="cpu", median=40, prompt_tokens=30, batch=1, group=2, count=2, token_budget=256
    )
    assert len(found["updates"]) == 2
    assert found["tokens_per_s"] > 0


def test_no_answer_is_longer_than_the_engine_is_started_for() -> None:
    source = work(100, 4, 10)
    assert max(next(source)[1] for _ in range(2000)) == most_of(10)


def test_a_prompt_has_as_many_tokens_as_were_asked_for() -> None:
    text, _ = next(work(vocabulary=2048, tokens=300, answer=8))
    ids = word_tokenizer(2048).encode(text, add_special_tokens=False)
    assert ids == [int(word.removeprefix("t")) for word in text.split()]
    assert len(ids) == 300
