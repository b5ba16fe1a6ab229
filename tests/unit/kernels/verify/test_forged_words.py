"""White-box attackers: they know the wire, have the nonce, and answer in their runner's place. None gets a verdict of
its own making, ends the judge, or has its trouble blamed on the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels.sandbox import Zygote
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import Bench, bench_options, replies
from kbrl_async.kernels.verify import session as sessions
from kbrl_async.kernels.verify.cpu import own_kernels
from protocols.records import BenchReport, Candidate, Fault, Problem, Verdict
from tests.unit.kernels.verify.conftest import SCALE_AND_SHIFT
from tests.unit.kernels.verify.hostile import candidate

Evaluate = Callable[..., BenchReport]
HONEST = "return self.done(nonce)"


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(evaluate: Evaluate, watching: Bench) -> Iterator[None]:
    """The reference was not doubted, and judges the next one."""
    assert evaluate(candidate(HONEST, call=-1)).verdict.fault is Fault.OK
    reference = watching.references.kept[SCALE_AND_SHIFT]
    yield
    assert watching.references.kept[SCALE_AND_SHIFT] is reference
    assert evaluate(candidate(HONEST, call=-1)).verdict.fault is Fault.OK


def is_forged(verdict: Verdict) -> bool:
    return (verdict.fault, verdict.rule) == (Fault.CHEATING, "forged_result")


def test_the_loop_without_an_attack_is_right(evaluate: Evaluate) -> None:
    """A process that answers rightly in another way is right, and what the others meet is what is said of them."""
    verdict = evaluate(candidate(HONEST)).verdict
    assert (verdict.fault, verdict.passed, verdict.total) == (Fault.OK, 10, 10)


@pytest.mark.parametrize(
    "kind", ["ok", "infra_error", "worker_lost", "stale", "incorrect", "compile_error", "cheating", "", "OK", "timeout"]
)
@pytest.mark.parametrize("call", [1, 3])
def test_no_child_chooses_its_verdict(evaluate: Evaluate, kind: str, call: int) -> None:
    answer = f"return encode(dict(type='failed', kind={kind!r}, text='10 of 10 passed'))"
    assert is_forged(evaluate(candidate(answer, call)).verdict)


def test_nor_before_its_model_is_made(evaluate: Evaluate) -> None:
    top = """
import os, msgspec
for fd in range(3, 30):
    try:
        os.write(fd, msgspec.msgpack.encode(dict(type="failed", kind="ok", text="")))
    except OSError:
        pass
