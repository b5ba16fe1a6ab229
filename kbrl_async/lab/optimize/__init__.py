"""Optimising one module of a person's own: sample kernels, verify all, refine the promising ones, prove the best.

::

    target ─▶ Problem ─┐                     ┌──── refine: its feedback is the next prompt ────┐
                       ▼                     ▼                                                 │
    Search (pure): ask ─▶ prompt ─▶ Engine ─▶ text ─▶ Verifier, the full funnel ─▶ judged ─▶ Tree
                                                                                               │ the best few
                       written to a hidden file ─▶ read from disk ─▶ verified again, longer ◀──┘
                                                     └─ proven and faster ─▶ renamed to optimized_X.py + evidence

Owns the budget, the search tree, what is asked for next, and the files that come of it. Never a terminal: that is the
command's; never a verdict: that is the funnel's.

Invariants
* A kernel file appears only after its very bytes were read back from disk and went through the whole funnel.
* Every attempt ends with a verdict, as a copy of one that has it, or with the reason why it has none.
"""
