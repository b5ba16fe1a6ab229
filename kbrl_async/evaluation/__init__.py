"""What an evaluation says about a policy: figures with their uncertainty, and where they are written.

::

    Sample (one answer) ─▶ figures: pass@k, fast_p, speedups, hack rate ─▶ document: raw and filtered, by level
                                                                            ├─▶ JSON   ├─▶ TensorBoard   └─▶ terminal

Owns: the arithmetic (`metrics`, pure), the document (`document`), its views (`show`), and which policy a person means
(`targets`, `publishing`). Never touches: sockets, candidates, rewards.
"""

from kbrl_async.evaluation.document import Document, Figures, build, read, write
from kbrl_async.evaluation.metrics import THRESHOLDS, Figure, Sample, fast_p, geometric_mean, pass_at_k

__all__ = [
    "THRESHOLDS",
    "Document",
    "Figure",
    "Figures",
    "Sample",
    "build",
    "fast_p",
    "geometric_mean",
    "pass_at_k",
    "read",
    "write",
]
