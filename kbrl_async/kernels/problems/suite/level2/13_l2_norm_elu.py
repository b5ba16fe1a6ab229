import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """l2_norm over the last dimension with its neighbours fused."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        x = x / (x.norm(dim=-1, keepdim=True) + 1e-6)
        x = F.elu(x)
        return x


rows = 288  # gpu: 8192
cols = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
