import torch
import torch.nn as nn


class Model(nn.Module):
    """logsumexp over the last dimension with its neighbours fused."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = x * 0.5
        x = torch.logsumexp(x, dim=-1)
        x = torch.relu(x)
        return x


rows = 288  # gpu: 4096
cols = 1024  # gpu: 8192


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
