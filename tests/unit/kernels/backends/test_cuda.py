"""Backend `cuda`, built the fast way on a host without a GPU. Skipped, with the reason, where nvcc is not installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.building.context import ToolRun
from kbrl_async.kernels.backends.inline.build import Build, BuildAttempt
from kbrl_async.kernels.backends.launch import elf
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault

CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
template <typename scalar_t>
__global__ void scale(const scalar_t* x, scalar_t* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = static_cast<scalar_t>(2.0f * static_cast<float>(__ldg(x + i)));
}
torch::Tensor run(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "scale", [&] {
    scale<scalar_t><<<(x.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""
CPP = "torch::Tensor run(torch::Tensor x);"
extension = load_inline(name="n", cpp_sources=CPP, cuda_sources=CUDA, functions=["run"])

class ModelNew(nn.Module):
    def forward(self, x):
        return extension.run(x)
'''


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    missing = backend("cuda").missing()
    if missing:
        pytest.skip(missing)
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


def built(builder: Builder, source: str) -> bytes:
    report = builder.build(Candidate(source, "cuda"))
    assert report.fault is Fault.OK, report.message
    (path,) = (builder.store.path(address) for address in report.artifacts.values())
    assert path is not None
    return path.read_bytes()


@pytest.fixture
def never_full(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToolRun(1, "cuda.cu(1): error: from the full build", "full", 1.0)
    monkeypatch.setattr(Build, "full", lambda self, suspects=(): BuildAttempt(run=run))


@pytest.mark.usefixtures("never_full")
def test_a_cuda_candidate_is_built_without_a_gpu(builder: Builder) -> None:
    report = builder.build(Candidate(CANDIDATE, "cuda"))
    assert (report.fault, report.message) == (Fault.OK, "")
    assert report.kernels == ["scale"]
    assert report.toolchain.endswith(" sm_90 fast")


@pytest.mark.usefixtures("never_full")
def test_atomics_and_headers_that_others_name_need_no_full_build(builder: Builder) -> None:
    """66 of 69 files of two libraries of CUDA operators were built in full, most for the first of these."""
    names = ("ATen/cuda/Atomic.cuh", "ATen/DeviceGuard.h", "ATen/core/TensorBase.h", "torch/serialize/tensor.h")
    includes = "".join(f"#include <{name}>\n" for name in names)
    kinds = ("float", "double", "int", "int64_t", "at::Half", "at::BFloat16", "uint8_t", "int8_t", "int16_t")
    adds = "".join(
        f"__global__ void add{n}({kind}* x) {{ gpuAtomicAdd(x, {kind}(1)); atomicAdd(x, {kind}(1)); }}\n"
        for n, kind in enumerate(kinds)
    )
    report = builder.build(
        Candidate(CANDIDATE.replace("torch::Tensor run", includes + adds + "torch::Tensor run", 1), "cuda")
    )
    assert (report.fault, report.message) == (Fault.OK, "")
    assert {f"add{n}" for n in range(len(kinds))} <= set(report.kernels)


@pytest.mark.usefixtures("never_full")
def test_what_a_capture_must_hold_is_on_the_threads_own_stream_and_waits_for_nothing(builder: Builder) -> None:
    """So that a forward over an extension can be captured: as it was built, `<<<…>>>` alone was in no graph. Host code
    beside the kernels is built by another compiler; it copies, so that its calls are told from theirs."""
    source = CANDIDATE.replace(", 0, at::cuda::getCurrentCUDAStream()", "")
    source = source.replace("  return y;", "  cudaMemsetAsync(nullptr, 0, 0);\n  cudaDeviceSynchronize();\n  return y;")
    copy = "void copy() { cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDefault, 0); }"
    names = elf.needed_names(
        built(builder, source.replace('CPP = "', f'CPP = "#include <cuda_runtime_api.h>\\n{copy}\\n'))
    )
    assert {"cudaMemsetAsync_ptsz", "cudaMemcpyAsync_ptsz", "cudaStreamIsCapturing"} <= set(names)
    assert {"cudaMemsetAsync", "cudaMemcpyAsync"}.isdisjoint(names)


@pytest.mark.usefixtures("never_full")
def test_a_candidate_may_choose_the_stream_that_all_threads_share(builder: Builder) -> None:
    source = CANDIDATE.replace("functions=", 'extra_cuda_cflags=["--default-stream=legacy"], functions=')
    source = source.replace("  return y;", "  cudaMemsetAsync(nullptr, 0, 0);\n  return y;")
    assert "cudaMemsetAsync" in elf.needed_names(built(builder, source))


@pytest.mark.usefixtures("never_full")
def test_the_machine_code_of_an_extension_is_found_in_it(builder: Builder) -> None:
    (container,) = elf.fatbins(built(builder, CANDIDATE))
    assert container.startswith(b"\x50\xed\x55\xba")


@pytest.mark.usefixtures("never_full")
@pytest.mark.parametrize("change", [("y[i] =", "z[i] ="), ("__global__ void scale(", "__global__ void other(")])
def test_what_does_not_compile_is_left_to_the_full_build(builder: Builder, change: tuple[str, str]) -> None:
    report = builder.build(Candidate(CANDIDATE.replace(*change), "cuda"))
    assert (report.fault, report.message) == (Fault.COMPILE_ERROR, "cuda.cu(1): error: from the full build")