"""
    assert is_forged(evaluate(top + candidate(HONEST, call=-1)).verdict)


WORDS = {
    "no message": "self.channel.send(b'')\ntime.sleep(60)",
    "noise": "return os.urandom(300)",
    "another type": "return encode(dict(type='verdict', fault='ok', passed=10, total=10))",
    "no map": "return encode([nonce])",
    "a type that is a number": "return encode(dict(type=1))",
    "a deep list": "return self.raw_done(nonce, b'\\x91' * 100_000 + b'\\x90')",
    "a deep map": "return self.raw_done(nonce, b'\\x81\\xa1a' * 50_000 + b'\\x90')",
    "a list as deep as decoders go": "return self.raw_done(nonce, b'\\x91' * 500 + b'\\x90')",
    "deep where nobody looks": "return b'\\x83' + b''.join(map(encode, ('type', 'ready', 'x'))) + b'\\x91' * 90_000",
    "text that is no UTF-8": "return self.raw_done(nonce, b'\\xa2\\xff\\xfe')",
    "a list of four billion": "return self.raw_done(nonce, b'\\xdd\\xff\\xff\\xff\\xff')",
    "an extension type": "return self.raw_done(nonce, b'\\xd4\\x05\\x01')",
    "a date": "return self.raw_done(nonce, b'\\xd6\\xff\\x00\\x00\\x00\\x01')",
    "a list as key": "return self.raw_done(nonce, b'\\x92\\xa1D\\x81\\x91\\x01\\x90')",
    "a number for a tree": "return self.done(nonce, 7)",
    "a tree of one": "return self.done(nonce, ['T'])",
    "a tree of three": "return self.done(nonce, ['T', 0, 0])",
    "an unknown node": "return self.done(nonce, ['Z', 0])",
    "a negative index": "return self.done(nonce, ['T', -1])",
    "an index too far": "return self.done(nonce, ['T', 1])",
    "a huge index": "return self.done(nonce, ['T', (1 << 64) - 1])",
    "an index that is true": "return self.done(nonce, ['T', False])",
    "one tensor twice": "return self.done(nonce, ['U', [['T', 0], ['T', 0]]])",
    "a list that is text": "return self.done(nonce, ['L', 'TT'])",
    "no dtype": "return self.done(nonce, ['U', [['T', 0], ['Y', 'nn']]])",
    "the tree but no tensor": "return self.done(nonce, tensors=[])",
    "the tree and two tensors": "return self.done(nonce, tensors=[self.meta(), self.meta()])",
    "a dtype that is a module": "return self.done(nonce, tensors=[self.meta(dtype='nn')])",
    "a dtype that is none": "return self.done(nonce, tensors=[self.meta(dtype='float33')])",
    "a negative size": "return self.done(nonce, tensors=[self.meta(shape=[-16, -33])])",
    "a size beyond 63 bits": "return self.done(nonce, tensors=[self.meta(shape=[1 << 63, 33])])",
    "sizes that overflow together": "return self.done(nonce, tensors=[self.meta(shape=[1 << 40, 1 << 40])])",
    "too few strides": "return self.done(nonce, tensors=[self.meta(strides=[1])])",
    "negative strides": "return self.done(nonce, tensors=[self.meta(strides=[-33, -1])])",
    "strides that overflow": "return self.done(nonce, tensors=[self.meta(strides=[1 << 62, 1])])",
    "a negative place": "return self.done(nonce, tensors=[self.meta(place=-4096)])",
    "a place that is a fraction": "return self.done(nonce, tensors=[self.meta(place=0.5)])",
    "thousands of dimensions": "return self.done(nonce, tensors=[self.meta(shape=[1] * 5000, strides=[1] * 5000)])",
    "another nonce": "return self.done(nonce ^ 1)",
    "a nonce that is true": "return self.done(True)",
    "an answer to another question": "return encode(dict(type='ready'))",
    "an answer of a GPU's": "return encode(dict(type='timed', nonce=nonce, elapsed_ns=float('nan')))",
    "kernels of a GPU's": "return encode(dict(type='captured', nonce=nonce, kernels={'_Z' + '1' * 4400: 1}))",
    "two answers": "self.channel.send(self.done(nonce))\nreturn self.done(nonce)",
    "a trace that nobody asked for": "return self.done(nonce, trace=dict())",
    "an answer that is right as far as it is read": """
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        words = len(self.done(nonce, more=bytes(1 << 17))) - (1 << 17)
        return self.done(nonce, more=bytes((1 << 20) - words)) + b"x"
    """,
    "the way shut": "self.channel.shutdown(socket.SHUT_RDWR)\ntime.sleep(60)",
    "the way shut for reading, an answer sent": """
        self.channel.shutdown(socket.SHUT_RD)
        self.channel.send(self.done(nonce))
        time.sleep(60)
    """,
    "the way closed": "os.close(self.channel.detach())\ntime.sleep(60)",
}


@pytest.mark.parametrize("name", WORDS)
def test_forged_words_are_forged(evaluate: Evaluate, name: str) -> None:
    assert is_forged(evaluate(candidate(WORDS[name])).verdict)


@pytest.mark.parametrize(
    ("answer", "fault", "rule"),
    [
        ("return self.done(nonce, tensors=[self.meta(place=(1 << 64) - 8)])", Fault.ILLEGAL_ACCESS, "output"),
        ("return self.done(nonce, tensors=[self.meta(place=0)])", Fault.ILLEGAL_ACCESS, "output"),
        ("return self.done(nonce, ['V', '9' * 4400], [])", Fault.INCORRECT, "structure"),
        ("return self.done(nonce, ['D', {'a': ['T', 0]}])", Fault.INCORRECT, "structure"),
        ("return self.done(nonce, ['V', None], [])", Fault.INCORRECT, "structure"),
        ("return self.done(nonce, tensors=[self.meta(dtype='complex128')])", Fault.INCORRECT, "dtype"),
        ("return self.done(nonce, tensors=[self.meta(shape=[0, 33])])", Fault.INCORRECT, "shape"),
        ("return self.done(nonce, tensors=[self.meta(kind='T' * 9999)])", Fault.CHEATING, "tensor_subclass"),
        ("os._exit(0)", Fault.RUNTIME_ERROR, ""),
        ("self.channel.shutdown(socket.SHUT_RDWR)\nos._exit(0)", Fault.RUNTIME_ERROR, ""),
        ("import ctypes\nctypes.string_at(0)", Fault.ILLEGAL_ACCESS, ""),
        ("return encode(dict(type='failed', kind='illegal_access', text='\\x00' * 9))", Fault.ILLEGAL_ACCESS, ""),
    ],
)
def test_what_is_wrong_or_dies_is_no_forgery(evaluate: Evaluate, answer: str, fault: Fault, rule: str) -> None:
    verdict = evaluate(candidate(answer)).verdict
    assert (verdict.fault, verdict.rule) == (fault, rule)


ELSEWHERE = "\nreturn self.done(nonce, trace=dict() if op in (TRACE, MUTED) else None)"


@pytest.mark.parametrize(
    "what",
    ["self.channel.shutdown(socket.SHUT_RDWR); time.sleep(60)", "return self.done(nonce, ['T', 9])", "return b'x'"],
)
def test_words_in_a_timed_call_are_not_the_references(evaluate: Evaluate, what: str) -> None:
    report = evaluate(candidate(f"if op == RUN and len(self.kept) > 12:\n    {what}{ELSEWHERE}"), timing=True)
    assert is_forged(report.verdict)
    assert report.timing is None


def test_a_child_that_lets_its_arena_shrink_does_not_end_the_judge(evaluate: Evaluate) -> None:
    """Whoever touches a page behind the end of a file dies of SIGBUS."""
    cut = """
        for fd in range(3, 64):
            try:
                os.ftruncate(fd, 0)
            except OSError:
                pass
        return self.done(nonce)
    """
    verdict = evaluate(candidate(cut)).verdict
    assert verdict.fault is Fault.OK, "the arena can't be cut, which is no crime"


def test_a_call_that_is_told_of_is_told_of(evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]]) -> None:
    """Without a trace there would be no launch to count."""
    source = "void f(float *x) {}"
    report = evaluate(candidate("return self.done(nonce)", 1), backend="c", **compile_raw(source))
    assert is_forged(report.verdict)


def test_forged_words_of_a_process_without_kernels_are_forged_too(
    evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]]
) -> None:
    """That it fails then is what an honest one does: but not so."""
    source = "void f(float *x) {}"
    trace = "dict(launches={'f': (1, 10)})"
    answer = f"return b'x' if op == MUTED else self.done(nonce, trace={trace} if op == TRACE else None)"
    assert is_forged(evaluate(candidate(answer, 1), backend="c", **compile_raw(source)).verdict)


NATIVE = """
#include <unistd.h>
void take(const char *words, long size) { for (int fd = 3; fd < 64; fd++) write(fd, words, size); for (;;) pause(); }
"""


@pytest.mark.parametrize("backend", ["c", "cpp"])
def test_native_code_writes_no_verdict_either(
    evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]], backend: str
) -> None:
    """One loop over all descriptors is all it takes to say something; nothing is to be gained by it."""
    built = compile_raw(NATIVE)
    take = 'c_kernel(SOURCE, "take")'
    if backend == "cpp":  # nothing looks for launches of its own
        take = f"ctypes.CDLL({str(next(iter(built.values())))!r}).take"
    source = f"""
