"""What a candidate in C can do where a replay of its recorded work is judged: its Python never runs there.

As in the other files: an attack, and the same attack with exactly its defence gone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.verify import Bench, reference
from kbrl_async.kernels.verify.cpu import own_kernels, replay, stopwatch
from kbrl_async.kernels.verify.cpu.statics import Statics
from protocols.records import OBSERVED, Candidate, Fault, Problem, Timing, Verdict
from tests.unit.kernels.verify.catalogue.exploits import (
    CALL,
    LINEAR,
    MODEL,
    PROBLEM,
    Judge,
    Patch,
    Run,
    candidate,
    caught,
    is_replayed,
    kernel,
    nothing,
    row,
)


def test_an_honest_candidate_is_replayed_and_timed(judge: Judge) -> None:
    report = judge(kernel(), CALL)
    assert is_replayed(report.verdict), report.verdict
    assert report.timing is not None
    assert "replayed" in report.timing.method
    assert "f ×1" in report.verdict.evidence


# ---- what honest candidates keep -------------------------------------------------------------------------------------

KEPT = {
    "weights turned round in the constructor": (
        "self.t = None",
        "",
        "t = self.weight.t().contiguous().t().contiguous()\n",
    ),
    "weights prepared by the first call": (
        "self.t = None",
        "",
        "if self.t is None:\n    self.t = self.weight.clone()\n",
    ),
    "a scratch buffer": ("self.b = torch.zeros(24, 64)", "", "self.b.copy_(x)\nx = self.b\n"),
}


@pytest.mark.parametrize("way", KEPT)
def test_what_lasts_from_call_to_call_is_replayed_with_it(judge: Judge, way: str) -> None:
    init, _, before = KEPT[way]
    assert is_replayed(judge(kernel(), before + CALL, init).verdict)


def test_what_a_kernel_writes_to_a_kept_buffer_is_put_back_before_each_call(judge: Judge, monkeypatch: Patch) -> None:
    counts = kernel(before="static void skip(float *y) { y[0] = 1; }", first="if (++b[0] > 14) { skip(y); return; }")
    source, init = counts.replace("float *y, long n,", "float *y, float *b, long n,"), "self.b = torch.zeros(1)"
    call = CALL.replace("self.weight, y,", "self.weight, y, self.b,")
    assert is_replayed(judge(source, call, init).verdict)
    monkeypatch.setattr(replay.CpuReplaySession, "put_back", nothing)
    assert judge(source, call, init).verdict.rule == "wrong_when_timed"


def test_memory_that_a_kernel_says_it_only_reads_can_not_be_written_to(judge: Judge) -> None:
    verdict = judge(kernel(first="((float *)w)[0] += 0;"), CALL).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED)
    assert "illegal_access" in verdict.trust_reason


# ---- phases, caches, switches ----------------------------------------------------------------------------------------

PHASES = {
    "nothing is computed when timed": "if self.calls > 12:\n    return y\n",
    "an earlier result when timed": "if self.calls > 12:\n    return self.kept.clone()\nself.kept = y\n",
    "other code when checked": "if self.calls > 12:\n    return x @ self.weight\n",
    "in place when timed": "if self.calls > 12:\n    return x.copy_(x @ self.weight)\n",
    "a cache by content": (
        "key = float(x.data.numpy()[0, 0])\nif key in self.cache:\n    return self.cache[key].clone()\n"
    ),
}


@row("phase sniffing")
@pytest.mark.parametrize("way", PHASES)
def test_pythons_own_phases_are_none_in_a_replay(judge: Judge, way: str) -> None:
    """What is judged and timed is what was recorded, every time: so it passes, and is paid for that work alone."""
    report = judge(kernel(), PHASES[way] + CALL, "self.cache, self.kept = {}, None")
    assert is_replayed(report.verdict), report.verdict


@row("phase sniffing")
def test_static_memory_is_put_back_before_each_call(judge: Judge, monkeypatch: Patch) -> None:
    source = kernel(
        before="static int calls; static float junk = 1;", first="if (++calls > 14) { y[0] = junk; return; }"
    )
    assert is_replayed(judge(source, CALL).verdict)
    monkeypatch.setattr(Statics, "restore", nothing)
    assert judge(source, CALL).verdict.rule == "wrong_when_timed"


def test_memory_of_a_thread_is_not_replayed(judge: Judge) -> None:
    source = kernel(before="static _Thread_local int calls;", first="calls++;")
    verdict = judge(source, CALL).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED)
    assert "thread" in verdict.trust_reason


# ---- the recording lies, or says too little --------------------------------------------------------------------------

UNSAID = {
    "a value is read back": ("s = float(x.sum()) * 0\n" + CALL, "reads a value back"),
    "steps that follow the values": (
        "y.fill_(float(x.data.numpy()[0, 0]))\n" + CALL,
        "does not do the same steps",
    ),
    "steps that follow the calls": (
        "y.fill_(self.calls)\n" + CALL,
        "does not do the same steps",
    ),
    "chance": ("torch.rand(1)\n" + CALL, "aten::rand"),
}


@pytest.mark.parametrize("way", UNSAID)
def test_what_is_not_recorded_is_observed_with_the_reason(judge: Judge, way: str) -> None:
    forward, reason = UNSAID[way]
    verdict = judge(kernel(), forward).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED), verdict
    assert reason in verdict.trust_reason


LIAR = """
from kbrl_async.kernels.verify.cpu import tape
import msgspec
honest = tape.Tape.program
def lie(self, result):
    found = honest(self, result)
    steps = [step for step in found.steps if type(step).__name__ != 'Call']
    return msgspec.structs.replace(found, steps=CHANGED)
