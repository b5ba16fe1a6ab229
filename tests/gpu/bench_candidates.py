"""Problems and candidates for the GPU bench: the honest ones that attacks and faults are made from."""

from __future__ import annotations

ADD = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x, y):
        return x * 2 + y + self.shift

def get_inputs():
    return [torch.randn(1024, 512), torch.randn(1024, 512)]

def get_init_inputs():
    return [1.5]
"""
TRITON_KERNEL = """
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def shifted(x, y, out, n, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * 2 + tl.load(y + at, mask=at < n) + shift
    tl.store(out + at, value, mask=at < n)
"""
TRITON = f"""{TRITON_KERNEL}
class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x, y):
        out = torch.empty_like(x)
        shifted[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), self.shift, BLOCK=1024)
        return out
"""
_NVRTC = '''
import torch
import torch.nn as nn
from kbrl_async.launch import cuda_kernel

SOURCE = r"""
extern "C" __global__ void shifted(const float *x, const float *y, float *out, int n, float shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    BODY
}
"""

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.kernel = cuda_kernel(SOURCE, "shifted")

    def forward(self, x, y):
        n = x.numel()
        out = torch.empty_like(x)
        self.kernel[(n + 255) // 256, 256](x, y, out, n, float(self.shift))
        return RESULT
'''
GOOD = "if (i < n) out[i] = x[i] * 2 + y[i] + shift;"
MATMUL = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, y):
        return x @ y

def get_inputs():
    return [torch.randn(2048, 2048), torch.randn(2048, 2048)]

def get_init_inputs():
    return []
"""


INLINE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <torch/extension.h>
__global__ void shifted(const float *x, const float *y, float *out, int n, float shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * 2 + y[i] + shift;
}
torch::Tensor shifted_cuda(torch::Tensor x, torch::Tensor y, double shift) {
    auto out = torch::empty_like(x);
    int n = x.numel();
    shifted<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), n, shift);
    return out;
}
"""
CPP = "torch::Tensor shifted_cuda(torch::Tensor x, torch::Tensor y, double shift);"
module = load_inline(name="shifted", cpp_sources=CPP, cuda_sources=CUDA, functions=["shifted_cuda"])

class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x, y):
        return module.shifted_cuda(x, y, self.shift)
'''


def nvrtc(body: str = GOOD, result: str = "out") -> str:
    """A raw CUDA candidate for `ADD`, with another kernel body or another result."""
    return _NVRTC.replace("BODY", body).replace("RESULT", result)


def matmul(*lines: str, top: str = "") -> str:
    """A candidate for `MATMUL` whose forward consists of these lines."""
    body = "\n".join(f"        {line}" for line in lines)
    return f"""
import torch
import torch.nn as nn
{top}

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {{}}
        self.side = torch.cuda.Stream()

    def forward(self, x, y):
{body}
"""
