"""Hostile candidates. Each would be judged correct, or do damage, if the defence named by its test were gone."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options
from protocols.records import BenchReport, Candidate, Fault, Problem
from tests.unit.kernels.verify.conftest import SCALE_AND_SHIFT

Evaluate = Callable[..., BenchReport]

TEMPLATE = """
import torch
import torch.nn as nn
{top}

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.calls = 0
{init}

    def forward(self, x):
        self.calls += 1
        y = x * 2 + self.shift
{forward}
        return y
"""


def candidate(*, top: str = "", init: str = "", forward: str = "") -> str:
    """Correct, apart from what is put in."""
    body = {"init": init or "pass", "forward": forward or "pass"}
    indented = {key: textwrap.indent(textwrap.dedent(text), " " * 8) for key, text in body.items()}
    return TEMPLATE.format(top=textwrap.dedent(top), **indented)


def test_the_template_without_an_attack_is_correct(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate()).verdict
    assert (verdict.fault, verdict.passed, verdict.total) == (Fault.OK, 10, 10)


@pytest.mark.parametrize(
    "attack",
    [
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import os; os.kill(os.getppid(), 9)",
        "import os, signal; signal.raise_signal(9)",
        "import os; os.fork() or os._exit(0)",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.sched_setaffinity(0, range(64))",
        "import os; os.setpriority(os.PRIO_PROCESS, 0, -5)",
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.001)",
        "import threading; threading.Thread(target=print).start()",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        "open('/etc/passwd').read()",
        "open('/proc/self/maps').read()",
        "open('/proc/self/mem', 'r+b')",
        "import os; os.listdir('/tmp')",
        "import os; os.listdir('/root')",
    ],
)
def test_what_a_kernel_never_needs_is_refused(evaluate: Evaluate, attack: str) -> None:
    verdict = evaluate(candidate(init=attack)).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR
    assert any(
        word in verdict.message
        for word in ("Permission", "not permitted", "Read-only", "unavailable", "start new thread", "not allowed")
    )


@pytest.mark.parametrize("name", ["ptrace", "process_vm_readv", "unshare", "setns", "io_uring_setup", "bpf", "keyctl"])
def test_dangerous_system_calls_are_refused(evaluate: Evaluate, name: str) -> None:
    numbers = {"ptrace": 101, "process_vm_readv": 310, "unshare": 272, "setns": 308, "io_uring_setup": 425}
    number = numbers.get(name, {"bpf": 321, "keyctl": 250}.get(name))
    attack = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall({number}, 0, 0, 0, 0, 0, 0)
        assert ctypes.get_errno() != 1, "EPERM"
    """
    verdict = evaluate(candidate(init=attack)).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR
    assert "EPERM" in verdict.message


def test_a_secret_file_outside_can_not_be_read(evaluate: Evaluate, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected outputs")
    secret.chmod(0o644)
    assert evaluate(candidate(init=f"open({str(secret)!r}).read()")).verdict.fault is Fault.RUNTIME_ERROR


def test_nothing_can_be_written_outside(evaluate: Evaluate, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    attack = f"""
        try:
            open({str(tmp_path / "mark")!r}, "w").write("x")
        except OSError:
            pass
    """
    evaluate(candidate(init=attack))
    assert not (tmp_path / "mark").exists()


def test_the_private_folder_is_small_and_gone_with_its_child(evaluate: Evaluate) -> None:
    bomb = """
        assert not __import__("os").path.exists("left"), "left behind"
        open("left", "w").close()
        for i in range(8):
            open(f"bomb{i}", "wb").write(bytes(1 << 20))
    """
    for _ in range(2):
        verdict = evaluate(candidate(init=bomb)).verdict
        assert verdict.fault is Fault.RUNTIME_ERROR
        assert "No space left" in verdict.message


def test_a_memory_bomb_is_out_of_memory(evaluate: Evaluate) -> None:
    assert evaluate(candidate(forward="self.bomb = bytearray(4 << 30)")).verdict.fault is Fault.OUT_OF_MEMORY
    assert evaluate(candidate(forward="self.bomb = torch.empty(1 << 30)")).verdict.fault is Fault.OUT_OF_MEMORY


def test_an_endless_import_is_a_timeout(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, bench_options(TimingBench(deadline_s=1.0)))) as bench:
        one = Problem("L1/01_test", 1, "test", SCALE_AND_SHIFT)
        report = bench.evaluate(one, Candidate(candidate(top="while True: pass"), "torch"), {}, timing=False)
    assert report.verdict.fault is Fault.TIMEOUT


def test_an_endless_forward_is_a_timeout_after_the_short_deadline_of_one_call(zygote: Zygote) -> None:
    with contextlib.closing(Bench(zygote, bench_options(TimingBench(deadline_s=60.0), call_floor_s=1.0))) as bench:
        one = Problem("L1/01_test", 1, "test", SCALE_AND_SHIFT)
        endless = Candidate(candidate(forward="while True: pass"), "torch")
        verdict = bench.evaluate(one, endless, {}, timing=False).verdict
    assert verdict.fault is Fault.TIMEOUT
    found = re.search(r"no result after ([\d.]+) s", verdict.message)
    assert found is not None, verdict.message
    assert 1.0 <= float(found[1]) < 30.0  # more than the floor where the reference's own call was slow


def test_an_endless_loop_in_c_is_a_timeout(evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]]) -> None:
    source = "void spin(float *x) { for (volatile long i = 0;; i++) {} }"
    attack = f"from kbrl_async.launch import c_kernel\nSOURCE = {source!r}"
    report = evaluate(candidate(top=attack, forward='c_kernel(SOURCE, "spin")(y)'), **compile_raw(source))
    assert report.verdict.fault is Fault.TIMEOUT


