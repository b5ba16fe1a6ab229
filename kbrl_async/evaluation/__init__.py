"""What an evaluation says about a policy: figures with their uncertainty, and where they are written.

::

    Sample (one answer) ─▶ figures: pass@k, fast_p, speedups, hack rate ─▶ document: raw and filtered, by level
                                                                            ├─▶ JSON   ├─▶ TensorBoard   └─▶ terminal

Imports nothing here: the configuration reads `settings`, and the figures need scipy.

Owns: the arithmetic (`metrics`, pure), the document (`document`), its views (`show`), and which policy a person means
(`targets`, `publishing`). Never touches: sockets, candidates, rewards.
"""
