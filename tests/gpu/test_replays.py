"""Kinds of cheating that once got through, each against what is replayed, on a candidate otherwise honest.

What a candidate's host code does while it is watched, timed or asked says nothing any more: it is not there when its
work is judged. So tests of such kinds ask that a candidate that tries gets nothing but what its recorded work is worth.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import Bench
from protocols.records import OBSERVED, REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.gpu.bench_candidates import ADD, GOOD, INLINE, MATMUL, TRITON, matmul, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
Sneak = Callable[..., BenchReport]
ATTENTION = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def forward(self, x, y):
        return F.scaled_dot_product_attention(x, y, y)

def get_inputs():
    return [torch.randn(4, 8, 256, 64, dtype=torch.float16), torch.randn(4, 8, 256, 64, dtype=torch.float16)]

def get_init_inputs():
    return []
"""
COPYING = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl

@triton.jit
def kept(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

class ModelNew(nn.Module):
    def forward(self, x, y):
        found = F.scaled_dot_product_attention(x, y, y)
        out = torch.empty_like(found)
        kept[(triton.cdiv(out.numel(), 1024),)](found, out, out.numel(), BLOCK=1024)
        return out
"""


@pytest.fixture
def sneak(gpu_bench: Bench, gpu_builder: Builder) -> Sneak:
    """What was built from an honest candidate, with other host code around it, whatever static checks say of that."""

    def run(changed: Callable[[str], str], body: str = GOOD, *, timing: bool = False) -> BenchReport:
        posed, honest = Problem("L1/01_test", 1, "test", ADD), nvrtc(body)
        built = gpu_builder.build(Candidate(honest, "cuda-nvrtc"), posed)
        assert built.fault is Fault.OK, built.message
        found = {key: gpu_builder.store.path(address) for key, address in built.artifacts.items()}
        paths = {key: path for key, path in found.items() if path is not None}
        return gpu_bench.evaluate(posed, Candidate(changed(honest), "cuda-nvrtc"), paths, timing=timing)

    return run


def instead(lines: str, top: str = "") -> Callable[[str], str]:
    """Host code whose forward begins with these lines."""
    body = "".join(f"        {line}\n" for line in lines.splitlines())
    return lambda source: top + source.replace("        n = x.numel()\n", body + "        n = x.numel()\n")


FORGED = """
import sys

def forge(driver):
    true = driver.elapsed_ns
    driver.elapsed_ns = lambda begin, end: FORGED

forge(sys.modules["kbrl_async.kernels.cuda_driver"].driver())
"""


@pytest.mark.parametrize("value", ["true(begin, end) * 0.3", "-1e6", "1.0", "float('nan')", "3.6e12"])
def test_a_forged_time_is_nobodys_time(sneak: Sneak, value: str) -> None:
    """Times scaled, negative (an empty one, too), or of an hour: whose clock that is, is not asked."""
    honest = sneak(lambda source: source, timing=True)
    forged = sneak(instead("", FORGED.replace("FORGED", value)), timing=True)
    assert forged.verdict.fault is Fault.OK, forged.verdict
    assert forged.verdict.trust == REPLAYED, forged.verdict.trust_reason
    assert forged.timing is not None
    assert honest.timing is not None
    assert forged.timing.speedup == pytest.approx(honest.timing.speedup, rel=0.15)


def test_who_answers_before_the_end_is_not_asked(sneak: Sneak) -> None:
    """A candidate's own answers can't be expressed any more: the process that is asked has none of its host code."""
    early = """
import sys
runner = sys.modules["kbrl_async.kernels.verify.cuda.runner"]
runner.CudaRunner._replayed = lambda self, times, nonce: sys.modules["kbrl_async.kernels.verify.wire"].Timed(nonce, 1.0)
"""
    report = sneak(instead("", early), timing=True)
    assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED), report.verdict


SNIFFING = "from kbrl_async.kernels.backends.launch.recorder import RECORDER\n"


def test_who_launches_only_while_it_is_watched_has_no_own_kernel(sneak: Sneak) -> None:
    source = instead("if not RECORDER.is_on: return x * 2 + y + self.shift", SNIFFING)
    verdict = sneak(source).verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.CHEATING, "no_own_kernel", REPLAYED), verdict


def test_who_forges_what_is_left_when_kernels_are_off_is_found(sneak: Sneak) -> None:
    """Own kernels are left out of the data: nothing can notice it. Here they are launched, and not needed."""
    source = instead("if RECORDER.is_muted: return x.clone()", SNIFFING)
    verdict = sneak(lambda honest: source(honest).replace("return out", "return x * 2 + y + self.shift")).verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.CHEATING, "decoy_kernel", REPLAYED), verdict


@pytest.mark.parametrize(
    "lines", ["key = x.sum().item()", "key = tuple(x.flatten()[:4].tolist())", "key = bytes(x[0, :8].cpu().numpy())"]
)
def test_a_cache_by_content_reads_values_back_and_is_watched(sneak: Sneak, lines: str) -> None:
    """By content or by where inputs lie between known ones: whoever wants to know them reads them."""
    store = "store = self.__dict__.setdefault('store', {})\nif key in store: return store[key].clone()\n"
    verdict = sneak(
        lambda honest: instead(f"{lines}\n{store}")(honest).replace(
            "return out", "store[key] = out\n        return out"
        )
    ).verdict
    assert verdict.trust == OBSERVED, verdict
    assert verdict.trust_reason


def test_a_cache_on_the_device_finds_nothing_again(judge: Judge) -> None:
    """A kernel that keeps inputs and answers in variables of its module: they are as they were before each call."""
    body = "if (i < n) { if (known[i] && cache_x[i] == x[i] && cache_y[i] == y[i]) out[i] = cache_out[i]; else {"
    body += " out[i] = x[i] * 2 + y[i] + shift; cache_x[i] = x[i]; cache_y[i] = y[i]; cache_out[i] = out[i];"
    body += " known[i] = 1; } }"
    variables = "__device__ float cache_x[524288], cache_y[524288], cache_out[524288]; __device__ int known[524288];"
    report = judge(ADD, nvrtc(body).replace('extern "C"', variables + '\nextern "C"'), "cuda-nvrtc", timing=True)
    assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED), report.verdict
    assert report.timing is not None
    assert report.timing.lo < 1.1


def test_operators_inside_an_extension_are_the_librarys(judge: Judge) -> None:
    source = INLINE.replace(
        "auto out = torch::empty_like(x);", "auto t = x * 2 + y + shift; auto out = torch::empty_like(x);"
    )
    source = source.replace("out[i] = x[i] * 2 + y[i] + shift;", "out[i] = x[i];").replace(
        "(x.data_ptr<float>(), y", "(t.data_ptr<float>(), y"
    )
    verdict = judge(ADD, source, "cuda").verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.CHEATING, "decoy_kernel", REPLAYED), verdict


def test_a_copy_behind_the_librarys_attention_is_a_decoy(judge: Judge) -> None:
    verdict = judge(ATTENTION, COPYING, "triton").verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.CHEATING, "decoy_kernel", REPLAYED), verdict
    assert "attention" in verdict.evidence


def test_a_copy_in_another_order_is_a_decoy_too(judge: Judge) -> None:
    problem = ATTENTION.replace("y, y)", "y, y).transpose(1, 2).reshape(4, 256, 512)")
    source = COPYING.replace(
        "out = torch.empty_like(found)",
        "found = found.transpose(1, 2).reshape(4, 256, 512)\n        out = torch.empty_like(found)",
    )
    verdict = judge(problem, source, "triton").verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "decoy_kernel"), verdict


CHAIN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, w):
        for _ in range(4):
            x = x @ w
        return (x + 1) @ w

def get_inputs():
    return [torch.randn(2048, 2048), torch.randn(2048, 2048) / 45]

def get_init_inputs():
    return []
"""
A_STEP = """
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def shifted(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

class ModelNew(nn.Module):
    def forward(self, x, w):
        for _ in range(4):
            x = x @ w
        out = torch.empty_like(x)
        shifted[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out @ w
"""


def test_who_makes_a_small_step_between_the_librarys_is_never_accused(judge: Judge) -> None:
    """Of its time a hundredth or less: an activation was called cheating for that."""
    verdict = judge(CHAIN, A_STEP, "triton").verdict
    assert verdict.fault in (Fault.OK, Fault.UNPROVEN), verdict
    assert verdict.trust == REPLAYED


def test_of_who_finishes_a_hair_of_the_librarys_answer_nothing_is_proven(judge: Judge) -> None:
    whole = "out = (x + 1) @ w\n        out.view(-1)[:64] -= 1\n"
    source = A_STEP.replace("out = torch.empty_like(x)\n", whole).replace("return out @ w", "return out")
    source = source.replace("(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), ", "(1,)](out, out, 64, ")
    verdict = judge(CHAIN, source, "triton").verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.UNPROVEN, "decoy_kernel", REPLAYED), verdict


