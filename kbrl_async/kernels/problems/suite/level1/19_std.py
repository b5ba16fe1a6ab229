import torch
import torch.nn as nn


class Model(nn.Module):
    """std over the last dimension with its neighbours fused."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = x.std(dim=-1)
        return x


rows = 64  # gpu: 4096
cols = 1024  # gpu: 8192


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
