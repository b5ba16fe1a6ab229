import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """rms_norm over the last dimension with its neighbours fused."""

    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(cols))

    def forward(self, x, y):
        x = x + y
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        x = F.silu(x)
        return x


rows = 512  # gpu: 8192
cols = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(rows, cols), torch.randn(rows, cols)]


def get_init_inputs():
    return [cols]
