import torch
import torch.nn as nn


class Model(nn.Module):
    """Rows of a table by their numbers."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1000, width))

    def forward(self, ids):
        return self.table[ids]


cols = 128  # gpu: 1024
width = cols
few = 256  # gpu: 8192
many = 4096  # gpu: 65536
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}
INPUT_DOMAINS = {"ids": {"below": 1000}}


def get_inputs(rows=few):
    return [torch.randint(0, 1000, (rows,))]


def get_init_inputs():
    return [width]
