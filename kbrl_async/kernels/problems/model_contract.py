"""What a problem file promises about its parts, for whoever builds its model: constructor arguments and seeds.

Used in confined children and in processes that never load torch, so nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import random
from typing import Any


def arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments from `get_init_inputs()`: a list, or KernelBook's `[args, kwargs]`."""
    items = list(value)
    if len(items) == 2 and isinstance(items[0], list | tuple) and isinstance(items[1], dict):
        return list(items[0]), dict(items[1])
    return items, {}


def seed(number: int) -> None:
    """Every generator that a problem's code may draw from."""
    import numpy as np
    import torch

    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (1 << 32))
