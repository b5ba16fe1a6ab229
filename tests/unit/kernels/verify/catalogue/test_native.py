"""What native code can do in the process that replays it: it is machine code, and not even held to what C can say.

Its sources here go straight to the compiler: inline system calls, constructors and Python's own interface are in reach,
as if the farm's checks had been fooled.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu import bursts, replay, statics, stopwatch
from kbrl_async.kernels.verify.cpu.stopwatch import Stopwatch, net_ns
from kbrl_async.kernels.verify.session import ForwardOutcome
from protocols.records import OBSERVED, BenchReport, Fault
from tests.unit.kernels.verify.catalogue.exploits import (
    CALL,
    LINEAR,
    Judge,
    Patch,
    caught,
    is_replayed,
    kernel,
    nothing,
    row,
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="its system calls are those of x86-64")
SYSTEM = """
static long call(long n, long a, long b, long c, long d, long e, long f) {
  long r;
  register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return r;
}
"""
WRONG = "{ for (long i = 0; i < n * m; i++) y[i] = 1e9f; return; }"
KEPT = SYSTEM + "static long *kept(void) { call(9, 1L << 44, 4096, 3, 0x100022, -1, 0); return (long *)(1L << 44); }"
"""Memory at a place of its own choice, which nobody puts back."""


# ---- what the kernel of the host refuses -----------------------------------------------------------------------------

DENIED = {
    "other processes": "{57}, {58}, {56, 17}, {435, 0, 88}, {59}, {101, 16, 1}, {434, 1}",
    "memory of others": "{310, 1}, {311, 1}, {312, 1, 1}, {440, 1}, {438, 1}",
    "signals": "{62, 1, 19}, {62, -1, 9}, {200, 1, 9}, {234, 1, 1, 9}, {129, 1, 18}, {424, 3, 18}",
    "time of its own": "{38}, {222, 1}, {283, 1}, {37, 1}",
    "sockets and queues": "{41, 2, 1}, {53, 1, 1}, {29, 1, 4096, 512}, {64, 1, 1, 512}, {68, 1, 512}, {250, 0}",
    "other ways into the kernel": "{425, 8}, {321}, {298}, {323}, {317}, {135, 0x40000}, {272, 0x10000000}",
    "scheduling": "{203, 0, 8}, {141, 0, 0, -5}, {144, 0, 1}, {251, 1, 0, 0}, {160, 0}",
    "files": '{257, -100, (long)"/etc/passwd"}, {257, -100, (long)"/tmp/x", 0101, 384}, {319, (long)"m"}',
    "marks on files": '{188, (long)"/", (long)"user.a", (long)"b", 1}, {90, (long)"/tmp", 511}, {132, (long)"/tmp"}',
}


@row("ctypes, ptrace, /proc/self/mem, edited grader files")
@pytest.mark.parametrize("what", DENIED)
def test_system_calls_that_reach_out_of_a_replayer_fail(judge: Judge, what: str) -> None:
    tries = f"long tries[][7] = {{{DENIED[what]}}};\n"
    tries += "for (unsigned i = 0; i < sizeof tries / sizeof *tries; i++) { long *t = tries[i];\n"
    tries += f"if (call(t[0], t[1], t[2], t[3], t[4], t[5], t[6]) >= 0) {WRONG} }}"
    assert is_replayed(judge(kernel(first=tries, before=SYSTEM), CALL).verdict)


def test_a_system_call_that_works_is_seen_by_these_tests(judge: Judge) -> None:
    """`getpid`: else the tests above would pass by a mistake in their assembly."""
    verdict = judge(kernel(first=f"if (call(39, 0, 0, 0, 0, 0, 0) >= 0) {WRONG}", before=SYSTEM), CALL).verdict
    assert (verdict.fault, verdict.passed) == (Fault.INCORRECT, 0)


# ---- what it can do, and gains nothing by ----------------------------------------------------------------------------

HARMLESS = {
    "a constructor": kernel(
        before="static int ready; __attribute__((constructor)) static void f0(void) { ready = 1; }"
    ),
    "a resolver that chooses code": kernel(
        before="static void one(void) {} static void (*pick(void))(void) { return one; }\n"
        'void g(void) __attribute__((ifunc("pick")));'
    ),
    "a cache behind a pointer": kernel(
        before="#include <stdlib.h>\nstatic float *last;",
        first="if (last && last[0] == x[0]) { y[0] = last[1]; return; } last = malloc(64); last[0] = x[0];",
    ),
    "looking through the stack": kernel(
        first="volatile long here = 0; long sum = 0; for (long i = 0; i < 256; i++) sum += (&here)[i]; here = sum;"
    ),
    "looking around the output": kernel(
        first="volatile float sum = 0; for (long i = 0; i < n * m; i++) if (y[i] == y[i]) sum += y[i];"
    ),
    "numbers near zero as zero": kernel(before="#include <immintrin.h>", first="_mm_setcsr(_mm_getcsr() | 0x8040);"),
    "the clock": kernel(before="#include <immintrin.h>", first="if (__builtin_ia32_rdtsc() == 0) y[0] = 1;"),
    "its own code": kernel(
        before=SYSTEM + "void f(const float *, const float *, float *, long, long, long);",
        first="call(10, (long)f & -4096, 8192, 7, 0, 0, 0);",
    ),
    "a handler for signals": kernel(
        before=SYSTEM, first="long act[4] = {1, 0, 0, 0}; call(13, 20, (long)act, 0, 8, 0, 0);"
    ),
    "the way to the bench, looked at": kernel(
        before=SYSTEM, first="char b[16]; for (long i = 0; i < 64; i++) call(45, i, (long)b, 16, 0x42, 0, 0);"
    ),
}


@row("finds expected outputs")
@pytest.mark.parametrize("what", HARMLESS)
def test_what_native_code_may_do_is_no_fraud_and_no_gain(judge: Judge, what: str) -> None:
    report = judge(HARMLESS[what], CALL)
    assert is_replayed(report.verdict), report.verdict
    assert report.timing is not None


# ---- state that nobody puts back -------------------------------------------------------------------------------------

PHASES = {
    "memory of its own": kernel(before=KEPT, first=f"if (++*kept() > 12) {WRONG}"),
    "libc's random numbers": kernel(
        before="#include <stdlib.h>", first=f"for (long i = 0; i < 1; i++) if (rand() == 1102520059) {WRONG}"
    ),
    "fresh memory is poisoned no more": kernel(
        before="#include <stdlib.h>\n" + KEPT,
        first="int *fresh = malloc(4096); long is_poisoned = fresh[99] == 0x7F7F7F7F; free(fresh);\n"
        f"if (is_poisoned) *kept() = 1; else if (*kept()) {WRONG}",
    ),
    "an input that was here before": kernel(
        before=KEPT, first=f"long *seen = kept(); long s = ((long)x >> 6) % 500; if (++seen[s] > 6) {WRONG}"
    ),
}


@row("phase sniffing")
@pytest.mark.parametrize("what", PHASES)
def test_native_code_that_knows_when_it_is_timed_has_to_be_right_then_too(judge: Judge, what: str) -> None:
    assert caught(judge(PHASES[what], CALL).verdict, "wrong_when_timed")


@row("phase sniffing")
def test_unless_timed_outputs_are_not_compared(judge: Judge, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Stopwatch, "compare_outputs", nothing)
    assert is_replayed(judge(PHASES["memory of its own"], CALL).verdict)


# ---- at the end of the process, and of the judge ---------------------------------------------------------------------

HIDDEN = (
    SYSTEM
    + """
