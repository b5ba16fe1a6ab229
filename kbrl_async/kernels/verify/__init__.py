"""Correctness, and the timed comparison of a correct candidate with its reference.

Owns secret inputs, the comparison, the catalogue of cheating rules and the verdict; never compiles, never scores.

::

    reference child ──inputs, weights, expected──▶ Bench (trusted) ◀──addresses, shapes── candidate child
         own arena ◀──secret inputs── Bench ──the same inputs──▶ own arena
                                       └─ freezes the child, reads its outputs itself, compares, times

Invariants
* No verdict is computed where candidate code has run (I5): a candidate's process gets inputs and says where its outputs
  lie; expected outputs are never in it, and what it says is only ever an address to read.
* The reference never shares memory with a candidate, and both run the same runner code.
* A fault of the host or of the problem raises (`InfraError`, `ProblemError`); only the candidate's faults
  are verdicts (I4).
"""

from kbrl_async.kernels.verify.bench import Bench, zygote_for
from kbrl_async.kernels.verify.options import BenchOptions, bench_options

__all__ = ["Bench", "BenchOptions", "bench_options", "zygote_for"]