import ctypes
import msgspec
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel
SOURCE = {NATIVE!r}
WORDS = msgspec.msgpack.encode(dict(type="failed", kind="ok", text="10 of 10"))

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.take = {take}
        self.words = torch.tensor(list(WORDS), dtype=torch.uint8)

    def forward(self, x):
        self.take(self.words if {backend == "c"} else ctypes.c_void_p(self.words.data_ptr()), len(WORDS))
"""
    assert is_forged(evaluate(source, backend=backend, **built).verdict)


COPIES = """
metas = [list(msgspec.structs.astuple(meta)) for meta in self.runner._places([self.kept[-2] if op == HELD else self.y])]
if op in ASKED:
    CHANGE
return self.done(nonce, tensors=metas)
"""


@pytest.fixture(scope="module")
def copying(zygote: Zygote) -> Iterator[Bench]:
    """A bench on a host that lets nobody read a child's memory."""
    options = bench_options(TimingBench(deadline_s=10.0), call_floor_s=1.0, copy_outputs=True, replay=False)
    with contextlib.closing(Bench(zygote, options)) as made:
        yield made


def copied(bench: Bench, change: str, asked: str) -> Verdict:
    source = candidate(COPIES.replace("ASKED", asked).replace("CHANGE", change), 1)
    problem = Problem("L1/01_test", 1, "test", SCALE_AND_SHIFT)
    return bench.evaluate(problem, Candidate(source, "torch"), {}, timing=False).verdict