tape.Tape.program = lie
"""


def test_a_recording_without_the_work_gives_no_answer(judge: Judge) -> None:
    """It lies about itself: then its own process is watched, as before, and its verdict says so."""
    verdict = judge(kernel(), CALL, LIAR.replace("CHANGED", "steps")).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED)
    assert "other results" in verdict.trust_reason


def test_a_recording_of_what_may_not_be_done_is_forged(judge: Judge) -> None:
    read = "from kbrl_async.kernels.verify.cpu import program\n"
    lie = LIAR.replace(
        "CHANGED", "[msgspec.structs.replace(s, name='f()') if type(s).__name__ == 'Call' else s for s in found.steps]"
    )
    verdict = judge(kernel(), CALL, lie + read + "program.read = lambda *given: None").verdict
    assert caught(verdict, "forged_result"), verdict


# ---- work that is not its own ----------------------------------------------------------------------------------------

ATTENTION = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()

    def forward(self, q, k, v):
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

def get_inputs():
    return [torch.randn(2, 4, 16, 8) for _ in range(3)]

def get_init_inputs():
    return [64]
"""
LAYOUT = """
void f(const float *x, float *y, long b, long h, long s, long d) {
  for (long i = 0; i < b; i++) for (long j = 0; j < h; j++) for (long k = 0; k < s; k++) for (long l = 0; l < d; l++)
    y[((i * s + k) * h + j) * d + l] = x[((i * h + j) * s + k) * d + l];
}
"""


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_kernel_that_only_turns_the_librarys_answer_round_is_a_decoy(
    replaying: Bench, compile_raw: Callable[[str], dict[str, Path]], monkeypatch: Patch
) -> None:
    forward = (
        "a = nn.functional.scaled_dot_product_attention(q, k, v).contiguous()\n"
        "y = torch.empty(2, 16, 32)\nself.f(a, y, 2, 4, 16, 8)\nreturn y"
    )
    source = MODEL.format(source=LAYOUT, init="        pass", forward=textwrap.indent(forward, " " * 8))
    source = source.replace("forward(self, x)", "forward(self, q, k, v)")
    source = source.replace("        y = torch.empty(x.shape[0], self.weight.shape[1])\n", "")
    problem = Problem("L3/04_attention", 3, "attention", ATTENTION)

    def judged() -> Verdict:
        return replaying.evaluate(problem, Candidate(source, "c"), compile_raw(LAYOUT)).verdict

    assert caught(judged(), "decoy_kernel")
    monkeypatch.setattr(
        own_kernels, "is_answer", lambda item, wanted: item.shape == wanted.shape and torch.equal(item, wanted)
    )
    assert is_replayed(judged())


TURN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()

    def forward(self, x):
        return x.permute(0, 2, 1).contiguous()

def get_inputs():
    return [torch.randn(8, 12, 10)]

def get_init_inputs():
    return [64]