def test_a_librarys_kernel_is_not_its_own_by_a_name(sneak: Sneak) -> None:
    """Own is what was loaded from what was built; names are not looked at."""
    named = "def elementwise_kernel(): pass\ndef vectorized_elementwise_kernel(): pass\ndef CUDAFunctor_add(): pass\n"
    verdict = sneak(instead("return x * 2 + y + self.shift", named)).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "no_own_kernel"), verdict


BATCHED = """
if torch.cuda.is_current_stream_capturing():
    known = self.__dict__.setdefault('known', [])
    known.append((x, y, torch.empty_like(x)))
    for a, b, c in known: self.kernel[(x.numel() + 255) // 256, 256](a, b, c, x.numel(), float(self.shift))
    return known[-1][2]
"""


def test_a_call_that_does_the_work_of_others_is_found(sneak: Sneak) -> None:
    verdict = sneak(instead(BATCHED.strip())).verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.CHEATING, "slot_batched", REPLAYED), verdict


def test_a_call_for_all_leaves_the_others_without_a_result(sneak: Sneak) -> None:
    """Its recorder sees that a graph does something else than a plain call; watched, it does all its work."""
    lazy = BATCHED.replace("for a, b, c in known:", "for a, b, c in known if len(known) > 2 else []:")
    verdict = sneak(instead(lazy.strip())).verdict
    assert verdict.trust == OBSERVED, verdict
    assert "another result" in verdict.trust_reason


