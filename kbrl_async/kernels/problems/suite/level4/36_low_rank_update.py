import torch
import torch.nn as nn


class Model(nn.Module):
    """Rows and what a low-rank map makes of them."""

    def __init__(self, width):
        super().__init__()
        self.down = nn.Parameter(torch.randn(width, 8) * 0.1)
        self.up = nn.Parameter(torch.randn(8, width) * 0.1)

    def forward(self, x):
        return x + (x @ self.down) @ self.up


cols = 256  # gpu: 1024
width = cols
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [width]
