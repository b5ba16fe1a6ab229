"""From candidate source to a content-addressed artifact, or to a report that says why not.

Owns static tripwires, compilers and the artifact store; never runs a candidate.

::

    candidate ─▶ static_check (AST only) ─▶ cache? ─▶ confined compiler ─▶ publish (trusted side) ─▶ BuildReport

How to add a backend: write one file in this package with a class that fulfils `Backend` (see `backend.py`;
`c.py` is the example), and add one line to `_BACKENDS` in `registry.py`.

Invariants
* Nothing of a candidate is executed on this side, and its compiler runs confined: `#include "/etc/…"` reads nothing.
* Only the trusted side publishes; readers check the content's hash.
* A candidate's failure is a report and may be cached; the host's failure is an exception and never is (I4).
"""

from kbrl_async.kernels.backends.building.builder import Builder
from kbrl_async.kernels.backends.building.context import BuildOptions
from kbrl_async.kernels.backends.building.processor import check_processor
from kbrl_async.kernels.backends.building.registry import backend, backends
from kbrl_async.kernels.backends.building.store import ArtifactStore
from kbrl_async.kernels.backends.checks.static import static_check

__all__ = ["ArtifactStore", "BuildOptions", "Builder", "backend", "backends", "check_processor", "static_check"]
