"""Continuous batching: rows come and go, and each is decoded as if it were alone."""

from __future__ import annotations

import random

import pytest
import torch

from kbrl_async.sampling.transformers.running_batch import BatchStats, RunningBatch, RunningSequence, draw
from protocols.records import SamplingParams


def sequence(name: str, prompt: list[int], max_tokens: int, temperature: float = 1.0, seed: int = 0) -> RunningSequence:
    return RunningSequence(name, prompt, SamplingParams(max_tokens, temperature), random.Random(seed))


def teacher_forced(model: torch.nn.Module, s: RunningSequence) -> list[float]:
    ids = torch.tensor([s.prompt_ids + s.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits / (s.params.temperature or 1.0), -1)
    return [logp[len(s.prompt_ids) + i - 1, token].item() for i, token in enumerate(s.token_ids)]


def drain(batch: RunningBatch) -> list[RunningSequence]:
    done = []
    while batch.rows:
        done += batch.step()
    return done


def batch_of(model: torch.nn.Module, **kwargs: int) -> RunningBatch:
    return RunningBatch(0, model, frozenset(), BatchStats(), **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_that_join_and_leave_at_any_time_keep_their_log_probs(model: torch.nn.Module, temperature: float) -> None:
    rng = random.Random(1)
    batch, done, waiting = batch_of(model), [], []
    for i in range(16):
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 20))]
        waiting.append(sequence(f"s{i}", prompt, rng.randint(1, 15), temperature, seed=i))
    while waiting or batch.rows:
        joining = [waiting.pop() for _ in range(min(rng.randint(0, 3), len(waiting)))]
        done += batch.join(joining) + batch.step()
    assert len(done) == 16
    for s in done:
        assert len(s.token_ids) == s.params.max_tokens
        assert s.logprobs == pytest.approx(teacher_forced(model, s), abs=1e-4)


def test_a_greedy_row_in_a_crowd_writes_what_it_writes_alone(model: torch.nn.Module) -> None:
    alone = batch_of(model)
    alone.join([sequence("a", [1, 2, 3], 12, 0.0)])
    (expected,) = drain(alone)
    crowd = batch_of(model)
    crowd.join([sequence(f"b{i}", [i] * (i + 1), 3 + 5 * i, 1.0, i) for i in range(5)])
    crowd.step()
    crowd.join([sequence("a", [1, 2, 3], 12, 0.0)])
    found = next(s for s in drain(crowd) if s.request_id == "a")
    assert found.token_ids == expected.token_ids


def test_a_seeded_row_is_reproducible_whatever_surrounds_it(model: torch.nn.Module) -> None:
    results = []
    for company in (0, 6):
        batch = batch_of(model)
        batch.join([sequence(f"c{i}", [i, i], 5, 1.0, 100 + i) for i in range(company)])
        batch.join([sequence("a", [9, 8], 15, 1.0, seed=5)])
        results.append(next(s for s in drain(batch) if s.request_id == "a").token_ids)
    assert results[0] == results[1]


def test_end_of_text_ends_a_row_and_is_recorded(model: torch.nn.Module) -> None:
    probe = batch_of(model)
    probe.join([sequence("a", [1, 2, 3], 6, 0.0)])
    (free,) = drain(probe)
    batch = RunningBatch(0, model, frozenset({free.token_ids[2]}), BatchStats())
    batch.join([sequence("a", [1, 2, 3], 6, 0.0)])
    (stopped,) = drain(batch)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[2]) + 1]


def test_twins_share_one_prefill_and_later_ones_use_the_cache(model: torch.nn.Module) -> None:
    stats = BatchStats()
    batch = RunningBatch(0, model, frozenset(), stats)
    batch.join([sequence(f"a{i}", [1, 2, 3, 4], 3, 1.0, i) for i in range(8)])
    batch.join([sequence("late", [1, 2, 3, 4], 3)])
    assert stats.prefill_tokens == 4
    assert stats.cached_prompts == 8
    for s in drain(batch):
        assert s.logprobs == pytest.approx(teacher_forced(model, s), abs=1e-4)


def test_the_prefix_cache_is_bounded(model: torch.nn.Module) -> None:
    batch = batch_of(model, prefix_tokens=10)
    batch.join([sequence(f"a{i}", [i] * 4, 1) for i in range(5)])
    assert sum(len(key) for key in batch.prefixes) <= 10


def test_a_dropped_row_is_gone_and_the_others_go_on(model: torch.nn.Module) -> None:
    batch = batch_of(model)
    batch.join([sequence(f"a{i}", [i, i + 1], 10, 1.0, i) for i in range(3)])
    assert batch.drop("a0")
    assert not batch.drop("a0")
    done = drain(batch)
    assert sorted(s.request_id for s in done) == ["a1", "a2"]
    for s in done:
        assert s.logprobs == pytest.approx(teacher_forced(model, s), abs=1e-4)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -float("inf"), 2.0]])
    uniform = (torch.arange(4000) + 0.5) / 4000
    tokens, logp = draw(logits.expand(4000, -1), torch.full((4000,), 0.5), uniform)
    expected = torch.softmax(logits[0] / 0.5, -1)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 4000, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logp, expected.log()[tokens])


def test_the_edges_of_the_random_number_never_pick_an_impossible_token() -> None:
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).expand(2, -1)
    tokens, logp = draw(logits, torch.ones(2), torch.tensor([0.0, 1.0 - 2**-24]))
    assert tokens.tolist() == [1, 1]
    assert logp.tolist() == [0.0, 0.0]


def test_a_nucleus_renormalises_what_it_keeps() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    tokens, logp = draw(logits, torch.ones(1), torch.tensor([0.99]), torch.tensor([0.7]))
    assert tokens.tolist() == [1]
    assert logp.exp().tolist() == pytest.approx([0.375])