"""
COPY = "void f(const float *x, float *y, long b, long h, long w) { for (long i = 0; i < b * h * w; i++) y[i] = x[i]; }"
TURNS = """
void f(const float *x, float *y, long b, long h, long w) {
  for (long i = 0; i < b; i++) for (long j = 0; j < h; j++) for (long k = 0; k < w; k++)
    y[(i * w + k) * h + j] = x[(i * h + j) * w + k];
}
"""


@row("wraps the library, try/except fallback, decoy kernel")
def test_where_nothing_but_movement_is_asked_for_a_copy_of_the_librarys_is_a_decoy(
    replaying: Bench, compile_raw: Callable[[str], dict[str, Path]], monkeypatch: Patch
) -> None:
    def judged(kernel: str, given: str) -> Verdict:
        forward = f"a = {given}\ny = torch.empty(8, 10, 12)\nself.f(a, y, 8, 12, 10)\nreturn y"
        source = MODEL.format(source=kernel, init="        pass", forward=textwrap.indent(forward, " " * 8))
        source = source.replace("        y = torch.empty(x.shape[0], self.weight.shape[1])\n", "")
        problem = Problem("L1/05_turn", 1, "turn", TURN)
        return replaying.evaluate(problem, Candidate(source, "c"), compile_raw(kernel)).verdict

    assert caught(judged(COPY, "x.permute(0, 2, 1).contiguous()"), "decoy_kernel")
    assert is_replayed(judged(TURNS, "x.clone()")), "a copy of the input is no answer"
    monkeypatch.setattr(own_kernels, "is_moved", lambda item, wanted, inputs: False)
    assert is_replayed(judged(COPY, "x.permute(0, 2, 1).contiguous()"))


JOIN = (
    "void f(const float *a, const float *b, float *y, long n) {"
    " for (long i = 0; i < n; i++) { y[i] = a[i]; y[n + i] = b[i]; } }"
)
HALVES = "a = x[:12] @ self.weight\nb = x[12:] @ self.weight\nself.f(a, b, y, 768)\nreturn y"
OTHER_HALF = (
    "void f(const float *x, const float *w, const float *a, float *y, long n, long k) {"
    " for (long i = 0; i < n * k; i++) y[i] = a[i];"
    " for (long i = n; i < 2 * n; i++) for (long j = 0; j < k; j++) {"
    " float s = 0; for (long l = 0; l < k; l++) s += x[i * k + l] * w[l * k + j]; y[i * k + j] = s; } }"
)
ITS_HALF = "a = x[:12] @ self.weight\nself.f(x, self.weight, a, y, 12, 64)\nreturn y"


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_kernel_that_only_joins_the_librarys_halves_is_a_decoy_and_one_that_makes_a_half_is_none(
    judge: Judge, monkeypatch: Patch
) -> None:
    assert caught(judge(JOIN, HALVES).verdict, "decoy_kernel")
    assert is_replayed(judge(OTHER_HALF, ITS_HALF).verdict)
    for asked in ("are_answer", "have_nearly_all"):
        monkeypatch.setattr(own_kernels, asked, lambda items, wanted: False)
    assert is_replayed(judge(JOIN, HALVES).verdict)


LOSS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, y):
        return nn.functional.mse_loss(x, y)

def get_inputs():
    return [torch.randn(64, 32), torch.randn(64, 32)]

def get_init_inputs():
    return []
"""
ONE = "void f(const float *x, float *y) { y[0] = x[0]; }"
SQUARES = "void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i] * x[i]; }"
OF_LOSS = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = c_kernel({source!r}, "f")

    def forward(self, x, y):
        {body}
