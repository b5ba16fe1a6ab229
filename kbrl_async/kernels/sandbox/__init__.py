"""Disposable, confined processes for untrusted code; knows nothing of kernels, compilers or verdicts.

::

    trusted process ──Spawn + fds──▶ Zygote (clean, imports done, own namespaces) ──fork──▶ child: layers,
    then the entry ▲  pidfd, isolation ◀───────────┘                                                    │
          └──────────────── the child's own socket (fixed-schema bytes) ◀─────────────────────┘

Invariants
* Candidate code never runs in the zygote, and a child is never used again after candidate code ran in it.
* A layer that a host lacks is named in `Isolation.missing`, never silently skipped.
* A child is the first process of a pid namespace of its own: what it starts dies with it (a GPU child starts nothing).
* A child dies with its zygote, a zygote with its owner, and every wait has a deadline.
"""

from kbrl_async.kernels.sandbox.client import START_S, Child, Zygote
from kbrl_async.kernels.sandbox.outputs import BadOutput, is_over, read_output, remove_tree
from kbrl_async.kernels.sandbox.wire import Access, Isolation, Level, Limits

__all__ = [
    "START_S",
    "Access",
    "BadOutput",
    "Child",
    "Isolation",
    "Level",
    "Limits",
    "Zygote",
    "is_over",
    "read_output",
    "remove_tree",
]
