import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Layer norm without gain, in float16."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:])


cols = 256  # gpu: 4096
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 2048)}
DTYPE = "float16"


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