#include <string.h>
extern const char __ehdr_start __attribute__((visibility("hidden")));
__attribute__((constructor)) static void hide(void) {
  char *page = (char *)call(9, 0, 4096, 3, 0x22, -1, 0);
  memcpy(page, &__ehdr_start, 4096);
  call(25, (long)page, 4096, 4096, 3, (long)&__ehdr_start, 0);
}
"""
)
"""Its first page becomes nobody's file, with the same content."""


@row("forges the verdict")
def test_who_hides_its_memory_from_the_bench_does_not_end_the_bench(judge: Judge, monkeypatch: Patch) -> None:
    verdict = judge(kernel(before=HIDDEN), CALL).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED)
    assert "not where it was loaded" in verdict.trust_reason
    monkeypatch.setattr(replay.CpuReplaySession, "guarded", lambda self, look: look())
    with pytest.raises(InfraError, match="not where it was loaded"):
        judge(kernel(before=HIDDEN), CALL)


ENDS = {
    "exits": ("call(231, 0, 0, 0, 0, 0, 0);", Fault.RUNTIME_ERROR),
    "crashes": ("*(volatile int *)8 = 1;", Fault.ILLEGAL_ACCESS),
    "never ends": ("for (volatile long i = 0;; i++);", Fault.TIMEOUT),
    "uses up the stack": (
        "volatile char much[1 << 26]; for (long i = 0; i < 1 << 26; i += 4096) much[i] = 1;",
        Fault.ILLEGAL_ACCESS,
    ),
    "shuts the way to the bench": ("for (long i = 3; i < 64; i++) call(48, i, 2, 0, 0, 0, 0);", Fault.RUNTIME_ERROR),
    "says something else there": ('for (long i = 3; i < 64; i++) call(44, i, (long)"ok", 2, 0, 0, 0);', Fault.CHEATING),
}


