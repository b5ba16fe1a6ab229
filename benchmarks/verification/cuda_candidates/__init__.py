"""Candidates of backends `cuda` and `cpp`, each with what compiling it must say and a small problem that it solves.

`benchmarks.verification build` measures the fast way of building by them, and holds it against the full one.
"""

from __future__ import annotations

from benchmarks.verification.cuda_candidates.bad import BAD
from benchmarks.verification.cuda_candidates.cases import Case
from benchmarks.verification.cuda_candidates.good import GOOD
from benchmarks.verification.cuda_candidates.host import HOST
from benchmarks.verification.cuda_candidates.library import LIBRARY

CUDA: list[Case] = [*GOOD, *LIBRARY, *BAD]
CPP: list[Case] = HOST
NEED_FULL = ("full_headers_needed", "cublas")
"""They are built by the full way only, which is the farm's slow path by design."""

__all__ = ["CPP", "CUDA", "NEED_FULL", "Case"]
