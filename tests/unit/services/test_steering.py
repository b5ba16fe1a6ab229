"""What the sampler's controller is told of the queues behind it; and that long answers hold no batch back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.rollouts.buffer.buffer import RolloutBuffer, rollout_ids
from kbrl_async.runs.config import available_cores, cpu_layout, endpoints, load
from kbrl_async.runs.telemetry import prometheus, system_metrics
from kbrl_async.sampling.engine import EngineStats
from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger
from protocols.messages import Stage, StageStanding, StatusReport, WorkerStanding
from services.runtime.service import Service
from services.sampler.steering import signals, tell
from tests.plans import buffer_rules
from tests.records import sample

ENGINE = EngineStats(3, kv_usage=0.5, preemptions=2)


def test_the_longest_queue_behind_counts_and_the_samplers_before_it() -> None:
    report = StatusReport(
        stages=[
            StageStanding(Stage.GENERATE, queued=90),
            StageStanding(Stage.COMPILE, queued=7),
            StageStanding(Stage.BENCH, queued=40),
        ],
        workers=[WorkerStanding(f"sampler.{i}", [Stage.GENERATE]) for i in (1, 2)]
        + [WorkerStanding("b", [Stage.BENCH])],
        rates={"rollouts_per_s": 3.5},
    )
    seen = signals(1.0, 12, 99, ENGINE, report)
    assert (seen.queued_behind, seen.rate_behind, seen.samplers) == (40, 3.5, 2)
    assert (seen.kv_usage, seen.preemptions, seen.active, seen.finished) == (0.5, 2, 12, 99)


@pytest.mark.parametrize("report", [None, StatusReport()])
def test_a_broker_that_says_nothing_bounds_nothing(report: StatusReport | None) -> None:
    assert signals(1.0, 12, 99, ENGINE, report).rate_behind is None


def test_the_engine_s_memory_is_told_to_prometheus_and_to_tensorboard(tmp_path: Path) -> None:
    config = load()
    layout = cpu_layout(config, available_cores())
    service = Service("sampler", "sampler.1", tmp_path, config, endpoints(config, tmp_path), layout, None)
    tell(service, ENGINE)
    served = {family.name: family.samples[0].value for family in prometheus.scalar_families(service.scalars)}
    assert served == {"kbrl_sampler_kv_usage": 0.5, "kbrl_sampler_preemptions": 2.0}

    ledger = Ledger()
    ledger.handle(ev.FromWorker(b"w", msg.Hello("sampler.1", "a", [Stage.GENERATE], 2)), 0.0)
    ledger.handle(ev.FromWorker(b"w", msg.Beat(2, [], msg.Load(facts=service.facts))), 0.0)
    line = msgspec.json.encode({"t": 1.0, **ledger.stats(1.0), "counters": {}})
    sample = system_metrics.parse(line)
    assert sample is not None
    made = system_metrics.scalars(None, sample)
    assert (made["kv_usage/sampler.1"], made["preemptions/sampler.1"]) == (0.5, 2.0)


def test_a_rollout_with_a_long_tail_holds_only_its_own_group() -> None:
    book = RolloutBuffer(buffer_rules(batch_size=2, max_steps=4, max_staleness=1, hold_s=10.0))
    groups = [book.take(book.admission("p", 1, 2, 0.0)).event.group_id for _ in range(4)]  # type: ignore[union-attr]
    for group_id in groups[1:]:
        for i, rollout in enumerate(rollout_ids(group_id, 2)):
            book.take(book.scored(group_id, rollout, [sample(rollout, float(i))], 0.0))
    book.take(book.scored(groups[0], rollout_ids(groups[0], 2)[0], [sample()], 0.0))
    made = book.take(book.poll(0.0)).event
    assert made is not None
    assert set(made.group_ids) == set(groups[1:3])  # type: ignore[union-attr]
