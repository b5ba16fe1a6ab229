"""What of the GPU bench needs no GPU: batches, names of kernels, places of outputs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kbrl_async.kernels.verify.cuda import device
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.cuda.reference import MAX_BATCH, plan
from kbrl_async.kernels.verify.cuda.session import _place_outputs
from kbrl_async.kernels.verify.wire import TensorMeta

GB = 1 << 30


def test_a_short_kernel_is_timed_in_a_batch_and_a_long_one_alone() -> None:
    assert plan(4_000, 1 << 20, 80 * GB, 3).batch == MAX_BATCH
    assert plan(100_000, 1 << 20, 80 * GB, 3).batch == 6
    assert plan(5_000_000, 1 << 20, 80 * GB, 3).batch == 1


def test_a_batch_ends_where_memory_does() -> None:
    assert plan(4_000, GB, 80 * GB, 3).batch == 4


def test_large_inputs_get_fewer_slots_but_never_the_same_twice_in_a_row() -> None:
    assert plan(5_000_000, 12 * GB, 80 * GB, 3).slots == 2


@pytest.mark.parametrize(
    ("kernel", "source"),
    [
        ("add_kernel", "@triton.jit\ndef add_kernel(x): pass"),
        ("_Z3addPKfS0_Pfi", "__global__ void add(const float*a) {}"),
        ("_ZN2my5scaleIfEEvPKT_", "template <typename T>\n__global__ void scale(const T *x) {}"),
        ("void my::scale<float>(float const*)", "template <typename T> __global__ void scale(const T *x) {}"),
        ("bounded", "__global__ void __launch_bounds__(256) bounded(float *x) {}"),
    ],
)
def test_a_kernel_that_the_source_defines_is_its_own(kernel: str, source: str) -> None:
    assert cuda_proof.own_kernels([kernel], source) == [kernel]


@pytest.mark.parametrize(
    "kernel",
    [
        "_ZN2at6native29vectorized_elementwise_kernelILi4EE",
        "ampere_sgemm_128x64_nn",
        "_ZN7cutlass7Kernel2I43cutlass_80_simt_sgemm_256x128_8x4_nn_align1EEvNT_6ParamsE",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
        "somebody_elses",
    ],
)
def test_a_librarys_kernel_is_not_its_own_even_where_the_source_defines_its_name(kernel: str) -> None:
    source = "def ampere_sgemm_128x64_nn(): pass\ndef cutlass(): pass\ndef Kernel2(): pass\n# somebody_elses\n"
    assert cuda_proof.own_kernels([kernel], source) == []


def test_a_kernel_named_in_a_comment_only_is_not_defined() -> None:
    assert cuda_proof.defined("/* __global__ void add(float *x) {} */") == set()


def test_a_share_is_told_where_time_tells_it_or_there_is_nothing_else() -> None:
    mixed, own = {"mine": 1, "aten::mm": 1}, ["mine"]
    assert cuda_proof.told_share(mixed, own, 100_000.0, 75_000.0) == 0.25
    assert cuda_proof.told_share(mixed, own, 10_000.0, 7_500.0) is None
    assert cuda_proof.told_share({"mine": 1}, own, 10_000.0, 9_000.0) == 1.0


def test_own_kernels_next_to_nothing_are_decoys_where_time_says_something() -> None:
    names = {"mine": 1, "ampere_sgemm": 1}
    assert cuda_proof.of_share(names, ["mine"], 100_000, 99_900) is not None
    assert cuda_proof.of_share(names, ["mine"], 100_000, 90_000) is None
    assert cuda_proof.of_share(names, ["mine"], 5_000, 5_000) is None


def test_what_is_loaded_before_a_fork_never_asks_for_a_gpu() -> None:
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = lambda: 1 / 0; import sys; "
    code += "import kbrl_async.kernels.verify.cuda.runner; assert 'torch.utils.cpp_extension' in sys.modules"
    environment = {"CUDA_HOME": "/nowhere", "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_outputs_of_slots_do_not_overlap_and_a_wide_version_of_one_slot_fits() -> None:
    outs = [TensorMeta("float32", (3, 5), (5, 1), 0), TensorMeta("float16", (7,), (1,), 0)]
    placed, end = _place_outputs(outs, 1, 1024, True)
    assert [(meta.place, step) for meta, step in placed] == [(1024, 512), (1536, 512)]
    assert end == 2048
    big = [TensorMeta("float32", (4096,), (1,), 0)]
    assert _place_outputs(big, 1, 0, True)[1] == 4096 * 8
    assert _place_outputs(big, 1, 0, False)[1] == 4096 * 4, "of a candidate nobody asks for fp64"


def test_a_bench_takes_no_more_of_its_gpu_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: taken.append(given))
    monkeypatch.setattr(device, "GpuHealth", lambda where: None)
    monkeypatch.setattr(device, "Passes", lambda where: None)
    monkeypatch.setattr(device, "reservations_on", lambda where: None)
    monkeypatch.setattr("kbrl_async.kernels.verify.fused.use", lambda where, way: None)
    device.CudaDevice("cuda:1").open(0.25)
    assert taken == [(0.25, torch.device("cuda", 1))]
