"""Two ranks on a CPU make the update of one process, and what each of them gets to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from kbrl_async.errors import ConfigError
from kbrl_async.learning.distributed import ProcessGroup, ShardedModel
from kbrl_async.learning.policies import versions
from kbrl_async.learning.trainer import Trainer
from protocols.records import TrainGroup
from tests.models import tiny_model
from tests.unit.learning.rank import digest, make, settings, train


def run_ranks(folder: Path, how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.learning.rank", str(folder), how],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": os.getcwd()},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=250)
            assert rank.returncode == 0, errors[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("how", ["sharded"])
def test_two_ranks_make_the_update_of_one(tmp_path: Path, groups: list[TrainGroup], how: str) -> None:
    (tmp_path / "groups.json").write_bytes(msgspec.json.encode(groups))
    run_ranks(tmp_path, how)
    torch.manual_seed(0)
    alone = Trainer(make(how), settings("plain"))
    expected = train(alone, groups, tmp_path / "alone")
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found[3]["loss"] == found[2]["loss"], "what follows a checkpoint follows it again"
    ours, theirs = (versions.load_manifest(tmp_path / place / "policies" / "policy-v2") for place in (".", "alone"))
    assert ours.canary_logprobs == pytest.approx(theirs.canary_logprobs, rel=1e-4)
    assert ours.canaries[0].logprobs == pytest.approx(theirs.canaries[0].logprobs, rel=1e-4)
    frozen = sum(p.numel() for p in alone.model.parameters() if not p.requires_grad)
    assert json.loads((tmp_path / "held.json").read_text()) == frozen / 2
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm", "entropy", "ess", "mismatch_kl", "dropped_share", "response_tokens"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    weights = [json.loads((tmp_path / f"weights-{rank}.json").read_text()) for rank in range(2)]
    assert weights[0] == weights[1], "the ranks have gone apart"
    assert weights[0] == pytest.approx(digest(alone), rel=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [[5], [100, 1, 1], [1, 1, 100], [7] * 16, list(range(1, 12))])
def test_every_sequence_belongs_to_one_rank_and_rank_0_has_some(tokens: list[int], size: int) -> None:
    parts = []
    for rank in range(size):
        group = object.__new__(ProcessGroup)
        group.rank, group.size = rank, size
        parts.append(group.part(tokens))
    assert sorted(i for part in parts for i in part) == list(range(len(tokens)))
    assert parts[0]


def test_equal_sequences_are_shared_out_equally() -> None:
    group = object.__new__(ProcessGroup)
    group.rank, group.size = 1, 2
    assert group.part([8192] * 8) == [4, 5, 6, 7]


def test_a_policy_without_frozen_weights_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match="only frozen weights"):
        ShardedModel(tiny_model(), object.__new__(ProcessGroup))
