"""A quantised base: what is refused, and what transformers is asked for. bitsandbytes itself is not here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kbrl_async.errors import ConfigError, MissingTool
from kbrl_async.learning.forward_backward import forward_backward
from kbrl_async.learning.policies.models import load_model, wrap_lora
from kbrl_async.learning.settings import Learner
from kbrl_async.runs.config import load
from tests.models import tiny_model


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if bitsandbytes were there."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))

    class Settings(dict[str, Any]):
        def __init__(self, **given: Any) -> None:
            super().__init__(given)

    monkeypatch.setattr(transformers, "BitsAndBytesConfig", Settings)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `from_pretrained` was given."""
    seen: dict[str, Any] = {}

    def from_pretrained(path: str, **given: Any) -> nn.Module:
        seen.update(given)
        return tiny_model()

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return seen


def test_a_base_in_four_bits_is_loaded_where_it_stays(
    installed: None, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "to", lambda *_: pytest.fail("a quantised model can't be moved"))
    load_model("org/model", device="cuda:1", base_quantisation="nf4")
    assert asked["device_map"] == {"": 1}
    assert asked["quantization_config"]["bnb_4bit_quant_type"] == "nf4"


def test_a_base_in_eight_bits(installed: None, asked: dict[str, Any]) -> None:
    load_model("org/model", device="cuda", base_quantisation="int8")
    assert asked["quantization_config"] == {"load_in_8bit": True}


def test_a_whole_base_is_loaded_as_before(asked: dict[str, Any]) -> None:
    load_model("org/model")
    assert not asked.keys() & {"quantization_config", "device_map"}


def test_without_bitsandbytes_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingTool, match=r"base_quantisation=nf4 needs bitsandbytes.*pip install bitsandbytes"):
        load_model("org/model", device="cuda", base_quantisation="nf4")


def test_a_cpu_holds_no_quantised_base(installed: None) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        load_model("org/model", base_quantisation="int8")


class _Rounded(nn.Linear):
    """A linear layer of another kind, such as bitsandbytes'."""


def test_fused_kernels_step_aside_for_layers_of_another_kind() -> None:
    model = wrap_lora(tiny_model(), rank=2)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad is False:
            module.__class__ = _Rounded
    with pytest.raises(ConfigError, match="its linear layers are _Rounded"):
        forward_backward(model, Learner(kernels="fused"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["learner.base_quantisation=nf4"], "lora_rank=0"),
        (["learner.base_quantisation=nf4", "lora_rank=8", "device=cpu"], "needs a GPU"),
        (["learner.base_quantisation=nf4", "lora_rank=8", "learner.kernels=fused"], "has no kernels for"),
        (["learner.base_quantisation=nf4", "lora_rank=8", "sampler.engine=vllm"], "another base"),
        (["learner.offload=true"], "learner.shard=false makes none"),
        (["learner.shard=true", "learner.processes=2", "learner.offload=true", "device=cpu"], "is on the host"),
        (["learner.master_dtype=bfloat16", "lora_rank=8"], "adapters are fp32"),
        (["learner.master_dtype=bfloat16"], "sampler.engine=transformers, which holds fp32"),
        (["learner.master_dtype=bfloat16", "learner.dtype=float32", "sampler.engine=vllm"], "Leave one of them out"),
        (["learner.shard=true", "lora_rank=8"], "learner.processes=1: nobody to share with"),
        (
            ["learner.shard=true", "learner.base_quantisation=int8", "lora_rank=8", "learner.processes=2"],
            "do not go together",
        ),
    ],
)
def test_what_contradicts_is_refused_before_anything_starts(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=given)


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_a_shared_out_policy_is_a_valid_setting(lora_rank: int) -> None:
    config = load(overrides=["learner.shard=true", f"lora_rank={lora_rank}", "learner.processes=2"])
    assert config.learner.shard
