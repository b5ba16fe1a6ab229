"""Several ranks on a CPU make the update of one process, and what each of them gets to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from kbrl_async.learning.distributed import ProcessGroup
from kbrl_async.learning.policies import versions
from protocols.records import TrainGroup
from services.learner.policy import make_trainer
from tests.models import SHAPE
from tests.unit.learning import fake_torchao
from tests.unit.learning.rank import CANARY, digest, go_on, settings, train


class Said(NamedTuple):
    """What rank 0 has found."""

    metrics: list[dict[str, float]]
    held: int
    whole: int
    weights: list[float]


def run_ranks(folder: Path, how: str, *sizes: int) -> list[Said]:
    """Groups of ranks, one after the other."""
    command = [sys.executable, "-m", "tests.unit.learning.rank", str(folder), how, *map(str, sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Said(**json.loads((folder / f"said-{size}.json").read_text())) for size in sizes]


def policy(folder: Path, how: str) -> Path:
    """Its base, with norms of q and k where all of it is trained."""
    config = (Qwen3Config if how in ("full", "packed") else LlamaConfig)(**SHAPE, head_dim=8)
    disable_progress_bar()
    torch.manual_seed(0)
    model = (Qwen3ForCausalLM if how in ("full", "packed") else LlamaForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def agree(one: dict[str, float], other: dict[str, float]) -> None:
    names = ["loss", "grad_norm", "entropy", "ess", "mismatch_kl", "dropped_share", "response_tokens", "kl_reference"]
    for name in names:
        assert other.get(name, 0.0) == pytest.approx(one.get(name, 0.0), rel=1e-3, abs=1e-6), name


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "sizes"), [("replicated", [2]), ("lora", [2]), ("full", [4, 2]), ("packed", [2])])
def test_several_ranks_make_the_update_of_one(
    tmp_path: Path, groups: list[TrainGroup], how: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "packed":
        fake_torchao.install(monkeypatch.setitem, monkeypatch.setattr)
    (tmp_path / "groups.json").write_bytes(msgspec.json.encode(groups))
    base = policy(tmp_path / "base", how)
    found, *fewer = run_ranks(tmp_path, how, *sizes)
    alone = make_trainer(settings(how), base, "cpu")
    expected = train(alone, groups, tmp_path / "alone")
    for one, other in zip(expected, found.metrics, strict=True):
        agree(one, other)
    assert found.metrics[3]["loss"] == found.metrics[2]["loss"], "what follows a checkpoint follows it again"
    assert found.weights == pytest.approx(digest(alone), rel=1e-3)
    ours, theirs = (versions.load_manifest(tmp_path / place / "policies" / "policy-v2") for place in (".", "alone"))
    assert ours.canary_logprobs == pytest.approx(theirs.canary_logprobs, rel=1e-4)
    assert ours.canaries[0].logprobs == pytest.approx(theirs.canaries[0].logprobs, rel=1e-4)
    served = make_trainer(settings(how), base, "cpu")
    versions.load_weights(tmp_path / "policies" / "policy-v2", served.model)
    assert served.sequence_logprobs(CANARY) == pytest.approx(ours.canary_logprobs, rel=1e-4), "what was published"
    if how == "replicated":
        return
    trained, frozen = (sum(p.numel() for p in alone.model.parameters() if p.requires_grad == is_so) for is_so in (1, 0))
    assert found.whole == 0
    each = 3 + 2 / fake_torchao.BLOCK if how == "packed" else 3  # numbers: a scale for so many
    assert found.held == pytest.approx((each * trained + frozen) / sizes[0], rel=0.05), "a share, moments included"
    files = sorted(path.name for path in (tmp_path / "checkpoints" / "step-000003").glob("*.safetensors"))
    assert [name[:11] for name in files] == [f"shard-{rank:05d}" for rank in range(1, sizes[0] + 1)]
    expected = [alone.step(groups, 0.7, version=3)]
    fresh = make_trainer(settings(how), base, "cpu")
    for metrics in (go_on(fresh, groups, tmp_path), *(said.metrics for said in fewer)):
        agree(expected[0], metrics[0])


@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("tokens", [[5], [100, 1, 1], [1, 1, 100], [7] * 16, list(range(1, 12))])
def test_every_sequence_belongs_to_one_rank_and_rank_0_has_some(tokens: list[int], ranks: int, together: int) -> None:
    parts = []
    for rank in range(ranks):
        group = object.__new__(ProcessGroup)
        group.rank, group.size = rank, ranks
        parts.append(group.part(tokens, together))
    assert sorted(i for part in parts for i in part) == sorted(list(range(len(tokens))) * together)
    assert all(part == parts[rank // together * together] for rank, part in enumerate(parts))
    assert parts[0]


def test_equal_sequences_are_shared_out_equally() -> None:
    group = object.__new__(ProcessGroup)
    group.rank, group.size = 1, 2
    assert group.part([8192] * 8) == [4, 5, 6, 7]
