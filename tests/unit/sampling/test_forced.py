"""Answers that are given: the engine writes them, and its log-probs are still its own."""

from __future__ import annotations

import enum
import importlib
import random
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import load
from kbrl_async.sampling.forced import FORCED, ForcedParams, Reciter, Script, forced_ids, read_script
from kbrl_async.sampling.settings import Sampler
from kbrl_async.sampling.transformers.running_batch import BatchStats, RunningBatch, RunningSequence
from kbrl_async.sampling.vllm.options import FORCING, VLLMOptions, arguments
from kbrl_async.sampling.vllm.versions import Draft
from protocols.records import Problem, RolloutRequest, SamplingParams
from tests.models import EOS
from tests.unit.sampling.test_running_batch import teacher_forced

ANSWER = [5, 9, 2, 2, 40, EOS]


class Bytes:
    """A byte is a token, and 256 is the end."""

    eos_token_id = 256

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(i for i in token_ids if i < 256).decode()


def given(answer: list[int], temperature: float = 1.0) -> SamplingParams:
    return ForcedParams(20, temperature, forced=tuple(answer))


def request(rollout: str = "g000001.r0", problem: str = "L1/01_tanh", turn: int = 0) -> RolloutRequest:
    return RolloutRequest(rollout, "g000001", Problem(problem, 1, "tanh", ""), "p", "c", SamplingParams(400), turn=turn)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_row_writes_its_answer_beside_one_that_draws(model: torch.nn.Module, temperature: float) -> None:
    batch = RunningBatch(0, model, frozenset({EOS}), BatchStats())
    told = RunningSequence("told", [1, 2, 3], given(ANSWER, temperature), random.Random(0))
    free = RunningSequence("free", [4, 5], SamplingParams(8), random.Random(1))
    done = batch.join([told, free])
    while batch.rows:
        done += batch.step()
    assert told.token_ids == ANSWER
    assert told.finish_reason == "stop"
    assert free.token_ids != ANSWER
    for row in (told, free):
        assert row.logprobs == pytest.approx(teacher_forced(model, row), abs=1e-4)


def test_an_answer_longer_than_max_tokens_is_cut_like_any_other(model: torch.nn.Module) -> None:
    batch = RunningBatch(0, model, frozenset({EOS}), BatchStats())
    row = RunningSequence("told", [1], msgspec.structs.replace(given(ANSWER), max_tokens=3), random.Random(0))
    batch.join([row])
    while batch.rows:
        batch.step()
    assert (row.token_ids, row.finish_reason) == (ANSWER[:3], "length")


def test_lengths_are_as_asked_and_the_answer_stands_at_the_end() -> None:
    code = "```python\nx = 1\n```\n"
    reciter = Reciter(Script({"L1/01_tanh": [code]}, 0, median=300, spread=1.5), Bytes())
    said = [forced_ids(reciter.params(request(f"g000001.r{i}"))) for i in range(400)]
    assert statistics.median(map(len, said)) == pytest.approx(300, rel=0.05)
    assert sum(len(ids) <= 450 for ids in said) / len(said) == pytest.approx(0.84, abs=0.05)
    text = Bytes().decode(list(said[0]), skip_special_tokens=True)
    assert text.endswith("\n\n" + code)
    assert said[0][-1] == Bytes.eos_token_id


def test_a_rollout_is_answered_alike_after_a_crash_and_another_one_is_not() -> None:
    script = Script({"L1/01_tanh": ["a", "b", "c", "d"]}, 0, median=50, spread=2.0)
    first, again = (Reciter(script, Bytes()).params(request()) for _ in range(2))
    assert first == again
    assert len({forced_ids(Reciter(script, Bytes()).params(request(f"g000001.r{i}"))) for i in range(20)}) > 4
    assert first != Reciter(script, Bytes()).params(request(turn=1))


def test_a_thought_that_the_prompt_has_opened_is_closed() -> None:
    reciter = Reciter(Script({"L1/01_tanh": ["answer"]}, 0), Bytes(), opens_thought=True)
    text = Bytes().decode(list(forced_ids(reciter.params(request()))), skip_special_tokens=True)
    assert text == "\n</think>\n\nanswer"


