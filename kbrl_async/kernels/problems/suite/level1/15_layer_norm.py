import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """layer_norm over the last dimension with its neighbours fused."""

    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(cols))
        self.bias = nn.Parameter(torch.rand(cols))

    def forward(self, x):
        x = F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)
        return x


rows = 1024  # gpu: 8192
cols = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [cols]
