import torch
import torch.nn as nn


class Model(nn.Module):
    """Squared ReLU, with its gradient."""

    def forward(self, x):
        x = torch.relu(x)
        return x * x


cols = 256  # gpu: 4096
few = 64  # gpu: 4096
many = 512  # gpu: 8192
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
BACKWARD = "inputs"


def get_inputs(rows=few):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
