import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Class numbers as rows with one 1."""

    def forward(self, ids):
        return F.one_hot(ids, 64).to(torch.float32)


few = 512  # gpu: 65536
many = 8192  # gpu: 262144
WORKLOADS = [{"shape": {"rows": few}, "weight": 3}, {"shape": {"rows": many}}]
FREE_SHAPES = {"rows": (0, 2048)}
INPUT_DOMAINS = {"ids": {"below": 64}}


def get_inputs(rows=few):
    return [torch.randint(0, 64, (rows,))]


def get_init_inputs():
    return []
