"""Two farms whose C toolchains have one name build the same bytes: by that the broker finds one that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.c import build as c
from kbrl_async.kernels.funnel import Builder
from protocols.opinions import BY_BYTES
from protocols.records import BuildReport, Candidate, Fault
from tests.candidates import in_c

SOURCE = in_c(
    """
#pragma GCC optimize("Ofast")
#include <math.h>
void f(const float *x, float *y, long n) {
#pragma omp parallel for
    for (long i = 0; i < n; i++) y[i] = tanhf(x[i]);
}
"""
)


def built_on_a_host_of_its_own(store: Path) -> BuildReport:
    with Builder(ArtifactStore(store)) as builder:
        return builder.build(Candidate(SOURCE, "c"))


def test_farms_of_one_toolchain_build_the_same_bytes(tmp_path: Path) -> None:
    first, second = (built_on_a_host_of_its_own(tmp_path / name) for name in ("one", "two"))
    assert first.fault is second.fault is Fault.OK, first.message
    assert (first.cached, second.cached) == (False, False)
    assert first.artifacts == second.artifacts
    assert first.toolchain == second.toolchain
    assert first.toolchain.startswith(BY_BYTES)


def test_a_host_whose_compiler_makes_other_bytes_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = c.toolchain_of.__wrapped__()
    monkeypatch.setattr(c, "probe_hash", lambda _: "what another libc makes of it")
    assert c.toolchain_of.__wrapped__()[0] != name
