"""What deciding whether a kernel is right, and how fast it is, takes from Python::

    result = kbrl_async.verify("L1/13_softmax", "my_kernel.py")
    result.ok, result.fault, result.timing, kbrl_async.reward(result, "stage3")

Each name is loaded at its first use: importing the package, which every candidate does, takes no torch and no time.
`__init__.pyi` says what the names are.
"""

import importlib
from typing import Any

_LAZY = {
    "AsyncVerifier": "kbrl_async.kernels.funnel",
    "Candidate": "protocols.records",
    "Careful": "kbrl_async.kernels.funnel",
    "Fault": "protocols.records",
    "KbrlError": "kbrl_async.errors",
    "Problem": "protocols.records",
    "Result": "kbrl_async.kernels.funnel",
    "Timing": "protocols.records",
    "Verdict": "protocols.records",
    "Verifier": "kbrl_async.kernels.funnel",
    "VerifyOptions": "kbrl_async.kernels.funnel",
    "bench": "kbrl_async.kernels.funnel",
    "load_problems": "kbrl_async.kernels.problems",
    "reward": "kbrl_async.rollouts.rewards.results",
    "verify": "kbrl_async.kernels.funnel",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
