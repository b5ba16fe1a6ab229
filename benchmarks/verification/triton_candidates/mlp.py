"""KernelBench level 3 problem 1: three linear layers, each with its bias and ReLU in one kernel."""

# ruff: noqa: N803 - constants of a kernel are written large
import itertools

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def layer_kernel(x, w, bias, out, m, n, k, RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.cdiv(m, BM)
    i = (tl.program_id(0) % rows) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) // rows) * BN + tl.arange(0, BN)
    p = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        q = start + p
        left = tl.load(x + i[:, None] * k + q[None, :], mask=(i[:, None] < m) & (q[None, :] < k), other=0.0)
        right = tl.load(w + j[None, :] * k + q[:, None], mask=(j[None, :] < n) & (q[:, None] < k), other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32x3")
    total += tl.load(bias + j, mask=j < n, other=0.0)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    tl.store(out + i[:, None] * n + j[None, :], total, mask=(i[:, None] < m) & (j[None, :] < n))


def layer(x: torch.Tensor, linear: nn.Linear, relu: bool) -> torch.Tensor:
    m, k = x.shape
    n = linear.weight.shape[0]
    out = torch.empty((m, n), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(m, 128) * triton.cdiv(n, 64),)
    layer_kernel[grid](
        x, linear.weight, linear.bias, out, m, n, k, RELU=relu, BM=128, BN=64, BK=32, num_warps=4, num_stages=4
    )
    return out


class ModelNew(nn.Module):
    def __init__(self, input_size, layer_sizes, output_size):
        super().__init__()
        sizes = [input_size, *layer_sizes]
        layers = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        layers.append(nn.Linear(sizes[-1], output_size))
        self.network = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linears = [module for module in self.network if isinstance(module, nn.Linear)]
        for linear in linears[:-1]:
            x = layer(x, linear, True)
        return layer(x, linears[-1], False)
