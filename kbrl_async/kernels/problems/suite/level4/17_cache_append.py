import torch
import torch.nn as nn


class Model(nn.Module):
    """New keys behind those that are cached."""

    def forward(self, cache, x):
        return torch.cat([cache, x], dim=0)


cols = 256  # gpu: 4096
few = 1  # gpu: 1
many = 256  # gpu: 2048
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(1024, cols), torch.randn(rows, cols)]


def get_init_inputs():
    return []