def test_a_problem_without_an_answer_is_named() -> None:
    with pytest.raises(ConfigError, match="no answer to L9/01_new"):
        Reciter(Script({}, 0), Bytes()).params(request(problem="L9/01_new"))


@pytest.mark.parametrize("text", ["", "[]", '{"answers": {"a": "b"}}', '{"answers": {}, "seed": 0, "lenght": 2}'])
def test_a_file_that_is_no_script_is_an_error(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "answers.json").write_text(text)
    with pytest.raises(ConfigError, match=r"sampler\.forced=.*can't be read"):
        read_script(str(path))


@pytest.mark.parametrize("words", [["sampler.engine=openai", "sampler.base_url=http://x/v1"], ["temperature=0.7"]])
def test_what_can_t_be_forced_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"sampler\.forced"):
        load((), [*words, "sampler.forced=a.json", "model_name=m"])


# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Move(enum.Enum):
    """vLLM's MoveDirectionality."""

    UNIDIRECTIONAL = 1
    SWAP = 2


class Changes(types.SimpleNamespace):
    """vLLM's BatchUpdate."""

    def __init__(self, added: Any = (), removed: Any = (), moved: Any = ()) -> None:
        super().__init__(added=added, removed=removed, moved=moved, batch_size=4)


@pytest.fixture
def forcing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor, as vLLM's worker makes it."""
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fake: Any = types.ModuleType("vllm.v1.sample.logits_processor")
    fake.LogitsProcessor = object
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    module, _, name = FORCING.partition(":")
    monkeypatch.delitem(sys.modules, module, raising=False)
    return getattr(importlib.import_module(module), name)(None, torch.device("cpu"), False)


def asked(row: int, answer: list[int] | None, written: list[int]) -> tuple[Any, ...]:
    extra = None if answer is None else {FORCED: answer}
    return row, types.SimpleNamespace(extra_args=extra), [1], written


def left(processor: Any) -> list[list[int]]:
    """For each of four rows, which of eight tokens may be drawn."""
    logits = processor.apply(torch.zeros(4, 8))
    return [torch.nonzero(row > -1e9).flatten().tolist() for row in logits]


EVERY = list(range(8))


def test_each_row_has_its_next_token_left_and_others_all(forcing: Any) -> None:
    first: list[int] = []
    forcing.update_state(Changes(added=[asked(0, [3, 5], first), asked(1, None, []), asked(2, [7], [7])]))
    assert left(forcing) == [[3], EVERY, EVERY, EVERY]
    first.append(-1)  # scheduled ahead: a placeholder counts
    forcing.update_state(None)
    assert left(forcing)[0] == [5]


def test_rows_that_move_swap_leave_and_are_replaced_take_their_answers_along(forcing: Any) -> None:
    forcing.update_state(Changes(added=[asked(0, [1], []), asked(1, [2], []), asked(2, [3], []), asked(3, [4], [])]))
    forcing.update_state(Changes(removed=[1], moved=[(3, 1, Move.UNIDIRECTIONAL), (0, 2, Move.SWAP)]))
    assert left(forcing) == [[3], [4], [1], EVERY]
    forcing.update_state(Changes(added=[asked(0, None, [])]))
    assert left(forcing)[0] == EVERY


def test_a_continued_request_is_given_the_rest() -> None:
    draft = Draft([1, 2], 10)
    draft.token_ids += ANSWER[:2]
    assert draft.forced_words(given(ANSWER)) == {"extra_args": {FORCED: ANSWER[2:]}}
    assert draft.forced_words(SamplingParams(10)) == {}


def test_vllm_records_the_distribution_before_a_token_is_forced() -> None:
    known = frozenset({"logprobs_mode", "skip_tokenizer_init", "logits_processors"})
    options = VLLMOptions(
        settings=Sampler(forced="a.json"), model="m", temperature=1.0, max_staleness=2, device="cpu", threads=1,
        seed=0, lora_rank=0, roles=1,
    )  # fmt: skip
    assert arguments(options, known)["logprobs_mode"] == "raw_logprobs"
    assert arguments(options, known)["logits_processors"] == [FORCING]
    plain = msgspec.structs.replace(options, settings=Sampler())
    assert arguments(plain, known) == {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
