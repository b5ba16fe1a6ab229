"""Each process serves what it knows; scrapers find it by a file; the dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from kbrl_async.learning.losses import Tokens
from kbrl_async.learning.metrics import StepLog
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry import prometheus, training_metrics
from kbrl_async.runs.telemetry.prometheus import Exporter, MetricsSource
from protocols import events as ev
from protocols import messages as msg
from protocols.ledger import Ledger
from protocols.messages import Load
from protocols.records import TrainSample

DEPLOY = Path(__file__).parents[4] / "deploy"


def learner() -> dict[str, float]:
    """Metrics of an update, by the class that makes them."""
    tokens = Tokens(log_pi_T=torch.zeros(2), log_mu_T=torch.zeros(2), advantage_T=torch.ones(2))
    log = StepLog(0.0)
    log.microbatch(tokens, torch.zeros(2), {"dropped": torch.zeros(2)}, 2)
    log.optimizer(0.5, 1.0, 1e-4)
    log.end_of_first_epoch()
    return log.summary([TrainSample("g1.r0", [1], [2, 3], [0.0, 0.0], 1.0, 1.0, 0)], 1)


def scalars() -> dict[str, float]:
    """What the aggregator tells of an update, by the same functions."""
    rollouts = [
        RolloutStats(problem_id="a", level=level, reward=level, correct=True, speedup=2.0, staleness=1, turn=level)
        for level in (0, 1)
    ]
    counters = RunCounters(
        groups_admitted=1, groups_trained=1, groups_filtered=0, groups_dropped_stale=0, groups_failed=0,
        rollouts=2, updates=1, max_staleness=1,
    )  # fmt: skip
    groups = {f"groups/{name}": float(getattr(counters, name)) for name in RunCounters.__struct_fields__}
    policy = training_metrics.policy_scalars(learner())
    of_batch = training_metrics.scalars(rollouts)
    of_version = training_metrics.version_scalars(rollouts, per_level=True)
    return of_batch | of_version | policy | groups


def status() -> msg.StatusReport:
    ledger = Ledger()
    ledger.handle(ev.FromProducer(b"p", msg.Submit("t1", "compile")), 0.0)
    ledger.handle(ev.FromWorker(b"w", msg.Hello("farm.1", "a", ["compile"], 2)), 0.0)
    ledger.handle(ev.FromWorker(b"w", msg.Beat(2, [], Load(0.5, gpu=0.25, gpu_mb=1.0))), 0.0)
    return ledger.status(1.0)


SOURCE = MetricsSource(lambda: Load(0.5, 1, 2.0, 3.0, 4, 5, 0.75, 0.5, 2.0), status, scalars)


def exporter(folder: Path, source: MetricsSource = SOURCE, port: int = 0, process: str = "broker.1") -> Exporter:
    return Exporter(source, run_dir=folder, process=process, host="127.0.0.1", port=port, labels={"run": "smoke"})


def fetched(port: int) -> dict[str, dict[str, float]]:
    """Metric → its labels as text → value."""
    found: dict[str, dict[str, float]] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                label = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_a_process_serves_its_load_the_queues_and_the_last_update(tmp_path: Path) -> None:
    served = exporter(tmp_path)
    try:
        found = fetched(served.port)
    finally:
        served.close()
    assert found["kbrl_process_busy_ratio"] == {"": 0.5}
    assert found["kbrl_process_cpu_cores"] == {"": 0.75}
    assert found["kbrl_process_gpu_memory_bytes"] == {"": 2.0 * 2**20}
    assert found["kbrl_process_tasks_done_total"] == {"": 4.0}
    assert found["kbrl_stage_in_flight"]["stage=compile"] == 1.0
    assert found["kbrl_worker_busy_ratio"] == {"worker=farm.1": 0.5}
    assert found["kbrl_ledger_events_total"]["event=submitted"] == 1.0
    assert found["kbrl_batch_reward_mean"] == {"": 0.5}
    assert found["kbrl_level_reward_mean"] == {"level=0": 0.0, "level=1": 1.0}
    assert found["kbrl_turn_correct_rate"] == {"turn=1": 1.0, "turn=2": 1.0}


def test_values_are_those_of_the_moment_they_are_fetched(tmp_path: Path) -> None:
    loads = iter([Load(0.1), Load(0.9)])
    served = exporter(tmp_path, MetricsSource(lambda: next(loads)))
    try:
        assert [fetched(served.port)["kbrl_process_busy_ratio"][""] for _ in range(2)] == [0.1, 0.9]
    finally:
        served.close()


def test_a_process_without_a_gpu_serves_none(tmp_path: Path) -> None:
    served = exporter(tmp_path, MetricsSource(Load))
    try:
        assert not [name for name in fetched(served.port) if "gpu" in name]
    finally:
        served.close()


def test_scrapers_find_each_process_by_a_file_that_goes_when_it_goes(tmp_path: Path) -> None:
    served = exporter(tmp_path, process="learner.1")
    (path,) = tmp_path.glob("metrics/prometheus-*.json")
    assert json.loads(path.read_text()) == [
        {"targets": [f"127.0.0.1:{served.port}"], "labels": {"process": "learner.1", "run": "smoke"}}
    ]
    served.close()
    assert not path.exists()


def test_a_port_that_is_taken_is_given_way_to(tmp_path: Path) -> None:
    first = exporter(tmp_path, process="a")
    second = exporter(tmp_path, port=first.port, process="b")
    try:
        assert first.port != second.port
        assert f":{second.port}" in second.path.read_text()
        assert fetched(second.port)
    finally:
        first.close()
        second.close()


def test_no_two_processes_of_a_host_want_the_same_port() -> None:
    ports = [prometheus.port_of(9464, kind, instance) for kind in range(7) for instance in range(16)]
    assert len(set(ports)) == len(ports)
    assert prometheus.port_of(0, 3, 2) == 0


@pytest.fixture(scope="module")
def names() -> set[str]:
    families = prometheus.SourceCollector(SOURCE).collect()
    return {sample.name for family in families for sample in family.samples}


def queries(node: Any) -> list[str]:
    """Every expression and variable query of a dashboard."""
    if isinstance(node, list):
        return [query for item in node for query in queries(item)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("expr", "query") if isinstance(node.get(key), str)]
    return own + [query for value in node.values() for query in queries(value)]


def test_every_query_of_the_dashboard_names_metrics_that_there_are(names: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "kbrl.json").read_text())
    asked = [name for query in queries(dashboard) for name in re.findall(r"\bkbrl_\w+", query)]
    assert len(asked) > 40
    assert set(asked) - names == set()


def test_every_panel_has_its_place_and_a_query_of_the_chosen_runs() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "kbrl.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"]), panel["title"]


def test_the_scrape_configuration_reads_the_files_that_processes_write() -> None:
    import yaml

    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (pattern,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    run = Path("runs/latest")
    assert prometheus.target_file(run, "sampler.2").match(pattern)
    assert "*" not in str(Path(pattern).parent), "Prometheus takes a star in the last part only"
