"""What a problem file promises about its parts, for whoever builds its model: constructor arguments and seeds.

Used in confined children and in processes that never load torch, so nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from kbrl_async.kernels.problems.beside import files_of

_FOLDERS = (
    *("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME"),
    *("CUPY_CACHE_DIR", "NUMBA_CACHE_DIR"),
)
"""Environment variables by which libraries find a place to write."""
_settled: dict[str, object] = {}
"""Modules that were looked at: there are two thousand, and none of these lies in a candidate's folder."""


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


def inputs(module: types.ModuleType, text: str, number: int) -> list[Any]:
    """What `get_inputs` makes after a seed; `text` makes another `get_inputs` of the module's functions."""
    scope = module.__dict__
    if text:
        scope = dict(scope)
        exec(compile(text, "workload", "exec"), scope)  # noqa: S102 - a confined child exists to run it
    seed(number)
    return list(scope["get_inputs"]())


def load(name: str, source: str, *, folder: str = "") -> types.ModuleType:
    """A source run as module `name` in this confined process, its lines known to tracebacks as `{name}.py`.

    :param folder: writable, and its own: it is told that its file lies there, and what it brings lies beside it.
    """
    module, file = types.ModuleType(name), f"{name}.py"
    module.__file__ = os.path.join(folder, file)
    if folder:
        _settle(folder, file, source)
    sys.modules[name] = module
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - a confined child exists to run it
    return module


def _settle(folder: str, file: str, source: str) -> None:
    """Its files, and a place to write for libraries. A host without private folders has neither: the candidate's own
    error then says what is missing. Locks between processes would lie in memory that all see; where there is but one
    process, those between threads do the same.
    """
    os.environ.update(dict.fromkeys(_FOLDERS, folder))
    tempfile.tempdir = folder
    for lock in ("Lock", "RLock", "Semaphore", "BoundedSemaphore"):
        setattr(multiprocessing, lock, getattr(threading, lock))
    for name, module in list(sys.modules.items()):
        if _settled.get(name) is module:
            continue
        place = getattr(module, "__file__", None)
        if isinstance(place, str) and place.startswith(folder + os.sep):  # of a candidate that was here before
            del sys.modules[name]
        else:
            _settled[name] = module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with contextlib.suppress(OSError):
        for name, text in {**files_of(source), file: source}.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
