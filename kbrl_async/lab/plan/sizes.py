"""How large a policy is: generation and updates are taken to cost in proportion to its parameters."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import CheckpointError, UserError

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_MAX_HEADER_BYTES = 100 << 20
_NAMED = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([kmbt])(?![A-Za-z0-9])", re.IGNORECASE)
"""A size in a name, as in Qwen2.5-Coder-7B-Instruct."""


def count_parameters(model: str) -> float:
    """Of a folder with safetensors files, or of a name or number that says it, such as 7B.

    :raises UserError: a name that says no size. CheckpointError: a folder without readable weights.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors", "Give a folder that a model was saved to")
        return float(sum(map(_in_file, files)))
    sizes = _NAMED.findall(folder.name)
    if not sizes:
        cure = "Give a folder, or a size such as --model 7B"
        raise UserError(f"how many parameters {model} has can't be told from its name", cure)
    number, unit = sizes[-1]
    return float(number) * _UNITS[unit.lower()]


def _in_file(path: Path) -> int:
    """Elements of all tensors, from the file's header: the weights themselves are not read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = msgspec.json.decode(file.read(min(length, _MAX_HEADER_BYTES)))
    except (OSError, struct.error, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}", "Restore it from a copy") from None
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
