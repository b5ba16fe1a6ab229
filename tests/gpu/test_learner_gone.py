"""A learner that dies in a transfer by NCCL, whose kernels would wait for it for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.weights.test_learner_gone import Learner, lose_learner


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU for each of the two")
def test_who_receives_gives_it_up_within_seconds_and_has_its_gpu_back() -> None:
    learner, device = Learner("cuda:0"), torch.device("cuda", 1)
    try:
        with ThreadPoolExecutor(1) as pool:
            lose_learner(learner, device, pool)
    finally:
        learner.kill()
    assert torch.ones(8, device=device).sum().item() == 8.0
