"""The verbs: everything that can be called without a socket.

`kbrl_async.verify(problem, candidate)` is loaded at its first use, so that importing the package stays light.
"""

import importlib
from typing import Any

_LAZY = {"verify": "kbrl_async.kernels.funnel"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
