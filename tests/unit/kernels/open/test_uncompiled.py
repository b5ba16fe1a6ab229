"""`torch.compile` on a GPU: no compiler may be started there, so what it is given runs as it is, and that is said."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.launch.uncompiled import leave_uncompiled
from kbrl_async.kernels.funnel import Builder, Verifier
from kbrl_async.kernels.sandbox import Isolation, gpu
from kbrl_async.kernels.settings import CompileFarm, Rules
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cpu import runner as serving
from kbrl_async.kernels.verify.cuda import own_graphs, runner
from kbrl_async.kernels.verify.cuda.record import child
from protocols.records import Candidate, Fault, Problem
from tests.gpu.open_candidates import OTHER_STYLES

STYLE = OTHER_STYLES["torch.compile around a kernel"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Backends that torch's own was asked for. What a test replaces is put back."""
    found: list[Any] = []

    def compiled(model: Any = None, *, backend: Any = "inductor", **named: Any) -> Any:
        found.append(backend)
        return lambda *args: None

    monkeypatch.setattr(torch, "compile", compiled)
    return found


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def is_left(function: Any) -> bool:
    return torch.compile(function) is function


def test_a_function_and_a_module_are_what_they_were(asked: list[Any]) -> None:
    leave_uncompiled()
    assert is_left(twice)
    assert torch.compile(mode="max-autotune", fullgraph=True)(twice) is twice
    module = torch.nn.ReLU()
    module.compile()
    assert module(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert torch.compile(module) is module
    assert asked == []


def test_what_starts_no_compiler_is_torchs_own_but_where_nothing_is_computed(asked: list[Any]) -> None:
    leave_uncompiled()
    assert torch.compile(twice, backend="eager") is not twice
    assert asked == ["eager"]
    leave_uncompiled(also_traced=True)
    assert torch.compile(twice, backend="eager") is twice


def nothing(*args: object) -> None:
    """There is no GPU."""


@pytest.mark.usefixtures("asked")
def test_who_serves_on_a_gpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Served:
        is_over = False

        def __init__(self, *args: object) -> None:
            seen.append(is_left(twice))

        def serve(self) -> None: ...

    monkeypatch.setattr(runner, "CudaRunner", Served)
    monkeypatch.setattr(serving, "mute", nothing)
    monkeypatch.setattr(own_graphs, "install", nothing)
    monkeypatch.setattr(torch.cuda, "set_device", nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(gpu, "finish", lambda isolation: isolation)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        orders = wire.encode(wire.Setup("", "ModelNew", 1, device="cpu"))
        runner.main(theirs, orders, [], Isolation("full", ()))
    assert seen == [True]


@pytest.mark.usefixtures("asked")
def test_who_records_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Records:
        def __init__(self, *args: object) -> None: ...

        def serve(self) -> None:
            seen.append(is_left(twice))

    monkeypatch.setattr(child, "Recorder", Records)
    monkeypatch.setattr(serving, "mute", nothing)
    monkeypatch.setattr(gpu, "finish", lambda isolation: isolation)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child.main(theirs, b"cpu", [], Isolation("full", ()))
    assert seen == [True]


@pytest.mark.parametrize(("rules", "around"), [("strict", ""), ("open", ""), ("open", "import os\n")])
def test_its_kernels_are_compiled_ahead_and_the_report_says_so(tmp_path: Path, rules: Rules, around: str) -> None:
    posed = Problem("L1/01_test", 1, "test", STYLE.problem)
    honest = around + STYLE.honest
    plain = honest.replace("torch.compile(step)", "step")
    with Builder(ArtifactStore(tmp_path), CompileFarm(nice=0, rules=rules)) as builder:
        reports = [builder.build(Candidate(text, guess_backend(text)), posed) for text in (honest, plain)]
    assert [report.fault for report in reports] == [Fault.OK] * 2, reports
    assert [report.kernels for report in reports] == [["shifted"]] * 2, reports
    assert reports[0].hint.startswith("On a GPU torch.compile leaves what it is given as it is")
    assert reports[1].hint == ""


@pytest.mark.parametrize(("is_honest", "fault"), [(True, Fault.OK), (False, Fault.CHEATING)])
def test_in_tritons_interpreter_too(free: Verifier, is_honest: bool, fault: Fault) -> None:
    small = Problem("L1/01_test", 1, "test", STYLE.problem.replace("1024, 512", "64, 32"))
    verdict = free.verify(small, STYLE.honest if is_honest else STYLE.decoy).verdict
    assert (verdict.fault, verdict.rule) == (fault, "" if is_honest else "decoy_kernel"), verdict
