import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """max over the last dimension with its neighbours fused."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = F.selu(x)
        x = x.max(dim=-1).values
        return x


rows = 256  # gpu: 4096
cols = 1024  # gpu: 8192


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
