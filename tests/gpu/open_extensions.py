"""Candidates whose kernels lie in extensions, by how these launch them: see `open_candidates`."""

from __future__ import annotations

from tests.gpu.open_candidates import OpenStyle, model

_FILE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
KERNELS
torch::Tensor run(torch::Tensor x, torch::Tensor y, double shift) {
    auto out = torch::empty_like(x);
    const float *a = x.data_ptr<float>(), *b = y.data_ptr<float>();
    float *c = out.data_ptr<float>(), s = shift;
    int n = x.numel();
    cudaStream_t stream = at::cuda::getCurrentCUDAStream();
LAUNCH
    return out;
}
"""
CPP = "torch::Tensor run(torch::Tensor x, torch::Tensor y, double shift);"

def built(name, **more):
    return load_inline(name=name, cpp_sources=CPP, cuda_sources=CUDA, functions=["run"], **more)
'''
_SHIFTED = """
__global__ void shifted(const float *x, const float *y, float *out, int n, float shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + y[i] + shift;
}
"""
_PLAIN = "shifted<<<(n + 255) / 256, 256, 0, stream>>>(a, b, c, n, s);"
_TOGETHER = """
#include <cooperative_groups.h>
__global__ void together(const float *x, const float *y, float *out, int n, float shift) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
    for (int i = first; i < n; i += all) out[i] = x[i] * 2;
    cooperative_groups::this_grid().sync();
    for (int i = first; i < n; i += all) out[n - 1 - i] += y[n - 1 - i] + shift;
}
"""
_PAIRED = """
#include <cooperative_groups.h>
__global__ void DIMS paired(const float *x, const float *y, float *out, int n, float shift) {
    __shared__ float held[256];
    auto cluster = cooperative_groups::this_cluster();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    held[threadIdx.x] = i < n ? x[i] * 2 : 0;
    cluster.sync();
    const float *theirs = cluster.map_shared_rank(held, cluster.block_rank() ^ 1);
    int j = (blockIdx.x ^ 1) * blockDim.x + threadIdx.x;
    if (j < n) out[j] = theirs[threadIdx.x] + y[j] + shift;
    cluster.sync();
}
"""
_GIVEN = "void *given[] = {&a, &b, &c, &n, &s};"
_EX = """
    cudaLaunchAttribute pair = {};
    pair.id = cudaLaunchAttributeClusterDimension;
    pair.val.clusterDim.x = 2, pair.val.clusterDim.y = 1, pair.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((n + 511) / 512 * 2), config.blockDim = dim3(256), config.stream = stream;
    config.attrs = &pair, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, paired, a, b, c, n, s);
"""
_BY_DRIVER = f"""
    cudaFunction_t found;
    cudaGetFuncBySymbol(&found, (const void *)shifted);
    {_GIVEN}
    cuLaunchKernel((CUfunction)found, (n + 255) / 256, 1, 1, 256, 1, 1, 0, stream, given, nullptr);
"""
_BY_ENTRY_POINT = f"""
    typedef CUresult (*Launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    static void *entry = nullptr;
    cudaDriverEntryPointQueryResult state;
    if (!entry) cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, 12000, cudaEnableDefault, &state);
    cudaFunction_t found;
    cudaGetFuncBySymbol(&found, (const void *)shifted);
    {_GIVEN}
    CUlaunchConfig config = {{}};
    config.gridDimX = (n + 255) / 256, config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 256, config.blockDimY = config.blockDimZ = 1, config.hStream = stream;
    ((Launch)entry)(&config, (CUfunction)found, given, nullptr);
"""
_STREAMS = """
    static cudaStream_t side = nullptr;
    static cudaEvent_t begun, done;
    if (!side) {
        cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
        cudaEventCreateWithFlags(&begun, cudaEventDisableTiming);
        cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
    }
    int half = n / 2;
    cudaEventRecord(begun, stream);
    cudaStreamWaitEvent(side, begun, 0);
    shifted<<<(half + 255) / 256, 256, 0, side>>>(a, b, c, half, s);
    shifted<<<(n - half + 255) / 256, 256, 0, stream>>>(a + half, b + half, c + half, n - half, s);
    cudaEventRecord(done, side);
    cudaStreamWaitEvent(stream, done, 0);
"""
_ADDED = """
import triton
import triton.language as tl

@triton.jit
def added(x, out, n, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + shift, mask=at < n)
"""
_RUN = "out = self.built.run(x, y, self.shift)"
_AT_ONCE = 'self.built = built("one")'


def extension(kernels: str = _SHIFTED, launch: str = _PLAIN) -> str:
    return _FILE.replace("KERNELS", kernels).replace("LAUNCH", launch)


def launched(kernels: str, launch: str) -> OpenStyle:
    return OpenStyle(extension(kernels, launch) + model(_RUN, init=_AT_ONCE))


def several(other: str = "added") -> str:
    """The first is built at import; the other, whose kernel has this name, at the first forward."""
    return (
        extension()
        + f'FIRST = built("one")\nCUDA = CUDA.replace("shifted", "{other}").replace("x[i] * 2", "x[i] - y[i]")\n'
        + model(
            'if self.other is None: self.other = built("two", extra_cuda_cflags=["-O2"])',
            "out = self.other.run(FIRST.run(x, y, 0.0), y, self.shift)",
            init="self.other = None",
        )
    )


EXTENSION_STYLES = {
    "beside Triton": OpenStyle(
        extension()
        + _ADDED
        + model(
            "sums = self.built.run(x, y, 0.0)",
            "out = torch.empty_like(x)",
            "added[(triton.cdiv(x.numel(), 1024),)](sums, out, x.numel(), self.shift, BLOCK=1024)",
            init=_AT_ONCE,
        )
    ),
    "built at the first forward": OpenStyle(
        extension() + model("if self.built is None: " + _AT_ONCE, _RUN, init="self.built = None")
    ),
    "several extensions": OpenStyle(several()),
    "several extensions, one kernel's name": OpenStyle(
        several("shifted"), trust="", unproven="two extensions have a kernel"
    ),
    "cooperative": launched(
        _TOGETHER,
        f"{_GIVEN} cudaLaunchCooperativeKernel((const void *)together, dim3(64), dim3(256), given, 0, stream);",
    ),
    "a cluster, as declared": launched(
        _PAIRED.replace("DIMS", "__cluster_dims__(2, 1, 1)"),
        "paired<<<(n + 511) / 512 * 2, 256, 0, stream>>>(a, b, c, n, s);",
    ),
    "a cluster, by cudaLaunchKernelEx": launched(_PAIRED.replace("DIMS", ""), _EX),
    "cuLaunchKernel": OpenStyle(
        extension("#include <cuda.h>" + _SHIFTED, _BY_DRIVER)
        + model(_RUN, init='self.built = built("one", extra_ldflags=["-lcuda"])'),
        needs="libcuda",
    ),
    "cuLaunchKernelEx, by its entry point": launched("#include <cuda.h>" + _SHIFTED, _BY_ENTRY_POINT),
    "several streams": launched(_SHIFTED, _STREAMS),
}
