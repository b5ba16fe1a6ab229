import torch
import torch.nn as nn


class Model(nn.Module):
    """Softmax down the columns."""

    def forward(self, x):
        return torch.softmax(x, dim=0)


cols = 256  # gpu: 4096
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
