import torch
import torch.nn as nn


class Model(nn.Module):
    """Each image of each channel to mean 0 and variance 1."""

    def forward(self, x):
        mean = x.mean(dim=(-2, -1), keepdim=True)
        spread = x.var(dim=(-2, -1), unbiased=False, keepdim=True)
        return (x - mean) * torch.rsqrt(spread + 1e-5)


cols = 32  # gpu: 64
few = 2  # gpu: 16
many = 8  # gpu: 128
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 16)}


def get_inputs(rows=few):
    return [torch.randn(rows, 16, cols, cols)]


def get_init_inputs():
    return []
