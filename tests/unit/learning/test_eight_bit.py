"""AdamW with 8-bit moments, by torchao where it is installed and else by what stands for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kbrl_async.cli.preflight import check_extras
from kbrl_async.errors import CheckpointError, ConfigError, MissingTool
from kbrl_async.learning import checkpoints, eight_bit, training_state
from kbrl_async.learning.eight_bit import EightBitAdamW
from kbrl_async.learning.optimizer import make_adamw
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import load
from protocols.records import TrainGroup
from services.learner.policy import make_trainer
from tests.unit.learning import fake_torchao
from tests.unit.learning.rank import settings
from tests.unit.learning.test_process_group import policy


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch.setitem, monkeypatch.setattr)


def trained(eight: bool) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """A matrix and a vector after some steps towards zero."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(8, 64)), torch.nn.Parameter(torch.randn(64))]
    optimizer = make_adamw(parameters, 1e-2, eight_bit=eight)
    for _ in range(20):
        for parameter in parameters:
            parameter.grad = 2 * parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return parameters, optimizer


@pytest.mark.usefixtures("torchao")
def test_it_steps_as_adamw_does_with_a_byte_a_number_of_matrices() -> None:
    (matrix, vector), optimizer = trained(eight=True)
    (exact, of_vector), _ = trained(eight=False)
    torch.manual_seed(0)
    begun = torch.randn(8, 64)
    off, way = (float((one.detach() - other.detach()).norm()) for one, other in ((matrix, exact), (exact, begun)))
    assert off < 0.1 * way
    assert torch.allclose(vector, of_vector, atol=1e-6)
    assert isinstance(optimizer, EightBitAdamW)
    held = optimizer.stored(matrix)
    assert {name: tensor.dtype for name, tensor in held.items() if name.endswith("codes")} == {
        "exp_avg.codes": torch.uint8, "exp_avg_sq.codes": torch.uint8,
    }  # fmt: skip
    assert sum(t.nbytes for name, t in held.items() if name != "step") == 2 * matrix.numel() * (1 + 4 / eight_bit.BLOCK)
    assert {t.dtype for t in optimizer.stored(vector).values()} == {torch.float32}


def trainer_of(folder: Path) -> Trainer:
    return make_trainer(settings("packed"), folder / "base", "cpu")


@pytest.mark.usefixtures("torchao")
def test_a_checkpoint_of_it_goes_on_bit_by_bit(tmp_path: Path, groups: list[TrainGroup]) -> None:
    policy(tmp_path / "base", "packed")
    one = trainer_of(tmp_path)
    one.step(groups, 0.7, version=1)
    folder = checkpoints.save(tmp_path / "checkpoints", one, checkpoints.LearnerProgress(version=1), 1)
    one.step(groups, 0.7, version=1)
    other = trainer_of(tmp_path)
    checkpoints.restore(folder, other)
    other.step(groups, 0.7, version=1)
    assert all(torch.equal(p, other.parameters[name]) for name, p in one.parameters.items())
    packed = [name for name in training_state.tensors(one) if name.endswith(".codes")]
    assert len(packed) == 2 * sum(p.ndim > 1 for p in one.parameters.values())


@pytest.mark.usefixtures("torchao")
def test_moments_of_the_other_kind_are_refused_by_name(tmp_path: Path, groups: list[TrainGroup]) -> None:
    policy(tmp_path / "base", "packed")
    plain = make_trainer(settings("full"), tmp_path / "base", "cpu")
    for trainer, other, bits in ((trainer_of(tmp_path), plain, 8), (plain, trainer_of(tmp_path), 32)):
        trainer.step(groups, 0.7, version=1)
        folder = checkpoints.save(tmp_path / f"of-{bits}", trainer, checkpoints.LearnerProgress(version=1), 1)
        with pytest.raises(CheckpointError, match=rf"moments of {bits} bits.*learner.optimizer"):
            checkpoints.restore(folder, other)


def test_without_torchao_it_is_refused_by_name_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingTool, match=r"learner.optimizer=adamw_8bit needs torchao.*pip install torchao"):
        make_adamw([torch.nn.Parameter(torch.zeros(2))], 1e-3, eight_bit=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingTool, match=r"learner\.optimizer needs torchao"):
        check_extras(load(overrides=["learner.optimizer=adamw_8bit"]))


def test_an_adapter_has_no_use_for_it() -> None:
    with pytest.raises(ConfigError, match="an adapter's moments are small"):
        load(overrides=["learner.optimizer=adamw_8bit", "lora_rank=8"])
