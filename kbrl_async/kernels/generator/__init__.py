"""Draws problems without end: typed chains of operators, written as PyTorch that a person could have written.

::

    seed, number ─▶ drawing ─▶ Draft ─▶ checking (worker processes) ─▶ distinct? ─▶ Problem
                    operators ┘         every step matters, nothing cheap passes, rounding decides nothing

Invariants
* Deterministic in seed and number, whatever the number of workers.
* No two have the same chain of operations, and none has that of a problem to be kept away from (held out elsewhere).
* What is held out is chosen by the chain of operations, so nothing near it is trained on.
"""

from kbrl_async.kernels.generator.generating import GeneratedProblem, chain_of, generate
from kbrl_async.kernels.generator.source import generated, known, write_folder

__all__ = ["GeneratedProblem", "chain_of", "generate", "generated", "known", "write_folder"]
