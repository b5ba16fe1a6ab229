import torch
import torch.nn as nn


class Model(nn.Module):
    """Mean of a row's valid elements."""

    def forward(self, x, valid):
        total = (x * valid).sum(dim=-1)
        return total / valid.sum(dim=-1).clamp(min=1.0)


cols = 256  # gpu: 4096
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols), (torch.rand(rows, cols) < 0.7).to(torch.float32)]


def get_init_inputs():
    return []