@row("forges the verdict")
@pytest.mark.parametrize("how", ENDS)
def test_a_replayer_that_ends_when_it_is_timed_is_a_fault_of_the_candidates(judge: Judge, how: str) -> None:
    what, fault = ENDS[how]
    verdict = judge(kernel(before=KEPT, first=f"if (++*kept() > 12) {{ {what} }}"), CALL).verdict
    assert verdict.fault is fault, verdict
    assert is_replayed(judge(kernel(), CALL).verdict), "the next one is judged as ever"


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 400, b"#!/bin/sh\n" * 99])
def test_what_is_no_shared_object_is_not_replayed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    path.write_bytes(content)
    assert statics.refusal({"key": path})


# ---- Python, from C --------------------------------------------------------------------------------------------------

PYTHON = """
extern int PyGILState_Ensure(void); extern void PyGILState_Release(int); extern int PyRun_SimpleString(const char *);
static void python(const char *text) { int s = PyGILState_Ensure(); PyRun_SimpleString(text); PyGILState_Release(s); }
"""
HIDES = (
    "import sys\\nm = sys.modules['kbrl_async.kernels.verify.cpu.replayer']\\n"
    "t = m.Replayer\\n"
    "t.mine = getattr(t, 'mine', t._traced)\\n"
    "none = (m.torch.zeros(24, 64), {}), m.wire.Trace()\\n"
    "t._traced = lambda self, slot, muted, none=none, t=t: none if muted else t.mine(self, slot, muted)\\n"
)


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_decoy_that_spoils_its_replayer_is_still_one(judge: Judge, monkeypatch: Patch) -> None:
    """Without its kernels, so that they are not needed, means: in a process in which they never were."""
    decoy = PYTHON + f'void f(float *y) {{ python("{HIDES}"); }}'
    forward = "y = x @ self.weight\nself.f(y)\nreturn y"
    assert caught(judge(decoy, forward).verdict, "decoy_kernel")
    monkeypatch.setattr(replay.CpuReplaySession, "muted", lambda self: self)
    assert is_replayed(judge(decoy, forward).verdict)


def test_work_after_the_answer_is_time() -> None:
    """Who answers first and computes then, before it stands still, is right and seems to need no time."""
    early = ForwardOutcome(60_000, 0, 0, ["L", []], [], None, 420_000)
    late = ForwardOutcome(450_000, 0, 0, ["L", []], [], None, 300_000)
    assert [net_ns(call, 50_000.0, 20_000.0) for call in (early, late)] == [400_000, 400_000]


@row("impossible speed")
def test_a_speed_holds_in_bursts_too(judge: Judge, monkeypatch: Patch) -> None:
    """A replayer that its own kernel has taken over answers with less to do; many forwards in one order do not."""
    monkeypatch.setattr(bursts, "most", lambda *given: 0.01)
    timing = judge(kernel(), CALL).timing
    assert timing is not None
    assert timing.lo <= 0.01 * (1 + timing.resolution)


