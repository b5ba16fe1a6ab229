import torch
import torch.nn as nn


class Model(nn.Module):
    """Channels of four groups, dealt in turn."""

    def forward(self, x):
        n, c, *rest = x.shape
        return x.reshape(n, 4, c // 4, *rest).transpose(1, 2).reshape(n, c, *rest)


cols = 256  # gpu: 4096
few = 4  # gpu: 128
many = 32  # gpu: 512
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 64)}


def get_inputs(rows=few):
    return [torch.randn(rows, 32, cols)]


def get_init_inputs():
    return []
