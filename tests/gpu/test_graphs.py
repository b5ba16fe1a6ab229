"""CUDA graphs on a real GPU: the same log-probs as the learner's, and faster than step by step."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kbrl_async.sampling.transformers.running_batch import CohortStats, RunningBatch, RunningSequence
from protocols.records import SamplingParams
from tests.models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 512}
    return tiny_model(scale=1.0, num_hidden_layers=4, num_key_value_heads=4, **shape).cuda()


def written(
    model: torch.nn.Module, graphs: bool, spoiled: bool = False
) -> tuple[list[RunningSequence], float, RunningBatch]:
    cohort = RunningBatch(0, model, frozenset(), CohortStats(), graphs=graphs)
    rng = random.Random(0)
    streams = [
        RunningSequence(
            f"r{i}", [rng.randrange(512) for _ in range(rng.randint(3, 60))], SamplingParams(100), random.Random(i)
        )
        for i in range(40)
    ]
    cohort.join(streams)
    torch.cuda.synchronize()
    started, done = time.perf_counter(), []
    while cohort.rows:
        done += cohort.step()
        if spoiled:  # what a graph reads must not have been freed: nothing that is free keeps its content
            [torch.full((size,), 1 << 40, device="cuda") for size in (8, 24, 48, 64, 128, 256) for _ in range(8)]
    return done, time.perf_counter() - started, cohort


def test_captured_steps_have_the_log_probs_of_the_model(model: torch.nn.Module) -> None:
    done, _, cohort = written(model, True, spoiled=True)
    assert cohort._graphs is not None
    assert cohort._graphs.failure == ""
    assert cohort._graphs.captured >= 1
    for s in done[:8]:
        ids = torch.tensor([s.prompt_ids + s.token_ids], device="cuda")
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        expected = [logp[len(s.prompt_ids) + i - 1, token].item() for i, token in enumerate(s.token_ids)]
        assert s.logprobs == pytest.approx(expected, abs=2e-3)


def test_captured_steps_are_faster(model: torch.nn.Module) -> None:
    written(model, True)
    assert written(model, True)[1] < 0.7 * written(model, False)[1]
