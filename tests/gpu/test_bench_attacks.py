"""Attacks on the GPU bench, each on a candidate that is otherwise honest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.kernels.verify.cuda.replay import candidates
from kbrl_async.kernels.verify.cuda.replay.host import Unreplayable
from protocols.records import OBSERVED, REPLAYED, BenchReport, Fault
from tests.gpu.bench_candidates import ADD, GOOD, MATMUL, matmul, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
FORGED_CLOCK = """
import sys

def forge(driver):
    true = driver.elapsed_ns
    driver.elapsed_ns = lambda begin, end: true(begin, end) * (0.5 if true(begin, end) > 20_000 else 1)

forge(sys.modules["kbrl_async.kernels.cuda_driver"].driver())
"""
READS_BACK = "float(x[0, 0].item())"
"""Then it can't be recorded, and its process is watched."""
TIMING = {
    "work on a side stream": (
        matmul(
            "self.side.wait_stream(torch.cuda.current_stream())",
            "with torch.cuda.stream(self.side): return x @ y",
        ),
        "side_stream",
    ),
    "a forged clock": (matmul(READS_BACK, "return x @ y", top=FORGED_CLOCK), "side_stream"),
}


@pytest.mark.parametrize("name", TIMING)
def test_an_attack_on_the_clock_is_seen(judge: Judge, name: str) -> None:
    source, rule = TIMING[name]
    verdict = judge(MATMUL, source, timing=True).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, rule), verdict


def test_short_work_hidden_on_a_side_stream_gains_nothing(judge: Judge) -> None:
    problem = MATMUL.replace("x @ y", "x + y")
    lines = ("self.side.wait_stream(torch.cuda.current_stream())", "with torch.cuda.stream(self.side): return x + y")
    report = judge(problem, matmul(*lines), timing=True)
    assert report.timing is None or report.timing.hi < 1.5, report


def test_a_result_cached_by_pointer_is_wrong(judge: Judge) -> None:
    source = matmul(
        "key = (x.data_ptr(), y.data_ptr())",
        "if key not in self.kept: self.kept[key] = x @ y",
        "return self.kept[key]",
    )
    assert judge(MATMUL, source).verdict.fault is Fault.INCORRECT


DECOYS = {
    "the library's result": (nvrtc(result="x * 2 + y + self.shift"), "decoy_kernel"),
    "no launch at all": (
        nvrtc(result="x * 2 + y + self.shift").replace("        self.kernel[", "        0 and self.kernel["),
        "no_own_kernel",
    ),
    "no launch, and no capture either": (
        nvrtc(result="torch.cuda.synchronize() or x * 2 + y + self.shift").replace(
            "        self.kernel[", "        0 and self.kernel["
        ),
        "no_own_kernel",
    ),
    "a decoy, and no capture either": (
        nvrtc(result="torch.cuda.synchronize() or x * 2 + y + self.shift"),
        "decoy_kernel",
    ),
}


