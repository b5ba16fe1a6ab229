"""Configurations of models reach a constructor as plain values, and nobody else's classes do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from kbrl_async.kernels.verify import configs, replies, values, wire


def handed_over(value: Any) -> Any:
    """From the reference's child to the candidate's, by what the bench lets pass."""
    tensors: list[torch.Tensor] = []
    tree = values.flatten(configs.packed(value), tensors)
    ready = wire.Ready(tree, values.layout(tensors)[0], [])
    heard = replies.read(wire.encode(ready))
    assert isinstance(heard, wire.Ready)
    assert heard.init is not None
    return configs.unpacked(values.restore(heard.init, tensors))


def test_a_configuration_arrives_as_it_was() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, id2label={0: "no", 1: "yes"})
    name, found = handed_over(["owner/tiny", config])
    assert name == "owner/tiny"
    assert type(found) is transformers.GPT2Config
    assert found.to_dict() == config.to_dict()


def test_what_stands_beside_it_stays_what_it_is() -> None:
    given = [[1, (2.5, "a")], {"config": transformers.GPT2Config(n_layer=1), "x": torch.ones(3)}]
    first, named = handed_over(given)
    assert first == [1, (2.5, "a")]
    assert named["config"].n_layer == 1
    assert torch.equal(named["x"], torch.ones(3))


def test_a_layer_that_does_nothing_arrives_and_no_other_does() -> None:
    ((), named) = handed_over([(), {"act": torch.nn.Identity()}])
    assert type(named["act"]) is torch.nn.Identity
    with pytest.raises(TypeError, match="handed over"):
        handed_over([torch.nn.Linear(2, 2)])


class Mock(dict[str, Any]):
    """As the tool has it that found KernelBook's rows."""

    __getattr__ = dict.get


class Strict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize("kind", [Mock, Strict])
def test_a_dictionary_with_fields_keeps_them(kind: type[dict[str, Any]]) -> None:
    given = kind(hidden=4, inner=kind(rate=0.5), items=3, weights=torch.ones(2))
    ((found,), named) = handed_over([[given], {"plain": {"hidden": 1}}])
    assert found == {"hidden": 4, "inner": {"rate": 0.5}, "items": 3, "weights": found["weights"]}
    assert found.hidden == 4
    assert found.inner.rate == 0.5
    assert callable(found.items)
    assert hasattr(found, "other") == (kind is Mock)
    assert copy.deepcopy(found).hidden == 4
    assert type(named["plain"]) is dict


def test_a_class_that_transformers_does_not_have_is_refused() -> None:
    class Own(transformers.GPT2Config):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="a Own, which transformers does not have"):
        configs.packed([Own()])
