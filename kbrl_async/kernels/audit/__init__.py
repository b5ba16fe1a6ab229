"""Looks for problems whose scores say little: `kbrl problems audit`.

::

    problem ─▶ worker process (limits on time and memory) ─┬─▶ probe: cheap outputs at KernelBench's tolerances,
                                                           │          randomness, casts    (confined child, or GPU)
                                                           └─▶ ours: the same outputs at our own tolerances

Joins `problems` and `verifying`. Never sees a candidate.

Invariants
* What does not fit is `not_audited` with the reason; what was found until then is kept.
* A worker that dies or hangs costs one problem, not the audit.
"""

from kbrl_async.kernels.audit.auditor import Auditor, Limits, audit_problems

__all__ = ["Auditor", "Limits", "audit_problems"]
