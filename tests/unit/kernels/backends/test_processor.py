"""C kernels for processors of several ages: what a build may use is said with it, and checked where it runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError, MissingTool
from kbrl_async.kernels.backends.building import ArtifactStore, check_processor
from kbrl_async.kernels.backends.building.processor import extensions, lacking, needed
from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import BuildReport, Candidate, Fault
from tests.unit.kernels.backends.test_reproducible import SOURCE

GCC = shutil.which("gcc") or "gcc"
OLD = "processor : 0\nflags : fpu sse sse2 pni ssse3 sse4_1 sse4_2 popcnt abm bmi1 bmi2 avx avx2 fma f16c movbe\n"


def built(tmp_path: Path, march: str) -> BuildReport:
    with Builder(ArtifactStore(tmp_path / "store"), CompileFarm(march=march)) as builder:
        return builder.build(Candidate(SOURCE, "c"))


@pytest.fixture
def old_host(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(OLD)
    return path


def test_what_a_host_builds_for_itself_it_can_run(tmp_path: Path) -> None:
    report = built(tmp_path, "native")
    assert report.fault is Fault.OK
    assert report.cpu
    assert lacking(report.cpu) == []


def test_an_older_host_sees_what_it_lacks_for_a_build_of_a_newer_one(old_host: Path) -> None:
    needs = extensions(needed(GCC, "skylake-avx512")[1])
    assert {"avx512f", "avx512vl"} <= set(lacking(needs, old_host))
    with pytest.raises(InfraError, match=r"avx512.* compile_farm\.march"):
        check_processor(needs, old_host)
    check_processor("avx2", old_host)


def test_and_nothing_for_one_that_all_hosts_can_do(tmp_path: Path, old_host: Path) -> None:
    report = built(tmp_path, "x86-64-v3")
    assert "avx2" in report.cpu.split()
    assert lacking(report.cpu, old_host) == []


def test_builds_for_several_processors_are_kept_apart(tmp_path: Path) -> None:
    first, second = built(tmp_path, "x86-64-v3"), built(tmp_path, "x86-64")
    assert not second.cached
    assert first.toolchain != second.toolchain
    assert first.artifacts != second.artifacts


def test_an_architecture_that_the_compiler_does_not_know_is_no_fault_of_a_candidate(tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match=r"compile_farm\.march"):
        built(tmp_path, "pentium99")


def test_a_host_that_does_not_say_what_it_can_do_is_believed(tmp_path: Path) -> None:
    assert lacking("avx512f", tmp_path / "nothing") == []
    assert lacking("") == []
