"""Switching kernels off from outside, and reading what a shared object exports."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.kernels.backends.launch.elf import functions, needed_names
from kbrl_async.kernels.backends.launch.recorder import LaunchCounter
from kbrl_async.kernels.verify import proof
from kbrl_async.kernels.verify.cpu import trace
from kbrl_async.kernels.verify.cpu.disarm import disarm
from kbrl_async.kernels.verify.layouts import Holding
from kbrl_async.kernels.verify.wire import Trace
from protocols.records import Fault

SOURCE = "#include <math.h>\nstatic int inner(void) { return 1; }\nint f(void) { return 41 + inner(); }\n"
SOURCE += "int g(void) { return 7; }\nfloat h(float x) { return tgammaf(x); }\n"
SERVER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for line in sys.stdin:
    print(library.f(), library.g(), flush=True)
"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    target = tmp_path / "k.so"
    command = ["gcc", "-O0", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), "-lm"]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    return target


Ask = Callable[[], str]


@pytest.fixture
def served(built: Path) -> Iterator[tuple[subprocess.Popen[str], Ask]]:
    command = [sys.executable, "-I", "-S", "-c", SERVER, str(built)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield process, ask
        process.kill()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no return instruction known")
def test_a_disarmed_kernel_returns_at_once(served: tuple[subprocess.Popen[str], Ask], built: Path) -> None:
    process, ask = served
    assert ask() == "42 7"
    os.kill(process.pid, signal.SIGSTOP)
    count = disarm(process.pid, [built])
    os.kill(process.pid, signal.SIGCONT)
    assert count == 3
    assert ask() != "42 7"


def test_what_is_no_shared_object_disarms_nothing(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for data in (b"", b"\x7fELF\x02\x01" + bytes(58), b"text" * 40):
        other.write_bytes(data)
        assert disarm(os.getpid(), [other]) == 0


def test_exports_and_needs_are_read_from_the_symbol_table(built: Path) -> None:
    data = built.read_bytes()
    assert len(functions(data)) == 3, "static functions have no name outside"
    assert "tgammaf" in needed_names(data)
    assert "f" not in needed_names(data)


def test_a_launch_that_raises_is_not_counted() -> None:
    recorder = LaunchCounter()
    recorder.is_on = True
    with pytest.raises(ZeroDivisionError):
        recorder.call("k", lambda: 1 / 0)
    assert recorder.launches == {}
    assert recorder.depth == 0
    recorder.call("k", ctypes.c_int, 1)
    assert recorder.launches["k"][0] == 1


def test_a_muted_launch_does_nothing() -> None:
    recorder = LaunchCounter()
    recorder.is_on = recorder.is_muted = True
    assert recorder.call("k", lambda: 1 / 0) is None


def test_operators_are_counted_by_what_they_are() -> None:
    x = torch.randn(8, 8)
    _, found = trace.recorded(lambda: torch.softmax(x.t().contiguous(), -1))
    assert set(found.ops) == {"aten::t", "aten::clone", "aten::_softmax"}
    assert proof.library_ns(found) == found.ops["aten::_softmax"][1]
    assert found.tampered == ""


def test_an_operator_whose_result_is_the_answer_is_named() -> None:
    x, watch = torch.randn(8, 8), trace.OperatorWatch({64})
    _, found = trace.recorded(lambda: torch.softmax(x, -1) + 1, watch, muted=True)
    assert trace.answered(found, watch, Holding([torch.softmax(x, -1) * 1.00001])).answered == "aten::_softmax"
    assert trace.answered(found, watch, Holding([torch.tanh(x)])).answered == ""


def test_a_replaced_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *given: True)
    assert trace.recorded(lambda: None)[1].tampered == "torch.equal"


def test_library_calls_inside_a_c_kernel_are_no_own_work() -> None:
    inside = Trace({"k": (1, 900)}, {}, {"aten::_softmax": (1, 800)})
    assert proof.own_ns(inside) == 100
    found = proof.of_recorded(inside, is_closed=True)
    assert found is not None
    assert found.rule == "decoy_kernel"
    assert proof.of_recorded(inside) is None


def test_an_operator_of_an_extension_is_a_kernel_of_its_own() -> None:
    """Of torch's own extension here: it is none of `aten`, and written in C++."""

    def run() -> torch.Tensor:
        result: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(torch.ones(3, 4))
        return result

    _, found = trace.recorded(run)
    assert found.launches["quantized::embedding_bag_byte_prepack"][0] == 1
    assert proof.of_recorded(found) is None
    with pytest.raises(RuntimeError, match="own kernels are off"):
        trace.recorded(run, muted=True)


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("is_muted", [False, True])
def test_an_operator_that_is_python_is_what_it_calls(key: str, is_muted: bool) -> None:
    untyped: Any = torch.library
    library = untyped.Library("kbrl_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, key)
    result, found = trace.recorded(lambda: torch.ops.kbrl_test.twice(torch.ones(3)), muted=is_muted)
    assert result.tolist() == [2, 2, 2]
    assert found.launches == {}
    assert found.ops["aten::mul"][0] == 1


@pytest.mark.parametrize("call", [lambda x: torch.ops.kbrl_lists.first([x]), lambda x: torch.ops.kbrl_lists.named(x=x)])
def test_an_operator_that_is_python_is_that_of_its_tensors_wherever_they_stand(
    call: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    untyped: Any = torch.library
    library = untyped.Library("kbrl_lists", "DEF")
    library.define("first(Tensor[] xs) -> Tensor")
    library.define("named(*, Tensor x) -> Tensor")
    for key, factor in (("CPU", 2), ("Meta", 1)):
        library.impl("first", lambda xs, by=factor: torch.cat([xs[0]] * by), key)
        library.impl("named", lambda x, by=factor: torch.cat([x] * by), key)
    for device, size in (("cpu", 6), ("meta", 3)):
        x = torch.ones(3, device=device)
        result, found = trace.recorded(functools.partial(call, x))
        assert (result.numel(), found.launches) == (size, {}), device


def test_an_accusation_needs_two_facts() -> None:
    """No own launch is one; the library's work is the other."""
    silent, library = Trace(), Trace(ops={"aten::softmax": (1, 1000)})
    found = [proof.of_recorded(trace) for trace in (silent, library)]
    assert [one.fault for one in found if one is not None] == [Fault.UNPROVEN, Fault.CHEATING]
