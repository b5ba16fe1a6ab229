"""Languages that kernels are written in, one folder each, and what they share.

::

    candidate ─▶ check (syntax tree only) ─▶ cache? ─▶ confined compiler ─▶ publish (trusted side) ─▶ BuildReport
    bench's child: prepare(artifacts) ─▶ the candidate's own launches

Invariants
* Nothing of a candidate is executed on the trusted side, and its compiler runs confined: `#include "/etc/…"` reads
  nothing.
* Only the trusted side publishes; readers check the content's hash.
* A candidate's failure is a report and may be cached; the host's failure is an exception and never is (I4).
"""

from kbrl_async.kernels.backends.backend import (
    Backend,
    Shot,
    backend,
    backends,
    guess_backend,
    modules_of,
    preloads,
    prepare,
    runs_on_gpu,
)

__all__ = [
    "Backend",
    "Shot",
    "backend",
    "backends",
    "guess_backend",
    "modules_of",
    "preloads",
    "prepare",
    "runs_on_gpu",
]
