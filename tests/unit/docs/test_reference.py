"""The generated pages are current, and say of every metric what it is; what pages list by hand is what the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kbrl_async import cli
from kbrl_async.evaluation import document, show
from kbrl_async.evaluation.metrics import Sample, heldout_scalars
from kbrl_async.learning.losses import Tokens
from kbrl_async.learning.metrics import StepLog, staleness
from kbrl_async.rollouts.alarms import rules_of
from kbrl_async.rollouts.rewards.presets import find_presets, reward_of
from kbrl_async.rollouts.settings import REWARD_PARTS, REWARD_PRESETS, Alarms, Reward
from kbrl_async.rollouts.stats import RolloutStats
from kbrl_async.runs.summary import RunCounters
from kbrl_async.runs.telemetry import by_version, reference, system_metrics, tensorboard, training_metrics
from kbrl_async.runs.telemetry.by_version import ScoredAnswer, VersionRange
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from protocols.records import REPLAYED, SOLVER, VERIFIER, TrainSample
from tests.pages import ROOT, Page
from tests.records import record

DOCS = ROOT / "docs"


@pytest.mark.parametrize(("page", "option"), [("config.md", "--docs"), ("metrics.md", "--metrics")])
def test_the_reference_is_what_make_docs_writes(page: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", option]) == 0
    same = (DOCS / "reference" / page).read_text() == capsys.readouterr().out
    assert same, f"docs/reference/{page} is out of date: run 'make docs'"
    assert f"kbrl config {option} > docs/reference/{page}" in (ROOT / "Makefile").read_text()


def written_tags() -> Iterator[str]:
    """Every tag that the code can write, by the functions that write them."""
    yield from training_metrics.scalars(rollouts())
    yield from training_metrics.scalars([*rollouts(), RolloutStats(problem_id="a", level=1, reward=0, role=VERIFIER)])
    yield from training_metrics.version_scalars(rollouts(), per_level=True)
    yield from training_metrics.policy_scalars(learner())
    yield from (f"groups/{name}" for name in RunCounters.__struct_fields__)
    yield from (f"histogram/{name}" for name in training_metrics.Histograms.__struct_fields__)
    yield from (f"alarm/{rule.name}" for rule in rules_of(Alarms(entropy_below=0.1)))
    yield from heldout_scalars(rollouts())
    yield from training_metrics.progress(1, 2, train_s=1.0, since=(1.0, 8))
    yield from tensorboard.FIRST
    answers = [ScoredAnswer(f"g{group}", stats) for group in range(2) for stats in rollouts()]
    yield from by_version.scalars(VersionRange(0, 0, answers), per_level=True)
    yield from show.scalars(evaluation())
    worker = WorkerSample(gpu=0.5, facts=dict.fromkeys(system_metrics.ENGINE_FACTS, 0.5))
    before, after = (SystemSample(t=t, workers={"w": worker}, **queues()) for t in (0.0, 1.0))
    yield from system_metrics.scalars(before, after)


def rollouts() -> list[RolloutStats]:
    return [
        RolloutStats(
            problem_id="a", level=1, reward=1.0, correct=turn > 0, compiled=turn > 0, speedup=2.0, staleness=1,
            turn=turn, rollout_id="g1.r0", seconds={"queue": 1.0}, ages={"bench": 1}, role=SOLVER, trust=REPLAYED,
            built=("fast",), fault="" if turn else "compile_error", workload_share=0.5,
        )
        for turn in (0, 1)
    ]  # fmt: skip


def learner() -> dict[str, float]:
    tokens = Tokens(log_pi_T=torch.zeros(2), log_mu_T=torch.zeros(2), advantage_T=torch.ones(2), lag_T=torch.zeros(2))
    log, samples = StepLog(0.0), [TrainSample("g1.r0", [1], [2, 3], [0.0, 0.0], 1.0, 1.0, 0)]
    log.microbatch(tokens, torch.zeros(2), {n: torch.zeros(2) for n in ("dropped", "masked", "kl_reference")}, 2)
    log.optimizer(0.5, 1.0, 1e-4)
    log.end_of_first_epoch()
    own = {"mfu": 0.1, "memory_peak_mb": 1.0, "time/checkpoint_s": 1.0}
    return {**log.summary(samples, 1), **staleness(samples, 1), **own}


def evaluation() -> document.Document:
    speeds = {"eager": (2.0, 1.5, 2.5), "compile": (1.2, 1.0, 1.4)}
    samples = [
        Sample(problem_id=name, level=1, sample=n, compiled=True, correct=True, speedups=speeds, flags=flags)
        for name, flags in (("a", ()), ("b", ("zeros",)))
        for n in range(2)
    ]
    return document.build(samples, policy={}, settings={})


def queues() -> dict[str, dict[str, float]]:
    return {name: {"stage": 1} for name in ("queues", "in_flight", "oldest_s", "counters")}


def test_every_tag_that_is_written_is_described_and_no_other() -> None:
    written = set(written_tags())
    assert {tag for tag in written if not reference.described(tag)} == set()
    described = {name for chapter in reference.TAGS.values() for name in chapter}
    assert described - {reference.described(tag) for tag in written} == set()


def test_the_learner_says_of_itself_what_is_described() -> None:
    computed = (ROOT / "kbrl_async" / "learning" / "engine.py").read_text()
    assert '"mfu":' in computed
    assert '"memory_peak_mb":' in computed
    assert '"time/checkpoint_s":' in (ROOT / "services" / "learner" / "actor.py").read_text()


def test_every_chart_draws_a_tag_that_is_described() -> None:
    drawn = {reference.drawn(name) for chapter in reference.TAGS.values() for name in chapter}
    assert set(tensorboard.DASHBOARDS) - drawn == set()


def test_the_reward_page_lists_the_parts_and_the_presets() -> None:
    page = Page(DOCS / "howto-reward.md")
    text = page.path.read_text()
    first, *_ = text.split("\n## ")
    rows = [row for row in first.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set(REWARD_PARTS.ours)
    assert set(REWARD_PRESETS.ours) <= {code for _, code in page.code}


def test_the_users_own_preset_on_the_reward_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for block in Page(DOCS / "howto-reward.md").blocks if block.language == "python")
    (tmp_path / "mine.py").write_text("\n".join(example.lines))
    monkeypatch.syspath_prepend(tmp_path)
    (preset,) = find_presets(Reward(preset="mine:TERSE"))
    assert reward_of(record(), preset) > 0


def test_no_page_is_larger_than_what_one_reads() -> None:
    long = [path.name for path in Path(DOCS).glob("*.md") if len(path.read_text().splitlines()) > 200]
    assert long == []
