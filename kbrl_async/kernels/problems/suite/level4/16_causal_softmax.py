import torch
import torch.nn as nn


class Model(nn.Module):
    """Softmax over what is not in the future."""

    def forward(self, x):
        steps = torch.arange(x.shape[-1], device=x.device)
        future = steps[None, :] > steps[:, None]
        return torch.softmax(x.masked_fill(future, float("-inf")), dim=-1)


few = 64  # gpu: 512
many = 256  # gpu: 2048
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (1, 300)}


def get_inputs(rows=few):
    return [torch.randn(4, rows, rows)]


def get_init_inputs():
    return []
