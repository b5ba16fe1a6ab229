import torch
import torch.nn as nn


class Model(nn.Module):
    """rms_norm over the last dimension with its neighbours fused."""

    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(cols))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x


rows = 1024  # gpu: 8192
cols = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [cols]
