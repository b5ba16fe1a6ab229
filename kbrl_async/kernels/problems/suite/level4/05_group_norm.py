import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Eight groups of channels, each to mean 0 and variance 1."""

    def forward(self, x):
        return F.group_norm(x, 8)


cols = 128  # gpu: 1024
few = 4  # gpu: 64
many = 32  # gpu: 512
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 64)}


def get_inputs(rows=few):
    return [torch.randn(rows, 32, cols)]


def get_init_inputs():
    return []