"""


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_kernel_that_only_copies_a_loss_is_a_decoy_and_one_that_makes_its_parts_is_none(
    replaying: Bench, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    def judged(source: str, body: str) -> Verdict:
        text = OF_LOSS.format(source=source, body="\n        ".join(body.splitlines()))
        return replaying.evaluate(Problem("L1/94", 1, "mse", LOSS), Candidate(text, "c"), compile_raw(source)).verdict

    copied = "a = nn.functional.mse_loss(x, y)\nb = torch.empty_like(a)\nself.f(a, b)\nreturn b"
    assert caught(judged(ONE, copied), "decoy_kernel")
    parts = "d = x - y\ns = torch.empty_like(d)\nself.f(d, s, d.numel())\nreturn s.mean()"
    assert is_replayed(judged(SQUARES, parts))


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_library_call_is_in_the_recording_whatever_python_does_when_kernels_are_off(
    run: Run, replaying: Bench
) -> None:
    sniffs = (
        "from kbrl_async.kernels.backends.launch.recorder import RECORDER\n"
        "y = torch.softmax(x * self.gain, -1)\nself.touch(y, 1)\nreturn y * 0 if RECORDER.is_muted else y"
    )
    assert caught(run(candidate(sniffs), on=replaying).verdict, "decoy_kernel")
    assert run(candidate("return torch.softmax(x * self.gain, -1)"), on=replaying).verdict.rule == "no_own_kernel"


# ---- what one child leaves another -----------------------------------------------------------------------------------

MARK = "import os\nfor fd in range(3, 40):\n    try:\n        os.lseek(fd, 4242, 0)\n    except OSError:\n        pass"
LOOK = (
    "import os\nfor fd in range(3, 40):\n    try:\n        here = os.lseek(fd, 0, 1)\n"
    "    except OSError:\n        here = 0\n    assert here != 4242, 'a word from before'"
)


def test_no_child_finds_a_word_of_another_in_the_weights_file(judge: Judge, monkeypatch: Patch) -> None:
    import os

    judge(kernel(), CALL, MARK)
    assert judge(kernel(), CALL, LOOK).verdict.fault is Fault.OK
    monkeypatch.setattr(reference, "copied", os.dup)
    judge(kernel(), CALL, MARK)
    assert "a word from before" in judge(kernel(), CALL, LOOK).verdict.message


# ---- what stays observed ---------------------------------------------------------------------------------------------


SQUARE = LINEAR.replace("x @ self.weight", "torch.tanh(x)")
TANH = """
#include <math.h>
void f(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = tanhf(x[i]); }
"""

IN_PLACE = (
    "if self.calls > 12:\n    self.f(x, x, x.numel())\n    return x\n"
    "y = torch.empty_like(x)\nself.f(x, y, x.numel())\nreturn y"
)
ONE_BUFFER = (
    "if self.calls > 12:\n    y = self.buffer\nelse:\n    y = torch.empty_like(x)\nself.f(x, y, x.numel())\nreturn y"
)


@row("mutates inputs")
@pytest.mark.parametrize(
    ("forward", "rule"), [(IN_PLACE, "input_mutation"), (ONE_BUFFER, "output_overwritten")], ids=["input", "one buffer"]
)
def test_in_place_only_when_timed_is_seen(
    judge: Judge, watched: Bench, monkeypatch: Patch, forward: str, rule: str
) -> None:
    init = "self.buffer = torch.empty(24, 64)"
    assert judge(TANH, forward, init, SQUARE, on=watched).verdict.rule == rule
    assert is_replayed(judge(TANH, forward, init, SQUARE).verdict), "in a replay it is never done"
    monkeypatch.setattr(stopwatch.Stopwatch, "refuse_in_place", nothing)
    assert judge(TANH, forward, init, SQUARE, on=watched).verdict.fault is Fault.OK


def test_an_observed_speed_holds_even_if_its_process_answers_in_no_time(
    judge: Judge, watched: Bench, monkeypatch: Patch
) -> None:
    """A runner with less to do between message and forward looked up to 2.4 times as fast on short kernels."""
    seen = []
    honest = stopwatch.Stopwatch.held_against_it

    def told(self: stopwatch.Stopwatch, measured: object) -> object:
        seen.append((measured, self.empty))
        return honest(self, measured)  # type: ignore[arg-type]

    monkeypatch.setattr(stopwatch.Stopwatch, "held_against_it", told)
    timing = judge(kernel(), CALL, on=watched).timing
    ((measured, empty),) = seen
    assert timing is not None
    assert timing.lo == pytest.approx(measured.interval.lo / (1 + empty / (timing.candidate_ms * 1e6)))
    monkeypatch.setattr(stopwatch.bursts, "most", lambda *_: float("inf"))
    timing = judge(kernel(), CALL).timing
    assert timing is not None
    assert timing.lo == seen[-1][0].interval.lo, "a replay has the reference's own runner"


def test_a_time_of_what_was_only_watched_is_none_of_an_equal_source_that_is_replayed(
    replaying: Bench, compile_raw: Callable[[str], dict[str, Path]], monkeypatch: Patch
) -> None:
    """By chance it is the one or the other: a time that its own process forged would be paid as a replayed one."""
    measured = iter(range(2, 100))

    def measure(*given: object) -> Timing:
        speedup = float(next(measured))
        return Timing(8, speedup, 0.9 * speedup, 1.1 * speedup, 1.0, 1.0, spent_s=0.1)

    monkeypatch.setattr(Bench, "measure", measure)
    source = MODEL.format(
        source=kernel(),
        init="        import os\n        self.odd = os.urandom(1)[0] % 2",
        forward=textwrap.indent("if self.odd:\n    float(x.sum())\n" + CALL, " " * 8),
    )
    posed, paths = Problem("L1/04_replayed", 1, "replayed", LINEAR), compile_raw(kernel())
    seen: dict[str, set[float]] = {}
    reports = 0
    while reports < 6 or (len(seen) < 2 and reports < 40):
        found = replaying.evaluate(posed, Candidate(source, "c"), paths, group="a group")
        assert found.timing is not None, found.verdict
        seen.setdefault(found.verdict.trust, set()).add(found.timing.speedup)
        reports += 1
    assert len(seen) == 2
    assert not set.intersection(*seen.values())


def test_the_reference_goes_by_the_same_door(judge: Judge) -> None:
    """One that can't be replayed is no measure for a replay: then both are observed."""
    source = LINEAR.replace("return x @ self.weight", "return x @ self.weight + 0 * float(x.sum())")
    verdict = judge(kernel(), CALL, problem=source).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED)
    assert "the reference can't be replayed" in verdict.trust_reason


def test_problems_of_the_catalogue_are_replayed_too(run: Run, replaying: Bench) -> None:
    assert is_replayed(run(candidate(), PROBLEM, on=replaying).verdict)
