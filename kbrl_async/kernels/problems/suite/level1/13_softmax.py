import torch
import torch.nn as nn


class Model(nn.Module):
    """softmax over the last dimension with its neighbours fused."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = torch.softmax(x, dim=-1)
        return x


rows = 704  # gpu: 8192
cols = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
