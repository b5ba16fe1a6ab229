"""Three modules as people write them, none of any suite: for `kbrl optimize`."""

import math

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 1.0 / math.sqrt(64)


def bias_gelu_residual(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The epilogue of a transformer's MLP."""
    return F.gelu(x + bias) + residual


class MaskedSoftmax(nn.Module):
    """Attention weights: scale, add the mask, normalise each row."""

    def __init__(self, temperature: float = 2.0):
        super().__init__()
        self.temperature = temperature

    def forward(self, scores, mask):
        scores = scores * SCALE / self.temperature
        return torch.softmax(scores + mask, dim=-1)


def huber_rows(prediction, target):
    """One loss per row, to be weighed later."""
    error = (prediction - target).abs()
    loss = torch.where(error < 1.0, 0.5 * error * error, error - 0.5)
    return loss.mean(dim=-1)


def make_pairs():
    """Inputs of `huber_rows`."""
    return [torch.randn(512, 1024), torch.rand(512, 1024)]
