"""Chaos on purpose: faults by a plan, done to a run of this host, and what a run must be able to say afterwards.

::

    plan (file | seed) ─▶ FaultDriver: begins and ends each fault in its time ─▶ run ends ─▶ evidence ─▶ checks
                              │
            signals · Link (a proxy before the broker) · garbage frames · flipped bytes · no room for files

Owns: faults and plans (pure), finding a run's processes, doing harm, checking what is left. Never starts a run and
never prints; `kbrl_async.cli.chaos` does. Touches nothing but processes and files of the one run.

Invariants
* The same seed and options give the same plan, whatever the run does.
* What can be undone (a stop, a cut, a full disk) is undone at its time, and at the latest when the driver ends.
* A check is made from what is on disk after the end, by counting again; no counter is believed because it says so.
"""
