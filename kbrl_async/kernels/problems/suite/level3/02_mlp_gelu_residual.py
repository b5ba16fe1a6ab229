import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """A feed-forward block."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        y = x
        x = self.up(x)
        x = F.gelu(x)
        x = self.down(x)
        x = x + y
        return x


batch = 8  # gpu: 2048
width = 512  # gpu: 1024
hidden = 1024  # gpu: 4096


def get_inputs():
    return [torch.randn(batch, width)]


def get_init_inputs():
    return [width, hidden]
