"""Verdicts of candidates that ran on a real GPU: right ones, wrong ones, and every way to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.verify.cuda.health import GpuHealth
from protocols.records import BenchReport, Fault
from tests.gpu.bench_candidates import ADD, GOOD, MATMUL, TRITON, matmul, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
WEIGHTS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(256, n)
        self.norm = nn.BatchNorm1d(n)
        self.eval()

    def forward(self, x):
        return self.norm(self.linear(x))

def get_inputs():
    return [torch.randn(128, 256)]

def get_init_inputs():
    return [96]
"""


@pytest.mark.parametrize(("source", "backend"), [(TRITON, "triton"), (nvrtc(), "cuda-nvrtc")])
def test_a_right_candidate_passes_and_its_own_kernel_is_in_the_evidence(
    judge: Judge, source: str, backend: str
) -> None:
    verdict = judge(ADD, source, backend).verdict
    assert (verdict.fault, verdict.passed) == (Fault.OK, verdict.total), verdict.message
    assert "own kernels on the GPU: shifted" in verdict.evidence


def test_a_wrong_candidate_is_incorrect_and_told_where(judge: Judge) -> None:
    verdict = judge(ADD, nvrtc("if (i < n) out[i] = x[i] * 2 + y[i];"), "cuda-nvrtc").verdict
    assert verdict.fault is Fault.INCORRECT
    assert "expected" in verdict.message


def test_an_output_that_is_only_partly_written_is_incorrect(judge: Judge) -> None:
    body = GOOD.replace("i < n", "i < n - 1")
    assert judge(ADD, nvrtc(body), "cuda-nvrtc").verdict.fault is Fault.INCORRECT


FAULTS = {
    "illegal address": (nvrtc("if (i < n) out[i + (1ll << 40)] = x[i];"), Fault.ILLEGAL_ACCESS),
    "misaligned address": (nvrtc("if (i == 0) *(float4 *)(out + 1) = make_float4(1, 2, 3, 4);"), Fault.ILLEGAL_ACCESS),
    "device assert": (nvrtc('if (i < n) asm("trap;");'), Fault.ILLEGAL_ACCESS),
    "endless kernel": (
        nvrtc("volatile const float *v = x; while (v[0] != 12345.678f) {} " + GOOD),
        Fault.TIMEOUT,
    ),
    "python error": (nvrtc(result="out.no_such_method()"), Fault.RUNTIME_ERROR),
    "device memory": (
        nvrtc(result="[torch.empty(40 << 30, dtype=torch.uint8, device='cuda') for _ in range(8)]"),
        Fault.OUT_OF_MEMORY,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone) if name == "device memory" else name for name in FAULTS]
)
def test_a_fault_is_the_candidates_and_the_next_candidate_is_judged_rightly(judge: Judge, name: str) -> None:
    source, fault = FAULTS[name]
    verdict = judge(ADD, source, "cuda-nvrtc").verdict
    assert verdict.fault is fault, verdict.message
    assert judge(ADD, nvrtc(), "cuda-nvrtc").verdict.fault is Fault.OK


HOST_FAULTS = {
    "endless loop": (matmul("while True: pass"), Fault.TIMEOUT),
    "segmentation fault": (matmul("import ctypes; ctypes.string_at(1)"), Fault.ILLEGAL_ACCESS),
    "exit": (matmul("import os; os._exit(0)"), Fault.RUNTIME_ERROR),
    "host memory": (matmul("return bytearray(64 << 30)"), Fault.OUT_OF_MEMORY),
}


@pytest.mark.parametrize("name", HOST_FAULTS)
def test_a_fault_of_host_code_is_the_candidates(judge: Judge, name: str) -> None:
    source, fault = HOST_FAULTS[name]
    assert judge(MATMUL, source).verdict.fault is fault


