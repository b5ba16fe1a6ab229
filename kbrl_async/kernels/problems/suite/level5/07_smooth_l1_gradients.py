import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Smooth L1 distance of elements, with the gradients."""

    def forward(self, x, y):
        return F.smooth_l1_loss(x, y, reduction="none")


cols = 256  # gpu: 4096
few = 64  # gpu: 4096
many = 512  # gpu: 8192
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
BACKWARD = "inputs"


def get_inputs(rows=few):
    return [torch.randn(rows, cols), torch.randn(rows, cols)]


def get_init_inputs():
    return []
