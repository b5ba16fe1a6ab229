"""Candidates of backends `cuda` and `cpp`, each with what compiling it must say and a small problem that it solves.

They measure the fast way of building (`benchmarks/compile.py`) and hold it against the full one: same verdict for each.
"""

from __future__ import annotations

from benchmarks.cuda_candidates.bad import BAD
from benchmarks.cuda_candidates.cases import Case
from benchmarks.cuda_candidates.good import GOOD
from benchmarks.cuda_candidates.host import HOST
from benchmarks.cuda_candidates.library import LIBRARY

CUDA: list[Case] = [*GOOD, *LIBRARY, *BAD]
CPP: list[Case] = HOST

__all__ = ["CPP", "CUDA", "Case"]
