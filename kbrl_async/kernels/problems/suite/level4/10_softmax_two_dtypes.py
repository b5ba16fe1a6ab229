import torch
import torch.nn as nn


class Model(nn.Module):
    """Softmax of rows for callers in two precisions."""

    def forward(self, x):
        return torch.softmax(x, dim=-1)


cols = 256  # gpu: 4096
WORKLOADS = [
    {"name": "training", "shape": {"rows": 1024}, "dtype": "bfloat16", "weight": 3},
    {"name": "serving", "shape": {"rows": 128}, "dtype": "float16"},
    {"name": "checks", "shape": {"rows": 128}, "role": "checked"},
]
FREE_SHAPES = {"rows": (0, 2048)}


def get_inputs(rows=128):
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
