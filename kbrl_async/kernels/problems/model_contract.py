"""What a problem file promises about its parts, for whoever builds its model: constructor arguments and seeds.

Used in confined children and in processes that never load torch, so nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import linecache
import random
import sys
import types
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


def load(name: str, source: str, *, is_file: bool = False) -> types.ModuleType:
    """A source run as module `name` in this confined process, its lines known to tracebacks as `{name}.py`.

    :param is_file: it is told that this is its file, as loaders of extensions want.
    """
    module, file = types.ModuleType(name), f"{name}.py"
    if is_file:
        module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - a confined child exists to run it
    return module
