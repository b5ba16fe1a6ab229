"""No row of the catalogue without a test."""

from __future__ import annotations

from tests.unit.kernels.verify.catalogue import test_outputs, test_own_kernels, test_process, test_values_and_times
from tests.unit.kernels.verify.catalogue.exploits import ROWS

TESTED = (test_outputs, test_own_kernels, test_process, test_values_and_times)
"""Importing them registers their rows."""
ON_A_GPU = {
    "work on a side stream",
    "warm-up inflation, persisting-L2 carve-out",
}


def test_every_row_of_the_catalogue_has_its_test() -> None:
    wanted = {
        "work on a side stream",
        "background thread computes after return",
        "lazy tensor subclass or proxy",
        "patched timers",
        "cache by pointer, identity, version or value",
        "phase sniffing",
        "first call computes for all, later calls return",
        "reads the reference's freed memory",
        "mutates inputs",
        "finds expected outputs",
        "NaN",
        "forges the verdict",
        "ctypes, ptrace, /proc/self/mem, edited grader files",
        "replays the seed",
        "right at the checked shape, wrong at the timed one",
        "precision downgrade",
        "partial work, rescaled",
        "degenerate problem",
        "wraps the library, try/except fallback, decoy kernel",
        "reference code pasted inline",
        "warm-up inflation, persisting-L2 carve-out",
        "impossible speed",
    }
    assert len(wanted) == 22
    assert set(ROWS) | ON_A_GPU == wanted