def test_what_native_code_could_have_spared_is_held_against_it(judge: Judge, monkeypatch: Patch) -> None:
    found: list[float] = []
    most = bursts.most
    monkeypatch.setattr(bursts, "one_round", lambda *given: (10_000_000, 1_000_000))
    monkeypatch.setattr(bursts, "forwards", lambda *given: 8)

    def told(*given: object) -> float:
        found.append(most(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(bursts, "most", told)
    judge(kernel(), CALL)
    assert 1 < found[0] < 10, "ten times as fast, less what an honest one would have needed besides"


def test_who_is_wrong_in_a_burst_is_called_no_faster(judge: Judge, monkeypatch: Patch) -> None:
    """In the last forward of eight: what it leaves in a buffer is put back between two orders, not within one, and to
    what two recordings have made of it."""
    found: list[float] = []
    most = bursts.most

    def told(*given: object) -> float:
        found.append(most(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(bursts, "most", told)
    monkeypatch.setattr(bursts, "forwards", lambda *given: 8)
    source = kernel(first=f"if (++b[0] > 9) {WRONG}").replace("float *y, long n,", "float *y, float *b, long n,")
    call = CALL.replace("self.weight, y,", "self.weight, y, self.b,")
    assert is_replayed(judge(source, call, "self.b = torch.zeros(1)").verdict)
    assert set(found) == {1.0}


@row("forges the verdict")
def test_who_answers_a_burst_in_part_has_forged_its_answer(judge: Judge, monkeypatch: Patch) -> None:
    call = replay.CpuReplaySession.call

    def fewer(self: replay.CpuReplaySession, op: int, *given: object) -> ForwardOutcome:
        outcome = call(self, op, *given)  # type: ignore[arg-type]
        is_its_own = op == wire.OP_BURST and self._muted is not None
        return msgspec.structs.replace(outcome, tensors=outcome.tensors[:-1]) if is_its_own else outcome

    monkeypatch.setattr(bursts, "forwards", lambda *given: 2)
    monkeypatch.setattr(replay.CpuReplaySession, "call", fewer)
    assert caught(judge(kernel(), CALL).verdict, "forged_result")


# ---- forged tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32", "bits8", "int4", "nonsense", "float33", ""])
def test_types_that_torch_itself_dies_of_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="no dtype"):
        values.view(bytearray(64), wire.TensorMeta(name, (4,), (1,), 0))


def test_who_returns_one_of_those_types_is_told_so_and_not_accused(evaluate: Callable[..., BenchReport]) -> None:
    source = """
import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()

    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
"""
    verdict = evaluate(source).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR, verdict
    assert "a tensor of qint8" in verdict.message


def test_a_tensor_takes_as_much_memory_as_it_spans() -> None:
    found = values.view(bytearray(64), wire.TensorMeta("float32", (1 << 40,), (0,), 4))
    assert found.stride() == (0,)
    with pytest.raises(ValueError, match="buffer"):
        values.view(bytearray(64), wire.TensorMeta("float32", (2, 2), (16, 1), 0))


# ---- observed: in Python, when it is timed ---------------------------------------------------------------------------

TURNED = LINEAR.replace("return x @ self.weight", "return x.transpose(0, 1).contiguous()")
TURN = """void f(const float *x, float *y, long n, long m) {
  for (long i = 0; i < n; i++) for (long j = 0; j < m; j++) y[j * n + i] = x[i * m + j];
}"""
VIEW = "if self.calls > 12:\n    return x.transpose(0, 1)\ny = torch.empty(64, 24)\nself.f(x, y, 24, 64)\nreturn y"
TANH = """#include <math.h>
void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = tanhf(x[i]); }
"""
IN_TURN = """if self.calls > 12:
    y = self.kept[self.calls % 2]
else:
    y = torch.empty_like(x)
self.f(x, y, x.numel())
return y
"""
OBSERVED_ONLY = {
    "an input's view": (TURN, VIEW, TURNED, "output_alias", ("_LOOKED_AT", 1.0, 0.0)),
    "two buffers in turn": (
        TANH,
        IN_TURN,
        LINEAR.replace("x @ self.weight", "torch.tanh(x)"),
        "output_overwritten",
        ("_HELD", 2, 1),
    ),
}


@row("mutates inputs")
@pytest.mark.parametrize("way", OBSERVED_ONLY)
def test_memory_that_is_saved_only_when_timed_is_seen(
    judge: Judge, watched: object, monkeypatch: Patch, way: str
) -> None:
    source, forward, problem, rule, (name, some, none) = OBSERVED_ONLY[way]
    init = "self.kept = [torch.empty(24, 64) for _ in range(2)]"
    monkeypatch.setattr(stopwatch, name, some)
    verdict = judge(source, forward, init, problem, on=watched).verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.INCORRECT, rule, OBSERVED), verdict
    monkeypatch.setattr(stopwatch, name, none)
    assert judge(source, forward, init, problem, on=watched).verdict.rule != rule