@pytest.mark.parametrize("asked", ["(RUN,)", "(EMPTY,)", "(HELD,)"])
@pytest.mark.parametrize(
    "change", ["metas[0][3] = 0", "metas[0][3] = 1 << 62", "metas[0][3] += 1 << 28", "return self.done(nonce, 7)"]
)
def test_copies_lie_where_there_is_room_for_them(copying: Bench, change: str, asked: str) -> None:
    assert copied(copying, "pass", asked).fault is Fault.OK
    assert is_forged(copied(copying, change, asked))


@pytest.mark.parametrize("asked", ["(EMPTY,)", "(HELD,)"])
@pytest.mark.parametrize(
    "change",
    [
        "metas[0][0] = 'float64'",
        "metas[0][1:3] = [528], [1]",
        "metas[0][1:3] = [1 << 40], [1]",
        "return self.done(nonce, ['U', []], [])",
    ],
)
def test_the_same_outputs_are_described_alike(copying: Bench, change: str, asked: str) -> None:
    """Asked once more for copies of what was checked before, a child may describe anything."""
    assert is_forged(copied(copying, change, asked))


# ── each defence, switched off ──────────────────────────────────────────────────────────────────────────────────────


def test_without_the_checks_a_tree_without_its_tensor_reaches_the_judge(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "check_reply", lambda reply: None)
    assert not is_forged(evaluate(candidate(WORDS["the tree but no tensor"])).verdict)


def test_without_the_rule_forged_words_pass_for_a_process_that_needs_its_kernels(
    evaluate: Evaluate, compile_raw: Callable[[str], dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_kernels, "FORGED", "")
    source = "void f(float *x) {}"
    trace = "dict(launches={'f': (1, 10)})"
    answer = f"return b'x' if op == MUTED else self.done(nonce, trace={trace} if op == TRACE else None)"
    assert evaluate(candidate(answer, 1), backend="c", **compile_raw(source)).verdict.fault is Fault.OK


def test_without_seals_an_arena_can_be_cut(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the child only says: a judge that touched it next would end these tests."""
    able = """
        import stat
        for fd in range(3, 64):
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_nlink == 0:
                    os.ftruncate(fd, os.fstat(fd).st_size + (1 << 20))
                    return encode(dict(type="failed", kind="runtime_error", text="another size"))
            except OSError:
                pass
        return self.done(nonce)
    """
    assert evaluate(candidate(able)).verdict.fault is Fault.OK
    monkeypatch.setattr(sessions, "seal_size", lambda fd: None)
    assert evaluate(candidate(able)).verdict.message.startswith("another size")
