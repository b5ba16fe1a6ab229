import torch
import torch.nn as nn


class Model(nn.Module):
    """Means of windows of eight, four apart."""

    def forward(self, x):
        return x.unfold(-1, 8, 4).mean(dim=-1)


cols = 512  # gpu: 4096
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
