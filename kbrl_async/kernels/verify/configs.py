"""Configurations of models among constructor arguments, as plain values: KernelBench's level 4 hands them on.

The reference's child says what a configuration holds, and the candidate's child makes one of it. The processes that
judge pass both on as the plain values that they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

KEY = "transformers configuration"


def packed(value: Any) -> Any:
    """`value` with each configuration as a dictionary of its fields.

    :raises TypeError: one has a class of its own, which nobody else could make.
    """
    transformers = sys.modules.get("transformers")  # nobody has made one who did not import it
    if transformers is not None and isinstance(value, transformers.PretrainedConfig):
        if type(value) is not _class_of(value.model_type):
            raise TypeError(f"a {type(value).__name__}, which transformers does not have, can't be handed over")
        return {KEY: value.to_dict()}
    return _within(value, packed)


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, dict) and value.keys() == {KEY}:
        fields = value[KEY]
        return _class_of(fields["model_type"]).from_dict(fields)
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
