"""The problems that the honest candidates solve."""

from __future__ import annotations

SOFTMAX = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return torch.softmax(x * self.weight, dim=-1)

def get_inputs():
    return [torch.randn(12, 67)]

def get_init_inputs():
    return [67]
"""

LINEAR = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.linear = nn.Linear(n, m)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(9, 31)]

def get_init_inputs():
    return [[31, 17], {}]
"""

TOP_TWO = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, index):
        return x.index_select(0, index), (x * 2, 3)

def get_inputs():
    return [torch.randn(5, 7), torch.randint(0, 5, (4,))]

def get_init_inputs():
    return []
"""

IN_PLACE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return x.mul_(2).add_(1)

def get_inputs():
    return [torch.randn(6, 50)]

def get_init_inputs():
    return []
"""

PRODUCT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, a, b):
        return torch.matmul(a, b)

def get_inputs():
    return [torch.randn(24, 300), torch.randn(300, 20)]

def get_init_inputs():
    return []
"""

HALF = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return x.float().sum(dim=-1).to(torch.bfloat16)

def get_inputs():
    return [torch.randn(16, 40).to(torch.bfloat16)]

def get_init_inputs():
    return []
"""

NORM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return self.norm(x)

def get_inputs():
    return [torch.rand(10, 6, 48) * 3 + 5]

def get_init_inputs():
    return [48]
"""

TRIANGULAR = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, a, b):
        return torch.tril(torch.matmul(a, b))

def get_inputs():
    return [torch.tril(torch.randn(33, 33)), torch.tril(torch.randn(33, 33))]

def get_init_inputs():
    return []
"""

ARGMAX = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return {"place": torch.argmax(x, dim=-1), "value": x.max(dim=-1).values}

def get_inputs():
    return [torch.randn(20, 30)]

def get_init_inputs():
    return []
"""

RELU_OF_POSITIVE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(20, 30)]

def get_init_inputs():
    return []
"""