@pytest.mark.parametrize("name", DECOYS)
def test_a_library_call_behind_a_decoy_is_seen(judge: Judge, name: str) -> None:
    source, rule = DECOYS[name]
    verdict = judge(ADD, source, "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, rule), verdict


COPIED = nvrtc("if (i < n) out[i] = x[i];").replace(
    "        self.kernel[", "        x = x * 2 + y + self.shift\n        self.kernel["
)


SUM = "x * 2 + y + self.shift"
ROOT = ADD.replace(SUM, f"torch.sqrt({SUM})")
"""NaN in many places."""
BIASED = "torch.linspace(1, 2, x.shape[-1], device=x.device) + 1e-6 * torch.sin({})"
HARDLY = ADD.replace(SUM, BIASED.format(SUM))
"""Right within the tolerance whatever its inputs are."""
WRITTEN = ADD.replace(f"return {SUM}", f"x[1:] = ({SUM})[:-1]\n        return x")
BESIDE = ADD.replace(SUM, f"(x, torch.tanh({SUM})[0])")
BOTH_COPIED = nvrtc("if (i < n) out[i] = x[i];", result="out, made").replace(
    "        return",
    f"""        small = torch.tanh({SUM})[0]
        made = torch.empty_like(small)
        self.kernel[2, 256](small, small, made, small.numel(), float(self.shift))
        return""",
)


def unreplayable(*_given: object, **_named: object) -> None:
    raise Unreplayable("its inputs take too much memory to be held twice more")


@pytest.mark.parametrize(
    ("problem", "source", "rule"),
    [
        (ADD, nvrtc(), ""),
        (ADD, COPIED, "decoy_kernel"),
        (ROOT, nvrtc("if (i < n) out[i] = sqrtf(x[i] * 2 + y[i] + shift);"), ""),
        (ROOT, COPIED.replace(SUM, f"torch.sqrt({SUM})"), "decoy_kernel"),
    ],
    ids=["honest", "a copy", "honest, with NaN", "a copy, with NaN"],
)
@pytest.mark.parametrize("trust", [OBSERVED, REPLAYED])
def test_a_copy_of_the_librarys_result_is_seen(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, problem: str, source: str, rule: str, trust: str
) -> None:
    if trust == OBSERVED:  # as for want of memory, though its forward can be captured
        monkeypatch.setattr(candidates, "place_inputs", unreplayable)  # `open` has forgotten the last candidate by then
    verdict = judge(problem, source, "cuda-nvrtc", timing=True).verdict
    assert (verdict.rule, verdict.trust) == (rule, trust), verdict


@pytest.mark.parametrize(("trust", "fault"), [(OBSERVED, Fault.UNPROVEN), (REPLAYED, Fault.OK)])
def test_who_makes_a_part_of_an_answer_that_hardly_moves_is_no_decoy(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, trust: str, fault: Fault
) -> None:
    """What the library makes of poison is nearly right there. Of who is only watched nothing more is known."""
    if trust == OBSERVED:
        monkeypatch.setattr(candidates, "place_inputs", unreplayable)
    verdict = judge(HARDLY, nvrtc(result=BIASED.format("out")), "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.trust) == (fault, trust), verdict


def test_a_workload_without_elements_needs_no_kernel(judge: Judge) -> None:
    """Whoever launches nothing where nothing is to do was called a cheat."""
    pair = "[torch.randn(1024, 512), torch.randn(1024, 512)]"
    two = ADD.replace("get_inputs", "get_input_groups").replace(pair, f"[{pair.replace('1024', '0')}, {pair}]")
    source = nvrtc().replace("        self.kernel[", "        x.numel() and self.kernel[")
    verdict = judge(two, source, "cuda-nvrtc").verdict
    assert (verdict.fault, len(verdict.workloads)) == (Fault.OK, 2), verdict


@pytest.mark.parametrize(
    ("problem", "source"),
    [
        (HARDLY, COPIED.replace(SUM, BIASED.format(SUM))),
        (WRITTEN, COPIED.replace(f"x = {SUM}", f"x[1:] = ({SUM})[:-1]")),
        (BESIDE, BOTH_COPIED),
    ],
    ids=["that hardly moves", "left in an input", "beside an input that is returned"],
)
def test_a_copy_of_an_answer_is_seen_when_replayed(judge: Judge, problem: str, source: str) -> None:
    verdict = judge(problem, source, "cuda-nvrtc").verdict
    assert (verdict.rule, verdict.trust) == ("decoy_kernel", REPLAYED), verdict


def test_changed_inputs_are_seen(judge: Judge) -> None:
    body = GOOD.replace("shift;", "shift; if (i < n) ((float *)x)[i] = 0;")
    verdict = judge(ADD, nvrtc(body), "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "input_mutation")


def test_less_precision_than_the_reference_is_incorrect(judge: Judge) -> None:
    lines = "return (x.bfloat16() @ y.bfloat16()).float()"
    assert judge(MATMUL, matmul(lines)).verdict.fault is Fault.INCORRECT


def test_less_precision_by_a_switch_of_its_process_is_incorrect_or_in_vain(judge: Judge) -> None:
    """Who replays does the operator as it is; where the candidate's own process does it, its switch holds."""
    switch = "torch.backends.cuda.matmul.allow_tf32 = True"
    assert judge(MATMUL, matmul(switch, READS_BACK, "return x @ y")).verdict.fault is Fault.INCORRECT
    report = judge(MATMUL, matmul(switch, "return x @ y"), timing=True)
    assert report.verdict.fault is Fault.INCORRECT or (report.timing is not None and report.timing.hi < 1.05)


HOARDED = matmul(
    READS_BACK,
    "result = x @ y",
    "if not self.kept:",
    "    spare = [torch.empty_like(result) for _ in range(8)]",
    "    del spare  # stays in its own cache: its process will not lack any",
    "    torch.cuda.synchronize()",
    "    free, _ = torch.cuda.mem_get_info()",
    "    self.kept[0] = torch.empty(free - (64 << 20), dtype=torch.uint8, device=x.device)",
    "return result",
)


@pytest.mark.alone
def test_memory_that_a_candidate_keeps_from_the_bench_is_its_own_fault(judge: Judge) -> None:
    """What it leaves is enough for itself and for none of our comparisons: nobody else is to blame for that."""
    problem = MATMUL.replace("2048", "8192")
    verdict = judge(problem, HOARDED, timing=True).verdict
    assert verdict.fault is Fault.OUT_OF_MEMORY, verdict
    assert judge(problem, matmul("return x @ y")).verdict.fault is Fault.OK, "the reference is made anew"


def test_a_forged_time_of_an_hour_is_forged(judge: Judge) -> None:
    """No call lasts longer than it does by our own clock."""
    forge = FORGED_CLOCK.replace("true(begin, end) * (0.5 if true(begin, end) > 20_000 else 1)", "3.6e12")
    verdict = judge(MATMUL, matmul(READS_BACK, "return x @ y", top=forge), timing=True).verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "forged_result"), verdict
