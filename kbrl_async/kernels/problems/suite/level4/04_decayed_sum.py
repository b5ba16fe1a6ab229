import torch
import torch.nn as nn


class Model(nn.Module):
    """Each element with what is left of those before it in its row."""

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        age = steps[:, None] - steps[None, :]
        weights = torch.where(age >= 0, 0.9 ** age.clamp(min=0).to(x.dtype), 0.0)
        return x @ weights.t()


cols = 128  # gpu: 1024
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