def test_a_write_out_of_bounds_is_an_illegal_access(
    evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    source = "void wild(float *x) { for (long i = 0; i < 1L << 40; i += 1000) x[i] = 1; }"
    attack = f"from kbrl_async.launch import c_kernel\nSOURCE = {source!r}"
    report = evaluate(candidate(top=attack, forward='c_kernel(SOURCE, "wild")(y)'), **compile_raw(source))
    assert report.verdict.fault is Fault.ILLEGAL_ACCESS


@pytest.mark.parametrize("way", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_leaving_early_is_no_success(evaluate: Evaluate, way: str) -> None:
    assert evaluate(candidate(forward=way)).verdict.fault is Fault.RUNTIME_ERROR


@pytest.mark.usefixtures("slow_deaths")
def test_who_takes_long_to_die_has_not_shut_its_way_to_the_bench(evaluate: Evaluate) -> None:
    """The kernel takes a process's memory down after its socket: with much of it, or on a loaded host, for seconds."""
    verdict = evaluate(candidate(forward="import os; os._exit(3)")).verdict
    assert (verdict.fault, verdict.rule) == (Fault.RUNTIME_ERROR, "")
    assert "exit code 3" in verdict.message


def test_a_huge_output_is_refused_by_its_shape(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate(forward="y = torch.empty(1 << 22)")).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "shape")


def test_strides_that_reach_far_outside_are_refused(evaluate: Evaluate) -> None:
    attack = "y = torch.empty(1 << 22).as_strided((16, 33), (1 << 17, 1))"
    verdict = evaluate(candidate(forward=attack)).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "layout")


def test_answers_sent_ahead_are_forged(evaluate: Evaluate) -> None:
    attack = """
        import os, msgspec
        for fd in range(3, 20):
            try:
                os.write(fd, msgspec.msgpack.encode({"type": "ready"}))
                os.write(fd, msgspec.msgpack.encode({"type": "done", "nonce": 1, "tree": ["T", 0], "tensors": []}))
            except OSError:
                pass
    """
    verdict = evaluate(candidate(init=attack)).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "forged_result")


def test_patched_comparisons_and_clocks_change_nothing(evaluate: Evaluate) -> None:
    attack = """
        import time, torch
        torch.allclose = torch.equal = lambda *a, **k: True
        time.perf_counter_ns = time.perf_counter = lambda: 0
    """
    assert evaluate(candidate(top=textwrap.dedent(attack), forward="y = y + 1")).verdict.fault is Fault.INCORRECT


def test_a_patched_clock_does_not_make_a_sleeper_fast(evaluate: Evaluate) -> None:
    attack = "import time\nsleep = time.sleep\ntime.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0"
    timing = evaluate(candidate(top=attack, forward="sleep(0.02)"), timing=True).timing
    assert timing is not None
    assert timing.speedup < 0.5
    assert not timing.is_faster


@pytest.mark.parametrize("key", ["x.data_ptr()", "tuple(x.shape)", "x._version"])
def test_cached_results_are_incorrect(evaluate: Evaluate, key: str) -> None:
    assert evaluate(
        candidate(init="self.cache = {}", forward=f"y = self.cache.setdefault({key}, y)")
    ).verdict.fault in (
        Fault.INCORRECT,
        Fault.CHEATING,
    )


def test_a_changed_input_is_cheating(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate(forward="x.zero_()")).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "input_mutation")


def test_an_output_that_is_overwritten_later_is_found(evaluate: Evaluate) -> None:
    attack = """
        if self.calls == 1:
            self.y = torch.empty_like(y)
        self.y.copy_(y)
        y = self.y
    """
    verdict = evaluate(candidate(forward=attack)).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "output_overwritten")


def test_nan_is_wrong(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate(forward="y[3, 4] = float('nan')")).verdict
    assert verdict.fault is Fault.INCORRECT
    assert "NaN" in verdict.message


def test_the_input_itself_is_no_answer(evaluate: Evaluate) -> None:
    assert evaluate(candidate(forward="y = x")).verdict.fault is Fault.INCORRECT


def test_a_lazy_subclass_is_cheating(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate(top="class Lazy(torch.Tensor): pass", forward="y = y.as_subclass(Lazy)")).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "tensor_subclass")


def test_right_when_checked_and_wrong_when_timed_is_cheating(evaluate: Evaluate) -> None:
    report = evaluate(candidate(forward="if self.calls > 12: y = torch.zeros_like(y)"), timing=True)
    assert (report.verdict.fault, report.verdict.rule) == (Fault.CHEATING, "wrong_when_timed")
    assert report.timing is None


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("small", "0 < x.abs().max() < 0.5"),
        ("large", "x.abs().std() > 3 and (x == 0).float().mean() < 0.5"),
        ("spikes", "(x == 0).float().mean() > 0.7"),
        ("graded", "(x == 0).float().mean() < 0.5 and x[:, -4:].std() > 4 * x[:, :4].std()"),
        ("binary", "bool(((x == 0) | (x == 1)).all())"),
    ],
)
def test_inputs_are_not_only_nominal(evaluate: Evaluate, name: str, condition: str) -> None:
    verdict = evaluate(candidate(forward=f"if {condition}: y = y * 0")).verdict
    assert verdict.fault is Fault.INCORRECT
    assert verdict.message.partition("wrong: ")[2].startswith(f"{name}. (line ")
    assert verdict.passed == verdict.total - 1


def test_every_verdict_says_how_isolated_it_was(evaluate: Evaluate) -> None:
    verdict = evaluate(candidate()).verdict
    assert verdict.isolation in ("full", "reduced", "none")
    assert (verdict.isolation == "full") == (not verdict.isolation_missing)
