"""Candidates in C: modules around one kernel `f(const float *x, float *y, long n)`; and a problem for them."""

from __future__ import annotations

_MODULE = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = {source!r}

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "f")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        {then}
        return y
"""
_ELEMENTWISE = """
{before}
void f(const float *x, float *y, long n) {{
  for (long i = 0; i < n; i++) y[i] = {value};
  {after}
}}
"""
COPY_AND_TANH = '''
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = """
#include <math.h>
void copied(const char *x, char *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i]; }
void curved(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = tanhf(x[i]); }
"""
copied, curved = c_kernel(SOURCE, "copied"), c_kernel(SOURCE, "curved")

def copy(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    copied(x, y, x.numel() * x.element_size())
    return y

def tanh(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    curved(x, y, x.numel())
    return y
'''
"""What candidates begin with whose own code is a copy of anything, or a tanh of floats."""
_AFFINE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return x * {factor} + 1

def get_inputs():
    return [torch.randn({shape})]

def get_init_inputs():
    return []
"""


def affine(factor: int = 2, shape: str = "16, 33") -> str:
    """A problem: `elementwise("2 * x[i] + 1")` solves it for the factor 2."""
    return _AFFINE.format(factor=factor, shape=shape)


def in_c(source: str, then: str = "pass") -> str:
    """`then`: what its `forward` does once the kernel has run."""
    return _MODULE.format(source=source, then=then)


def elementwise(value: str, before: str = "#include <math.h>", after: str = "") -> str:
    """`value` of each element, in terms of `x[i]`; `before` the kernel and `after` its loop may stand more C."""
    return in_c(_ELEMENTWISE.format(value=value, before=before, after=after))
