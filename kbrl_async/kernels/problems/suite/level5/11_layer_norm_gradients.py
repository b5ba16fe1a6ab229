import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Layer norm with gain and shift, with all gradients."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gain, self.shift)


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
