"""Compiling: results, cached results, messages, confinement, and faults that are the host's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kbrl_async.errors import DiskFull, MissingTool
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.building.context import BuildContext, Diagnosis, ToolRun
from kbrl_async.kernels.backends.c import build as c_backend
from kbrl_async.kernels.backends.c import launch
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Candidate, Fault

Make = Callable[..., Candidate]


def test_a_kernel_is_built_once_and_then_cached(builder: Builder, candidate: Make) -> None:
    first, second = builder.build(candidate()), builder.build(candidate())
    assert (first.fault, first.cached, second.cached) == (Fault.OK, False, True)
    assert first.artifacts == second.artifacts
    assert all(builder.store.path(address) for address in first.artifacts.values())
    assert first.toolchain.startswith("gcc ")


def test_a_poisoned_artifact_is_built_again(builder: Builder, candidate: Make) -> None:
    make = candidate("int unused; void f(const float *x, float *y, long n) { y[0] = x[0]; }")
    address = next(iter(builder.build(make).artifacts.values()))
    path = builder.store.path(address)
    assert path is not None
    path.write_bytes(b"poison")
    again = builder.build(make)
    assert (again.fault, again.cached) == (Fault.OK, False)
    assert builder.store.path(next(iter(again.artifacts.values()))) is not None


def test_an_error_is_told_shortly_with_a_hint_and_cached(builder: Builder, candidate: Make) -> None:
    make = candidate("void f(const float *x, float *y, long n) { y[0] = oops; }")
    report = builder.build(make)
    assert report.fault is Fault.COMPILE_ERROR
    assert "kernel.c:1" in report.message
    assert "oops" in report.message
    assert str(builder.store.root) not in report.message
    assert len(report.message) <= 800
    assert "Declare" in report.hint
    assert builder.build(make).cached


def test_a_missing_symbol_is_a_compile_time_or_load_time_matter_not_a_crash(builder: Builder, candidate: Make) -> None:
    report = builder.build(candidate("float g(float); void f(const float *x, float *y, long n) { y[0] = g(x[0]); }"))
    assert report.fault in (Fault.OK, Fault.COMPILE_ERROR)


def test_a_compile_bomb_ends_at_the_deadline_and_is_not_cached(tmp_path: Path, candidate: Make) -> None:
    source = "".join(f"#define A{i} A{i - 1} A{i - 1} A{i - 1} A{i - 1}\n" for i in range(1, 16))
    source = "#define A0 y[0]++;\n" + source + "void f(const float *x, float *y, long n) { A15 }"
    with Builder(ArtifactStore(tmp_path), CompileFarm(deadline_s=0.5)) as builder:
        report = builder.build(candidate(source))
        assert report.fault is Fault.COMPILE_ERROR
        assert "longer than 0.5 s" in report.message
        assert not builder.build(candidate(source)).cached


def test_the_compiler_itself_can_not_read_outside(builder: Builder, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("int secret;")
    tmp_path.chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kernel.c").write_text(f'#include "{secret}"\nint f(void) {{ return secret; }}')
    workshop = BuildContext(ArtifactStore(tmp_path / "store"), CompileFarm())
    try:
        run = workshop.run(c_backend.command_of("kernel.c", "kernel.so"), folder)
    finally:
        workshop.close()
    assert run.status not in (0, None)
    assert "ermission" in run.output


def test_no_more_compilers_are_at_work_than_cores_can_feed(tmp_path: Path) -> None:
    """Each has a deadline by the clock, and a candidate may ask for many at the same time."""
    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        folder.mkdir()
    command = ["/bin/sh", "-c", "date +%s%N > begun; sleep .3; date +%s%N > ended"]
    made = BuildContext(ArtifactStore(tmp_path / "store"), CompileFarm(), cores=(0,))
    with contextlib.closing(made) as context, ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda folder: context.run(command, folder), folders))
    assert {run.status for run in runs} == {0}, runs
    spans = [[int((folder / name).read_text()) for name in ("begun", "ended")] for folder in folders]
    at_work = [sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans]
    assert max(at_work) <= 3


def test_a_missing_compiler_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, candidate: Make) -> None:
    c_backend.find_gcc.cache_clear()
    c_backend.toolchain_of.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with Builder(ArtifactStore(tmp_path / "store")) as builder, pytest.raises(MissingTool, match="apt-get install gcc"):
        builder.build(candidate())


def test_a_full_disk_is_the_hosts_fault_and_not_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, candidate: Make
) -> None:
    store = ArtifactStore(tmp_path)
    full = "kernel.c: fatal error: error writing to x.o: No space left on device"
    with pytest.raises(DiskFull):
        BuildContext(store, CompileFarm()).failure(ToolRun(1, full, "full", 1.0), Diagnosis)
    monkeypatch.setattr(BuildContext, "run", lambda *_, **__: ToolRun(1, full, "full", 1.0))
    with Builder(store) as builder, pytest.raises(DiskFull):
        builder.build(candidate())
    assert not list((tmp_path / "keys").rglob("*.json"))


def test_fast_math_before_the_header_gives_vector_functions(builder: Builder, candidate: Make) -> None:
    source = '#pragma GCC optimize("Ofast")\n#include <math.h>\n'
    source += "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = expf(x[i]); }"
    path = builder.store.path(next(iter(builder.build(candidate(source)).artifacts.values())))
    assert path is not None
    assert b"_ZGV" in path.read_bytes()


def test_the_unit_is_named_by_its_source(builder: Builder, candidate: Make) -> None:
    source = "void f(const float *x, float *y, long n) { y[0] = 7; }"
    assert list(builder.build(candidate(source)).artifacts) == [launch.source_key(source)]
