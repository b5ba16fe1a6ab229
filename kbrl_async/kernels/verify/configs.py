"""Configurations among constructor arguments, as plain values: KernelBench's level 4 hands on those of models,
KernelBook's rows dictionaries whose keys are fields, and a layer that does nothing where any would do.

The reference's child says what a configuration holds, and the candidate's child makes one of it. The processes that
judge pass both on as the plain values that they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

KEY = "transformers configuration"
LAYER = "layer that does nothing"
OPEN, CLOSED = "dictionary with fields", "dictionary with fields and no others"


class Fields(dict[str, Any]):
    """A dictionary that gives its values as fields, too. Of one that it lacks it says None, or there is none."""

    def __init__(self, given: dict[str, Any], *, is_open: bool) -> None:
        super().__init__(given)
        self.__dict__["_is_open"] = is_open

    def __getattr__(self, name: str) -> Any:
        if name in self or (self.__dict__.get("_is_open") and not name.startswith("__")):
            return self.get(name)
        raise AttributeError(f"it has no field {name}")


def packed(value: Any) -> Any:
    """`value` with each configuration as a dictionary of its fields.

    :raises TypeError: one has a class of its own, which nobody else could make.
    """
    transformers = sys.modules.get("transformers")  # nobody has made one who did not import it
    if transformers is not None and isinstance(value, transformers.PretrainedConfig):
        if type(value) is not _class_of(value.model_type):
            raise TypeError(f"a {type(value).__name__}, which transformers does not have, can't be handed over")
        return {KEY: value.to_dict()}
    if type(value) is torch.nn.Identity:
        return {LAYER: None}
    if isinstance(value, dict) and any(hasattr(value, str(key)) and not hasattr({}, str(key)) for key in value):
        kind = OPEN if hasattr(value, "no_field_of_this_name") else CLOSED
        return {kind: {key: packed(item) for key, item in value.items()}}
    return _within(value, packed)


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict) and value.keys() == {KEY}:
        fields = value[KEY]
        return _class_of(fields["model_type"]).from_dict(fields)
    if isinstance(value, dict) and value.keys() == {LAYER}:
        return torch.nn.Identity()
    if isinstance(value, dict) and len(value) == 1 and (kind := next(iter(value))) in (OPEN, CLOSED):
        return Fields({key: unpacked(item) for key, item in value[kind].items()}, is_open=kind == OPEN)
    return _within(value, unpacked)


def _within(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return type(value)(change(item) for item in value) if type(value) in (list, tuple) else value


def _class_of(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:  # its own `get` finds nothing
        return None
    return CONFIG_MAPPING[model_type]
