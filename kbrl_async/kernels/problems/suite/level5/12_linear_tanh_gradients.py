import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Tanh of a linear map, with all gradients."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight, self.bias))


cols = 128  # gpu: 1024
width = cols
few = 64  # gpu: 4096
many = 512  # gpu: 8192
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
BACKWARD = "all"


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [width]
