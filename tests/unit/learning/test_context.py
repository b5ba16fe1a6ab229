"""Two ranks that share every row's tokens compute what one does: log-probs, gradients, an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from kbrl_async.errors import ConfigError
from kbrl_async.learning.fused.context import Context
from kbrl_async.learning.fused.flat import bundle
from kbrl_async.runs.config import load
from protocols.records import TrainSample
from tests.ports import free_port
from tests.unit.learning import context_rank
from tests.unit.learning.test_families import drawn_samples, model_of


def test_two_ranks_with_half_of_the_tokens_each_compute_what_one_does(tmp_path: Path) -> None:
    samples = drawn_samples()
    mp.start_processes(context_rank.main, (free_port(), samples, tmp_path), nprocs=2, start_method="fork")
    *found, metrics = torch.load(tmp_path / "found.pt")
    expected = [context_rank.computed(context_rank.lora(), samples, 1)]
    expected.append(context_rank.computed(model_of("qwen2"), samples, 1))
    for (scores, gradients), (scores_alone, gradients_alone) in zip(found, expected, strict=True):
        torch.testing.assert_close(scores, scores_alone, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == gradients_alone.keys()
        for name, gradient in gradients_alone.items():
            room = 1e-5 * float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=room, msg=name)
    alone = context_rank.updated(samples, None)
    for name in ("loss", "grad_norm", "entropy", "ess", "mismatch_kl", "kl_reference", "response_tokens"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["learner.context_parallel=2"], "don't come out even"),
        (["learner.context_parallel=2", "learner.processes=4", "loss=gspo"], "gspo weighs whole sequences"),
        (["learner.context_parallel=2", "learner.processes=2", "loss=ppo", "corrections=veto"], "veto weighs whole"),
        (["learner.offload_activations=true", "learner.activation_checkpointing=selective"], "has none"),
    ],
)
def test_what_contradicts_is_refused_before_anything_starts(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=given)


def test_ranks_that_are_more_than_heads_of_keys_have_the_one_of_their_queries() -> None:
    heads = torch.arange(2.0).view(1, 2, 1)
    assert Context(0, 4, None).widened(heads).flatten().tolist() == [0, 0, 1, 1]
    assert Context(0, 2, None).widened(heads).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_response_token_is_scored_on_one_rank(size: int) -> None:
    samples = [*drawn_samples(), TrainSample("one", [1, 2], [3], [0.0], 0.0, 0.0, 0)]
    for made in bundle(samples, 60, share=False):
        (batch,) = made.batches
        parts = [Context(rank, size, None).cut(batch) for rank in range(size)]
        scored = [pair for p in parts for pair in zip(p.sample_T.tolist(), p.offset_T.tolist(), strict=True)]
        assert sorted(scored) == sorted(zip(batch.sample_T.tolist(), batch.offset_T.tolist(), strict=True))
        assert all(len(p.predict_N) for p in parts), "each has something to compute"
        assert len({len(p.input_T) for p in parts}) == 1
        assert sum(parts[0].lengths) == size * len(parts[0].input_T)
