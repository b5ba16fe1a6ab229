"""Steps of fixed shape: padded to buckets, captured after a few uses, forgotten when buffers move. Played on a CPU."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import pytest
import torch

from kbrl_async.sampling.transformers.graphs import USES_BEFORE_CAPTURE, GraphedSteps, Replay
from kbrl_async.sampling.transformers.running_batch import CohortStats, RunningBatch, RunningSequence
from protocols.records import SamplingParams
from tests.unit.sampling.test_cohort import drain, stream


def played(step: Callable[[], torch.Tensor]) -> Replay:
    """As a GPU captures: runs once to warm up, and the replay reads the same fixed inputs."""
    step()
    return step


def graphed(model: torch.nn.Module, capture: Callable[[Callable[[], torch.Tensor]], Replay] = played) -> RunningBatch:
    cohort = RunningBatch(0, model, frozenset(), CohortStats())
    cohort._graphs = GraphedSteps(cohort._logits, cohort._cache, torch.device("cpu"), capture)
    return cohort


def run(cohort: RunningBatch) -> list[RunningSequence]:
    rng, done, waiting = random.Random(1), [], []
    for i in range(24):
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 90))]
        waiting.append(stream(f"s{i}", prompt, rng.randint(1, 60), 1.0, seed=i))
    while waiting or cohort.rows:
        joining = [waiting.pop() for _ in range(min(rng.randint(0, 3), len(waiting)))]
        done += cohort.join(joining) + cohort.step()
    return sorted(done, key=lambda s: s.request_id)


def test_padded_rows_write_what_they_write_without_padding(model: torch.nn.Module) -> None:
    plain, padded = RunningBatch(0, model, frozenset(), CohortStats()), graphed(model)
    for a, b in zip(run(plain), run(padded), strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert padded._graphs is not None
    assert padded._graphs.captured > 3


def test_a_shape_is_captured_once_it_has_come_a_few_times(model: torch.nn.Module) -> None:
    cohort = graphed(model)
    cohort.join([stream("a", [1, 2, 3], 40)])
    for _ in range(USES_BEFORE_CAPTURE):
        cohort.step()
    assert cohort._graphs is not None
    assert cohort._graphs.captured == 0
    cohort.step()
    cohort.step()
    assert cohort._graphs.captured == 1


def test_grown_buffers_are_captured_anew(model: torch.nn.Module) -> None:
    cohort = graphed(model)
    cohort.join([stream("a", [1, 2, 3], 200, seed=3)])
    (long,) = drain(cohort)
    alone = RunningBatch(0, model, frozenset(), CohortStats())
    alone.join([stream("a", [1, 2, 3], 200, seed=3)])
    assert drain(alone)[0].token_ids == long.token_ids
    assert cohort._graphs is not None
    assert cohort._graphs.captured == 2


def test_what_can_not_be_captured_goes_on_step_by_step(model: torch.nn.Module) -> None:
    def refuse(_step: Callable[[], torch.Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    cohort = graphed(model, refuse)
    cohort.join([RunningSequence("a", [1, 2], SamplingParams(20), random.Random(0))])
    assert len(drain(cohort)[0].token_ids) == 20
    assert cohort._graphs is not None
    assert cohort._graphs.failure == "operation not permitted when stream is capturing"


def test_on_a_cpu_nothing_is_captured(model: torch.nn.Module) -> None:
    assert RunningBatch(0, model, frozenset(), CohortStats())._graphs is None


def test_what_a_graph_reads_lives_as_long_as_it_does(model: torch.nn.Module) -> None:
    """A replay reads memory by address: were it freed, another tensor's content would index the cache."""
    read: list[weakref.ref[torch.Tensor]] = []
    cohort = graphed(model)
    steps = cohort._graphs
    assert steps is not None
    begin_fixed = cohort._cache.begin_fixed

    def noted(rows: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        read[:] = [weakref.ref(rows), weakref.ref(positions)]
        begin_fixed(rows, positions, length)

    def captured(step: Callable[[], torch.Tensor]) -> Replay:
        out = step()
        return lambda: out  # as on a GPU, where nothing of Python is kept but the result

    cohort._cache.begin_fixed = noted  # type: ignore[method-assign]
    steps._capture = captured
    cohort.join([stream("a", [1, 2, 3], 40)])
    while steps.captured == 0:
        cohort.step()
    cohort._cache.begin_step(torch.zeros(1, dtype=torch.long))  # an ordinary step forgets the graph's tensors
    assert [ref() is not None for ref in read] == [True, True]
