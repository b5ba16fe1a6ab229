import torch
import torch.nn as nn


class Model(nn.Module):
    """Root mean square norm with a gain, with all gradients."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * self.gain


cols = 256  # gpu: 4096
width = cols
few = 64  # gpu: 4096
many = 512  # gpu: 8192
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
BACKWARD = "all"


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [width]