@pytest.mark.alone
def test_nothing_of_dead_candidates_stays_on_the_gpu(judge: Judge) -> None:
    judge(ADD, nvrtc(), "cuda-nvrtc")
    time.sleep(1.0)  # the next candidate's process is getting ready
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        judge(ADD, nvrtc(), "cuda-nvrtc")
        judge(ADD, FAULTS["illegal address"][0], "cuda-nvrtc")
    time.sleep(1.0)
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 64 << 20
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_gpu_whose_canary_fails_is_named_and_judges_nobody_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    health = GpuHealth(torch.device("cuda", 0))
    health.enter()
    health.check(0)
    monkeypatch.setattr(health, "canary", lambda: False)
    with pytest.raises(InfraError, match=r"cuda:0 .* is in quarantine"):
        health.check(0)
    with pytest.raises(InfraError, match="quarantine"):
        health.enter()


def test_weights_and_buffers_of_the_same_name_are_the_references(judge: Judge) -> None:
    later = WEIGHTS.replace("class Model(", "class ModelNew(").replace("self.linear =", "torch.randn(7); self.linear =")
    assert judge(WEIGHTS, later).verdict.fault is Fault.OK


def test_weights_of_other_names_come_from_the_same_seed(judge: Judge) -> None:
    renamed = (
        WEIGHTS.replace("class Model(", "class ModelNew(").replace("linear", "other").replace("nn.other", "nn.linear")
    )
    assert judge(WEIGHTS, renamed.replace("nn.Other", "nn.Linear")).verdict.fault is Fault.OK


def test_a_candidate_that_builds_its_weights_on_the_cpu_is_moved(judge: Judge) -> None:
    source = matmul("return x @ y + 0 * self.one.weight[0, 0]").replace(
        "self.kept = {}", "self.kept = {}; self.one = nn.Linear(1, 1, device='cpu')"
    )
    assert judge(MATMUL, source).verdict.fault is Fault.OK


def test_the_open_driver_surface_is_said_in_each_verdict(judge: Judge) -> None:
    verdict = judge(ADD, nvrtc(), "cuda-nvrtc").verdict
    assert verdict.isolation == "reduced"
    assert verdict.isolation_missing == ["gpu driver ioctl surface"]


SANDBOX = {
    "network": "import socket; socket.socket()",
    "files of the host": "open('/etc/passwd').read()",
    "another process": "import subprocess; subprocess.run(['/bin/true'])",
    "a thread": "import threading; threading.Thread(target=lambda: None).start()",
}


@pytest.mark.parametrize("what", SANDBOX)
def test_what_a_gpu_child_may_not_have(judge: Judge, what: str) -> None:
    verdict = judge(MATMUL, matmul(SANDBOX[what], "return x @ y")).verdict
    assert verdict.fault is Fault.RUNTIME_ERROR, verdict.message


RECURRENT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.hidden = torch.randn(256, n)
        self.inner = nn.Linear(2 * n, n)

    def forward(self, x, first):
        self.hidden.copy_(first)
        self.hidden = torch.tanh(self.inner(torch.cat((x, self.hidden), dim=1)))
        return self.hidden * 2

def get_inputs():
    return [torch.randn(256, 2048), torch.randn(256, 2048)]

def get_init_inputs():
    return [2048]
"""
BASE = RECURRENT[RECURRENT.index("class") : RECURRENT.index("        return self.hidden")]
RECURRENT_NEW = f"""
from kbrl_async.launch import cuda_kernel
import torch
import torch.nn as nn
{BASE.replace("class Model", "class Base")}
class ModelNew(Base):
    def __init__(self, n):
        super().__init__(n)
        self.kernel = cuda_kernel(
            'extern "C" __global__ void doubled(const float *x, float *y, int n) '
            '{{ int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] = 2 * x[i]; }}', "doubled")

    def forward(self, x, first):
        super().forward(x, first)
        y = torch.empty_like(self.hidden)
        self.kernel[y.numel() // 256, 256](self.hidden, y, y.numel())
        return y
"""


def test_a_hidden_state_that_each_call_replaces_is_there_when_a_graph_is_replayed(judge: Judge) -> None:
    """As KernelBench's L3/33: the first graph wrote to memory that had been given back."""
    verdict = judge(RECURRENT, RECURRENT_NEW, "cuda-nvrtc", timing=True).verdict
    assert verdict.fault is Fault.OK, verdict
