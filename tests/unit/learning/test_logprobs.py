"""Packing and log-probs: every layout and chunk size gives the log-probs of each sequence alone."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from kbrl_async.learning.logprobs import batch_logprobs, rounded_weights, sequence_logprobs, token_logprobs
from kbrl_async.learning.packing import pack
from protocols.records import TrainGroup, TrainSample


def alone(model: torch.nn.Module, sample: TrainSample, temperature: float) -> list[float]:
    ids = torch.tensor([sample.prompt_ids + sample.token_ids])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / temperature, -1)
    start = len(sample.prompt_ids)
    return [logp[start + i - 1, token].item() for i, token in enumerate(sample.token_ids)]


@pytest.mark.parametrize("tree_tokens", [0, 24, 768])
@pytest.mark.parametrize("budget", [16, 64, 4096])
def test_packed_log_probs_equal_those_of_each_sequence_alone(
    model: torch.nn.Module, groups: list[TrainGroup], tree_tokens: int, budget: int
) -> None:
    samples = [s for g in groups for s in g.samples]
    found = [[0.0] * len(s.token_ids) for s in samples]
    for batch in pack(samples, budget, tree_tokens):
        logp, _ = batch_logprobs(model, batch, 0.7)
        for sample, offset, value in zip(batch.sample_T.tolist(), batch.offset_T.tolist(), logp.tolist(), strict=True):
            assert found[sample][offset] == 0.0, "a token came twice"
            found[sample][offset] = value
    for sample, values in zip(samples, found, strict=True):
        assert values == pytest.approx(alone(model, sample, 0.7), abs=2e-5)


def test_samples_of_a_group_share_their_prompt(groups: list[TrainGroup]) -> None:
    samples = groups[0].samples
    (batch,) = pack(samples, 4096)
    assert batch.input_BL.numel() == len(samples[0].prompt_ids) + sum(len(s.token_ids) for s in samples)


def test_padding_stays_under_the_budget(groups: list[TrainGroup]) -> None:
    samples = [s for g in groups for s in g.samples]
    assert all(batch.input_BL.numel() <= 40 for batch in pack(samples, 40))


def test_chunked_log_probs_and_gradients_equal_the_whole() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(33, 8, requires_grad=True)
    target = torch.randint(0, 50, (33,))
    results = []
    for chunk_elements in (1 << 24, 50 * 7):
        logp, entropy = token_logprobs(hidden, head, target, 0.7, 50, chunk_elements)
        gradient = torch.autograd.grad(logp.square().sum(), [hidden, head.weight])
        results.append((logp, entropy, *gradient))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_chunks_never_make_more_logits_than_allowed() -> None:
    seen = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return hidden @ torch.ones(4, 100)

    token_logprobs(torch.randn(25, 4), head, torch.zeros(25, dtype=torch.long), 1.0, 100, chunk_elements=800)
    assert max(seen) == 8


def test_entropy_of_a_uniform_policy_is_log_vocabulary() -> None:
    head = torch.nn.Linear(4, 10)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    _, entropy = token_logprobs(torch.randn(3, 4), head, torch.tensor([0, 1, 2]), 1.0, 10)
    torch.testing.assert_close(entropy, torch.full((3,), torch.tensor(10.0).log().item()))


def test_sequence_log_probs_score_every_token_but_the_first(model: torch.nn.Module) -> None:
    sample = TrainSample("r", [5], [7, 9, 11], [], 0.0, 0.0, 0)
    assert sequence_logprobs(model, [5, 7, 9, 11]) == pytest.approx(alone(model, sample, 1.0), abs=2e-5)


def test_rounded_weights_are_those_of_a_rounded_copy_and_go_back(model: torch.nn.Module) -> None:
    ids = [5, 7, 9, 11]
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.bfloat16().float()
    before = sequence_logprobs(model, ids)
    with rounded_weights(model, torch.bfloat16):
        rounded = sequence_logprobs(model, ids)
    assert rounded == sequence_logprobs(copy, ids) != before
    assert sequence_logprobs(model, ids) == before
    with pytest.raises(IndexError), rounded_weights(model, torch.bfloat16):
        sequence_logprobs(model, [5, 1 << 30])
    assert sequence_logprobs(model, ids) == before


def test_an_update_that_rounding_takes_away_does_not_show(model: torch.nn.Module) -> None:
    """Seen with Qwen3-4B at a rate of 1e-6: bf16 weights stayed what they were, and the sampler was called stale."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = [5, 7, 9, 11]
    with rounded_weights(model, torch.bfloat16):
        before = sequence_logprobs(model, ids)
    for parameter in model.parameters():
        parameter.data = parameter.data * (1 + 1e-4)
    with rounded_weights(model, torch.bfloat16):
        assert sequence_logprobs(model, ids) == before
    assert sequence_logprobs(model, ids) != before
