"""The whole way of one candidate: format → static → compile → small inputs → full inputs → timing.

The one composition of building and verifying, in two halves. A farm calls the first, a bench the second; `Verifier`
calls both in one process, for `kbrl verify`, `kbrl optimize`, notebooks, and run folders of KernelBench.

::

    text ─read─▶ Candidate ─Builder─▶ BuildReport ─Judge─▶ BenchReport ─▶ Result
      └─ format_error   └─ static_violation, compile_error   └─ every other fault: the stages after it do not run

Invariants
* The candidate's faults are results; the host's and the problem's are exceptions (`MissingTool`, `InfraError`,
  `ProblemError`), never results (I4).
* Nothing stays behind: no process, no file outside the store that was asked for, no setting of the calling process.

Each name is loaded at its first use: a farm builds, and needs none of the torch that judging imports.
`__init__.pyi` says what the names are.
"""

import importlib
from typing import Any

_LAZY = {
    "AsyncVerifier": "concurrent",
    "Builder": "build",
    "Careful": "careful",
    "Judge": "judge",
    "Reading": "reading",
    "Result": "result",
    "SpotChecks": "judge",
    "Verifier": "verifier",
    "VerifyOptions": "verifier",
    "artifact_paths": "build",
    "bench": "careful",
    "read_candidate": "reading",
    "verify": "verifier",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
