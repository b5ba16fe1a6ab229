import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Four channels become one of twice the height and width."""

    def forward(self, x):
        return F.pixel_shuffle(x, 2)


cols = 32  # gpu: 64
few = 2  # gpu: 256
many = 8  # gpu: 1024
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 16)}


def get_inputs(rows=few):
    return [torch.randn(rows, 16, cols, cols)]


def get_init_inputs():
    return []
