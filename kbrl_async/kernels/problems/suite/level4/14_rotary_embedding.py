import torch
import torch.nn as nn


class Model(nn.Module):
    """Pairs of features turned by an angle that grows with their row."""

    def forward(self, x):
        half = x.shape[1] // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[0], device=x.device)[:, None] * rates
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=1)


cols = 256  # gpu: 4096
few = 128  # gpu: 2048
many = 1024  # gpu: 16384
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