def test_half_precision_only_when_captured_is_half_precision(judge: Judge) -> None:
    lines = "if torch.cuda.is_current_stream_capturing(): return (x.bfloat16() @ y.bfloat16()).float()", "return x @ y"
    report = judge(MATMUL, matmul(*lines), timing=True)
    assert report.verdict.fault is Fault.INCORRECT or report.verdict.trust == OBSERVED, report.verdict
    if report.timing is not None:  # its recorder saw that it acts by phase: watched, it is as fast as it is
        assert report.timing.hi < 1.1


def test_two_output_buffers_in_turn_are_overwritten(sneak: Sneak) -> None:
    turns = "self.turn = 1 - getattr(self, 'turn', 0)\n"
    turns += "kept = self.__dict__.setdefault('kept', [torch.empty_like(x) for _ in range(2)])"
    verdict = sneak(
        lambda honest: instead(turns)(honest).replace("out = torch.empty_like(x)", "out = kept[self.turn]")
    ).verdict
    assert (verdict.fault, verdict.rule, verdict.trust) == (Fault.INCORRECT, "output_overwritten", REPLAYED), verdict


@pytest.mark.parametrize(
    "body", ["if (i < 0) out[i] = shift;", "if (i < n && i % 2) out[i] = x[i] * 2 + y[i] + shift;"]
)
def test_nothing_computed_is_nothing_right(judge: Judge, body: str) -> None:
    verdict = judge(ADD, nvrtc(body), "cuda-nvrtc").verdict
    assert verdict.fault is Fault.INCORRECT, verdict
    assert verdict.passed == 0


