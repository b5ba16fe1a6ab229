"""The learner's state: what no batch can spoil, what is kept for a replay, and where versions go."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError, RunError
from kbrl_async.learning import kept
from kbrl_async.learning.engine import LocalEngine
from kbrl_async.learning.policies.versions import Pending
from kbrl_async.learning.settings import Learner
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config, load
from kbrl_async.weights import Canaries
from protocols.records import TrainBatch, TrainGroup
from services.learner import actor
from services.learner.actor import Learning
from services.learner.policy import in_its_room
from tests.models import SMALLER, drawn_sample, tiny_model
from tests.unit.services.log import Log

torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

CANARY = Canaries([1, 2, 3], [])


_living: dict[Path, Learning] = {}
_parts = WeakKeyDictionary[Learning, tuple[Trainer, Log]]()


def learning(folder: Path, **settings: Any) -> Learning:
    config = Config(max_staleness=0, **settings)
    service: Any = SimpleNamespace(
        config=config, run_dir=folder, policies=folder / "policies", log=Log(), tell=lambda *_: None
    )
    if folder in _living:  # a process that is gone writes no more
        _living.pop(folder).close()
    trainer = Trainer(tiny_model(scale=1.0, **SMALLER), config)
    made = _living[folder] = Learning(
        service, LocalEngine(trainer, "base", CANARY, folder / "checkpoints", folder / "policies")
    )
    _parts[made] = trainer, service.log
    made.resume()
    return made


def trainer_of(made: Learning) -> Trainer:
    return _parts[made][0]


def said_by(made: Learning, level: str) -> list[str]:
    return [line.event for line in _parts[made][1].at(level)]


def batch(index: int, number: int | None = None) -> TrainBatch:
    return TrainBatch(f"batch-{index if number is None else number:06d}", index, 1.0, ["g0"])


def groups(seed: int, advantage: float | None = None) -> list[TrainGroup]:
    """`advantage`: of the last sample."""
    rng = random.Random(seed)
    samples = [drawn_sample(rng, f"g0.r{r}", [1, 2], 5) for r in range(8)]
    if advantage is not None:
        samples[-1] = msgspec.structs.replace(samples[-1], advantage=advantage)
    return [TrainGroup("g0", "p", 1, samples)]


def weights(made: Learning) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer_of(made).parameters.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def nothing() -> None:
    pass


@pytest.mark.parametrize("advantage", [float("nan"), 3e38], ids=["nan", "overflow"])
def test_a_batch_without_a_finite_loss_leaves_no_trace_in_the_weights(tmp_path: Path, advantage: float) -> None:
    made, untouched = learning(tmp_path / "a"), learning(tmp_path / "b")
    for one in (made, untouched):
        one.train(batch(0), groups(0), nothing)
    before = weights(made)
    report = made.train(batch(1), groups(1, advantage), nothing)
    assert (report.policy_version, made.version, report.metrics) == (1, 1, {})
    assert "finite" in report.failure or "inf" in report.failure
    assert same(weights(made), before)
    # the batch after it meets the very same learner: optimizer, step counter and data order too
    after, expected = (one.train(batch(1, 2), groups(2), nothing) for one in (made, untouched))
    assert (after.policy_version, after.failure) == (2, "")
    assert after.metrics["loss"] == expected.metrics["loss"]
    assert same(weights(made), weights(untouched))


def test_a_good_batch_reports_how_the_hardware_was_used(tmp_path: Path) -> None:
    made = learning(tmp_path, learner=Learner(peak_tflops=1e-3))
    metrics = made.train(batch(0), groups(0), nothing).metrics
    flops = metrics["mfu"] * 1e9 * metrics["gradient_s"]
    parameters = sum(p.numel() for p in trainer_of(made).model.parameters())
    assert flops / metrics["input_tokens"] == pytest.approx(6 * parameters, rel=0.2)
    assert metrics["memory_peak_mb"] > 50


def test_the_version_that_a_kept_batch_needs_is_not_collected(tmp_path: Path) -> None:
    made = learning(tmp_path)
    kept.keep(tmp_path, [b"frame"], kept.About("batch-000000", 0, "alarm: ess"), 1 << 20)
    for index in range(actor.KEPT_VERSIONS + 2):
        made.train(batch(index), groups(index), nothing)
    made.close()
    names = {path.name for path in (tmp_path / "policies").glob("policy-v*")}
    assert "policy-v0" in names
    assert "policy-v1" not in names


def test_versions_go_to_the_policy_url_too_and_old_ones_leave_it(tmp_path: Path) -> None:
    made = learning(tmp_path / "run", policy_url=f"file://{tmp_path}/remote")
    for index in range(actor.KEPT_VERSIONS + 1):
        made.train(batch(index), groups(index), nothing)
    made.close()
    newest = {f"policy-v{v}" for v in range(2, actor.KEPT_VERSIONS + 2)}
    assert {path.name for path in (tmp_path / "remote").iterdir()} == newest


def test_a_store_that_is_away_costs_no_update(tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("a file where a folder should be")
    made = learning(tmp_path / "run", policy_url=f"file://{tmp_path}/remote/policies")
    assert made.train(batch(0), groups(0), nothing).policy_version == 1
    made.close()
    assert "policy not uploaded" in said_by(made, "error")


def test_an_interrupted_learner_goes_on_bit_by_bit(tmp_path: Path) -> None:
    unbroken, first = learning(tmp_path / "a"), learning(tmp_path / "b")
    expected = [unbroken.train(batch(i), groups(i), nothing).metrics["loss"] for i in range(4)]
    found = [first.train(batch(i), groups(i), nothing).metrics["loss"] for i in range(2)]
    again = learning(tmp_path / "b")
    assert again.version == 2
    found += [again.train(batch(i), groups(i), nothing).metrics["loss"] for i in range(2, 4)]
    assert found == expected
    assert same(weights(again), weights(unbroken))
    assert again.progress.samples == 32
    assert again.progress.tokens == 32 * 5


def test_a_batch_that_comes_again_is_answered_and_not_trained_again(tmp_path: Path) -> None:
    made = learning(tmp_path)
    report = made.train(batch(0), groups(0), nothing)
    before = weights(made)
    again = made.train(batch(0), groups(0), nothing)
    trained = {name: value for name, value in report.metrics.items() if name != "time/checkpoint_s"}
    assert (again.policy_version, again.metrics) == (1, trained), "no checkpoint was written for it"
    assert same(weights(made), before)


def test_one_that_was_trained_before_the_last_comes_again_and_ends_nobody(tmp_path: Path) -> None:
    """A broker without the end of its journal has it to give out still."""
    made = learning(tmp_path, learner=Learner(checkpoint_every=2))
    for index in range(4):
        made.train(batch(index), groups(index), nothing)
    before = weights(made)
    for one in (made, learning(tmp_path, learner=Learner(checkpoint_every=2))):
        report = one.train(batch(1), groups(1), nothing)
        assert (report.policy_version, report.metrics, report.failure, one.version) == (2, {}, "", 4)
        assert same(weights(one), before)
    others = msgspec.structs.replace(batch(1), group_ids=["g7"])
    with pytest.raises(RunError, match="batch-000001 is for policy version 1 and the learner has 4"):
        one.train(others, groups(1), nothing)


def test_a_learner_that_dies_before_every_publication_goes_on_bit_by_bit_from_checkpoint_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"learner": Learner(peak_tflops=1e-3, checkpoint_every=3)}
    unbroken = learning(tmp_path / "a", **settings)
    expected = [unbroken.train(batch(i), groups(i), nothing).metrics["loss"] for i in range(4)]
    found = []
    for index in range(4):
        made = learning(tmp_path / "b", **settings)  # a fresh process for every batch
        assert made.version == index
        with monkeypatch.context() as dying:
            dying.setattr(Learning, "publish", _die)
            with pytest.raises(KeyboardInterrupt):
                made.train(batch(index), groups(index), nothing)
        again = learning(tmp_path / "b", **settings)
        assert again.version == index + 1
        report = again.train(batch(index), groups(index), nothing)
        found.append(report.metrics["loss"])
        again.close()
        assert (tmp_path / "b" / "policies" / f"policy-v{index + 1}" / "COMPLETE").exists()
    assert found == expected
    assert same(weights(again), weights(unbroken))
    steps = sorted(path.name for path in (tmp_path / "b" / "checkpoints").glob("step-*"))
    assert steps == ["step-000000", "step-000003"]


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_update_does_not_wait_for_a_checkpoint_that_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learning(tmp_path)
    monkeypatch.setattr(LocalEngine, "is_saving", True)
    for index in range(2):
        assert "time/checkpoint_s" not in made.train(batch(index), groups(index), nothing).metrics
    monkeypatch.setattr(LocalEngine, "is_saving", False)
    assert "time/checkpoint_s" in made.train(batch(2), groups(2), nothing).metrics
    again = learning(tmp_path)
    assert again.version == 3


def test_at_the_runs_end_its_last_version_and_a_checkpoint_of_it_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ticks = learning(tmp_path, learner=Learner(peak_tflops=1e-3, checkpoint_every=50)), []
    write = Pending.write
    monkeypatch.setattr(Pending, "write", lambda self: (time.sleep(0.5), write(self)))
    for index in range(3):
        made.train(batch(index), groups(index), nothing)
    last = TrainBatch("last-1", 3, 1.0, [])
    for _ in range(2):  # a task may come again
        report = made.keep(last, lambda: ticks.append(1))
        assert (report.batch_id, report.policy_version, report.metrics) == ("last-1", 3, {})
        assert (tmp_path / "policies" / "policy-v3" / "COMPLETE").exists()
        steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
        assert steps == ["step-000000", "step-000003"]
    assert ticks, "who waits for minutes would be taken for one that stands still"
    assert learning(tmp_path).version == 3


def test_what_a_lost_update_has_left_is_not_kept_at_the_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learning(tmp_path, learner=Learner(peak_tflops=1e-3, checkpoint_every=50))
    for index in range(2):
        made.train(batch(index), groups(index), nothing)
    good, step = weights(made), LocalEngine.step

    def lost(engine: LocalEngine, *given: Any) -> dict[str, float]:
        metrics = step(engine, *given)
        if given[3] == 2:
            raise InfraError("the host of the weights is away", "It is tried again")
        return metrics

    monkeypatch.setattr(LocalEngine, "step", lost)
    with pytest.raises(InfraError):
        made.train(batch(2), groups(2), nothing)
    assert not same(weights(made), good)
    monkeypatch.setattr(LocalEngine, "step", step)
    assert made.keep(TrainBatch("last-1", 2, 1.0, []), nothing).policy_version == 2
    assert same(weights(learning(tmp_path)), good)


def test_a_last_checkpoint_that_can_not_be_written_ends_the_learner_which_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learning(tmp_path, learner=Learner(peak_tflops=1e-3, checkpoint_every=50))
    made.train(batch(0), groups(0), nothing)

    def away(*_: object) -> None:
        raise InfraError("the store is away", "It is tried again")

    monkeypatch.setattr(LocalEngine, "save", away)
    with pytest.raises(actor.UpdateLost, match="the store is away"):
        made.keep(TrainBatch("last-1", 1, 1.0, []), nothing)


def test_batches_older_than_the_oldest_checkpoint_are_dropped(tmp_path: Path) -> None:
    made = learning(tmp_path, learner=Learner(peak_tflops=1e-3, checkpoint_every=2, keep_checkpoints=2))
    for index in range(5):
        made.train(batch(index), groups(index), nothing)
        assert len(list((tmp_path / "checkpoints" / "tail").iterdir())) <= 2 * 2
    assert made.version == 5


def test_a_damaged_checkpoint_is_made_up_for_by_the_one_before_it_and_its_batches(tmp_path: Path) -> None:
    made = learning(tmp_path)
    for index in range(3):
        made.train(batch(index), groups(index), nothing)
    (tmp_path / "checkpoints" / "step-000003" / "tensors.safetensors").write_bytes(b"torn")
    again = learning(tmp_path)
    assert again.version == 3
    assert same(weights(again), weights(made))
    assert "checkpoint passed over" in said_by(again, "warning")


def test_a_batch_that_kills_the_learner_is_not_trained_again_at_its_start(tmp_path: Path) -> None:
    made = learning(tmp_path)
    made.train(batch(0), groups(0), nothing)
    with pytest.raises(KeyboardInterrupt):
        made.train(batch(1), groups(1), _die)
    again = learning(tmp_path)
    assert again.version == 1
    assert again.train(batch(1, 2), groups(2), nothing).policy_version == 2


def test_beside_vllm_on_one_gpu_the_learner_is_told_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * 10**9))
    words = ["placement=one_gpu", "sampler.engine=vllm", "sampler.memory_share=0.4"]
    config = load(overrides=words)
    assert in_its_room(config, "cuda").learner.memory_gb == pytest.approx(35), "benches have theirs"
    assert in_its_room(config, "cpu") is config
    said = load(overrides=[*words, "learner.memory_gb=70"])
    assert in_its_room(said, "cuda") is said
