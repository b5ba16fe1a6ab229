import torch
import torch.nn as nn


class Model(nn.Module):
    """A small product for each batch entry."""

    def forward(self, x, y):
        return torch.bmm(x, y)


few = 8  # gpu: 512
many = 64  # gpu: 4096
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 100)}


def get_inputs(rows=few):
    return [torch.randn(rows, 32, 48), torch.randn(rows, 48, 16)]


def get_init_inputs():
    return []