@pytest.mark.parametrize(("most", "rule"), [(100_000, ""), (10_000, "wrong_when_timed")])
def test_a_kernel_that_counts_its_calls_starts_anew_in_each(judge: Judge, most: int, rule: str) -> None:
    """Variables are put back before each call. A timed run is sixteen in a row, 2,048 blocks each."""
    source = nvrtc(f"if (calls > {most}) return; {GOOD} if (threadIdx.x == 0) atomicAdd(&calls, 1);")
    source = source.replace('extern "C"', '__device__ int calls;\nextern "C"')
    verdict = judge(ADD, source, "cuda-nvrtc", timing=True).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT if rule else Fault.OK, rule), verdict


def test_another_answer_when_captured_is_the_answer(judge: Judge) -> None:
    """What it does while it is recorded is judged; here its recorder sees that a plain call does something else."""
    lines = (
        "if torch.cuda.is_current_stream_capturing(): return self.last.clone()",
        "self.last = x @ y",
        "return self.last",
    )
    report = judge(MATMUL, matmul(*lines), timing=True)
    assert report.verdict.fault is Fault.INCORRECT or report.verdict.trust == OBSERVED, report.verdict
    assert report.timing is None or report.timing.hi < 1.1


# ── honest ones ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("source", "backend"), [(TRITON, "triton"), (nvrtc(), "cuda-nvrtc"), (INLINE, "cuda")])
def test_an_honest_candidate_is_replayed(judge: Judge, source: str, backend: str) -> None:
    report = judge(ADD, source, backend, timing=True)
    assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED), report.verdict
    assert report.timing is not None
    assert report.timing.speedup > 1.2


def test_a_fault_of_a_replay_is_the_candidates_and_the_next_one_is_judged_rightly(judge: Judge) -> None:
    """Right on what it is recorded with, beyond its memory on other inputs: a player dies of it, and a spare plays."""
    body = "if (i < n) out[i] = x[i] * 2 + y[i] + shift; if (i == 0 && x[0] > 40.0f) *(volatile float *)16 = 1;"
    problem = re.sub(r"return \[torch.randn", "return [(torch.rand(1) > 0.5) * 100 + torch.randn", ADD)
    for _ in range(2):
        assert judge(problem, nvrtc(body), "cuda-nvrtc").verdict.fault in (Fault.ILLEGAL_ACCESS, Fault.INCORRECT)
    assert judge(ADD, nvrtc(), "cuda-nvrtc").verdict.fault is Fault.OK


def test_a_kernel_that_never_ends_is_killed_and_the_next_one_is_judged_rightly(judge: Judge) -> None:
    verdict = judge(ADD, nvrtc("while (x[0] == x[0]) {} out[i] = 0;"), "cuda-nvrtc").verdict
    assert verdict.fault is Fault.TIMEOUT, verdict
    assert judge(ADD, nvrtc(), "cuda-nvrtc").verdict.trust == REPLAYED


def test_a_bench_times_what_a_verifier_has_proven_and_finds_out_what_it_has_not(
    gpu_bench: Bench, gpu_builder: Builder
) -> None:
    posed = Problem("L1/01_test", 1, "test", ADD)

    def judged(source: str, verified: BenchReport | None = None) -> tuple[BenchReport, str]:
        candidate = Candidate(source, "cuda-nvrtc")
        built = gpu_builder.build(candidate, posed)
        assert built.fault is Fault.OK, built.message
        found = {key: gpu_builder.store.path(address) for key, address in built.artifacts.items()}
        paths = {key: path for key, path in found.items() if path is not None}
        report = gpu_bench.evaluate(posed, candidate, paths, timing=verified is not None, verified=verified)
        return report, next((stage.detail for stage in report.stages if stage.name == "full_inputs"), "")

    first, _ = judged(nvrtc(GOOD))
    assert (first.verdict.fault, first.verdict.trust) == (Fault.OK, REPLAYED), first.verdict
    again, said = judged(nvrtc(GOOD), first)
    assert said.startswith("2 of 2")
    assert again.timing is not None
    assert (again.plan, again.verdict) == (first.plan, first.verdict)
    other, said = judged(instead("x = x.clone()")(nvrtc(GOOD)), first)
    assert (other.verdict.fault, said[:8]) == (Fault.OK, "10 of 10")
    assert other.plan != first.plan
