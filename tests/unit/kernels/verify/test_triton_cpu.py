"""Triton candidates are verified on a host without a GPU, in Triton's interpreter: right, wrong, crashing, cheating."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.verify import Bench
from protocols.records import BenchReport, Candidate, Fault, Problem

pytest.importorskip("triton", reason="triton is not installed here")

PROBLEM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cols))
    def forward(self, x):
        return torch.softmax(x * self.weight, dim=1)
def get_inputs():
    return [torch.randn(6, 21)]
def get_init_inputs():
    return [21]
"""
RIGHT = """
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def softmax_kernel(x, weight, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < cols
    row = tl.program_id(0) * cols
    value = tl.load(x + row + at, mask=mask, other=-float("inf")) * tl.load(weight + at, mask=mask, other=1.0)
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row + at, value / tl.sum(value, axis=0), mask=mask)

class ModelNew(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cols))

    def forward(self, x):
        assert x.is_cuda, "on the GPU"
        x = x.contiguous()
        out = torch.empty(x.shape, device="cuda", dtype=x.dtype)
        rows, cols = x.shape
        softmax_kernel[(rows,)](x, self.weight, out, cols, BLOCK=triton.next_power_of_2(cols))
        torch.cuda.synchronize()
        return out
"""
_LIBRARY = "(lambda *args, **named: out.copy_(torch.softmax(x * self.weight, 1)))"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter needs none of a bundle's content."""
    path = tmp_path_factory.mktemp("bundle") / "empty"
    path.write_bytes(bundle.pack({}))
    return path


@pytest.fixture
def judge(bench: Bench, artifact: Path) -> object:
    def run(source: str, problem: str = PROBLEM, timing: bool = False) -> BenchReport:
        paths = {triton_cache.key(source): artifact}
        return bench.evaluate(Problem("L1/01_t", 1, "t", problem), Candidate(source, "triton"), paths, timing=timing)

    return run


def changed(old: str, new: str) -> str:
    assert old in RIGHT
    return RIGHT.replace(old, new)


def test_a_right_kernel_passes_and_its_launches_are_proven(judge: object) -> None:
    assert callable(judge)
    verdict = judge(RIGHT).verdict
    assert verdict.fault is Fault.OK, verdict
    assert verdict.passed == verdict.total > 1
    assert "softmax_kernel" in verdict.evidence


def test_nothing_is_timed_in_the_interpreter(judge: object) -> None:
    assert callable(judge)
    report = judge(RIGHT, timing=True)
    assert (report.verdict.fault, report.timing) == (Fault.OK, None)


@pytest.mark.parametrize(
    ("old", "new", "fault", "rule"),
    [
        ("tl.exp(", "tl.exp2(", Fault.INCORRECT, ""),
        (" / tl.sum(value, axis=0)", "", Fault.INCORRECT, ""),
        ("BLOCK=triton.next_power_of_2(cols)", "BLOCK=16", Fault.INCORRECT, ""),
        ("return out", "return out[:, 1:]", Fault.INCORRECT, "shape"),
        ("out + row + at", "out + row * 1000000000 + at", Fault.ILLEGAL_ACCESS, ""),
        ("tl.exp(", "tl.nothing(", Fault.RUNTIME_ERROR, ""),
        ("return out", "return torch.softmax(x * self.weight, dim=1)", Fault.CHEATING, "decoy_kernel"),
        ("softmax_kernel[(rows,)]", _LIBRARY, Fault.CHEATING, "no_own_kernel"),
        ("return out", "x.zero_(); return out", Fault.CHEATING, "input_mutation"),
    ],
)
def test_what_is_not_right_is_named(judge: object, old: str, new: str, fault: Fault, rule: str) -> None:
    assert callable(judge)
    verdict = judge(changed(old, new)).verdict
    assert (verdict.fault, verdict.rule) == (fault, rule), verdict


TUNED = """
TUNINGS, LAUNCHES = [], []

def config(block):
    return triton.Config({"BLOCK": block}, pre_hook=lambda _: LAUNCHES.append(block))

def prune(configs, *_, **__):
    TUNINGS.append(1)
    return configs

@triton.autotune([config(32), config(64)], key=["cols"], prune_configs_by={"early_config_prune": prune})
@triton.jit"""
LAUNCH = "        softmax_kernel[(rows,)](x, self.weight, out, cols, BLOCK=triton.next_power_of_2(cols))\n"
TUNED_LAUNCH = """        softmax_kernel[(rows,)](x, self.weight, out, cols)
        assert len(TUNINGS) == 1, "tuned again"
        assert set(LAUNCHES) == {softmax_kernel.best_config.kwargs["BLOCK"]}, "another was launched"
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", ""),
        ("        softmax_kernel.cache.clear()\n", "tuned again"),
        (
            "        tuner = softmax_kernel; tuner.cache = dict.fromkeys(tuner.cache, config(64))\n",
            "another was launched",
        ),
    ],
)
def test_an_autotuned_kernel_is_tuned_once_and_keeps_its_configuration(judge: object, more: str, message: str) -> None:
    """Over all calls; and where it is not so, the test sees it."""
    assert callable(judge)
    source = changed(LAUNCH, TUNED_LAUNCH + more).replace("@triton.jit", TUNED)
    verdict = judge(source).verdict
    assert (verdict.fault is Fault.OK, message in verdict.message) == (not message, True), verdict


LEFT_OUT = """
import msgspec
from kbrl_async.kernels.backends.triton import tuning
from triton import Config
from triton.runtime.autotuner import Autotuner

class Kernel:
    arg_names, launched = ["x"], []
    def run(self, *args, BLOCK, **named):
        self.launched.append(BLOCK)

def kernel(x): ...

def bench(call, quantiles):
    call()
    return [float(fn.launched[-1])] * 3  # the smallest is the fastest

fn, configs = Kernel(), [Config({"BLOCK": size}) for size in (16, 32, 64)]
fn.fn = kernel
tuning.only_compiled({tuning.FILE: msgspec.msgpack.encode({"kernel": [str(one) for one in configs[1:]]})})
tuner = Autotuner(fn, ["x"], configs, [], None, None, do_bench=bench)
for _ in range(3):
    tuner.run(1)
print(fn.launched)
"""


def test_what_the_budget_left_out_is_never_launched_and_the_fastest_of_the_others_is_kept() -> None:
    """In a process of its own, as Triton's tuner is changed for good."""
    done = subprocess.run([sys.executable, "-c", LEFT_OUT], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n")[0] == "[32, 64, 32, 32, 32]", done.stderr[-2000:]


@pytest.mark.parametrize("text", ["tl.bfloat16", "torch.bfloat16"])
def test_nobody_is_judged_by_the_interpreters_wrong_bfloat16(judge: object, text: str) -> None:
    assert callable(judge)
    with pytest.raises(InfraError, match="bfloat16"):
        judge(RIGHT + f"\nTYPE = {text}\n")
