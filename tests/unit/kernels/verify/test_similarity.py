"""Pasted reference code is found under other names; own code of the same shape is not."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.verify.similarity import copied_reference

REFERENCE = '''
import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 0.5

def helper(value, factor):
    return value * factor

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(n, n)

    def forward(self, x):
        return F.relu(self.linear(x))

class Model(nn.Module):
    """The reference."""

    def __init__(self, n: int):
        super(Model, self).__init__()
        self.block = Block(n)
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled block."""
        hidden = self.block(x)  # (batch, n)
        return torch.softmax(helper(hidden, SCALE) * self.gain, dim=-1)
'''
RENAMED = """
from torch import nn
import torch as t
from torch.nn import functional

class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight_of_mine = nn.Parameter(t.ones(width))
        self.unused = nn.ReLU()
        self.inner = Inner(width)

    @t.no_grad()
    def forward(self, inputs):
        values: t.Tensor = self.inner(inputs)
        return t.softmax(times(values, HALF) * self.weight_of_mine, dim=-1)

class Inner(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, y):
        return functional.relu(self.fc(y))

def times(a, b):
    '''Other words.'''
    return a * b

HALF = 0.5
"""


@pytest.mark.parametrize(
    "candidate",
    [
        REFERENCE.replace("class Model(", "class ModelNew(").replace("super(Model", "super(ModelNew"),
        RENAMED,
        REFERENCE + "\nModelNew = Model\n",
        REFERENCE + "\nclass ModelNew(Model):\n    pass\n",
    ],
)
def test_the_references_code_is_found_under_other_names(candidate: str) -> None:
    assert "equal up to names" in copied_reference(REFERENCE, candidate)


OWN_FORWARD = REFERENCE.replace("class Model(", "class ModelNew(").replace(
    "return torch.softmax(helper(hidden, SCALE) * self.gain, dim=-1)", "return self.kernel(hidden, self.gain)"
)
OWN_SUBMODULE = RENAMED.replace("return functional.relu(self.fc(y))", "return run_kernel(self.fc.weight, y)")


@pytest.mark.parametrize(
    "candidate",
    [
        OWN_FORWARD,
        OWN_SUBMODULE,
        RENAMED.replace("HALF = 0.5", "HALF = 0.25"),
        RENAMED.replace("dim=-1", "dim=0"),
        RENAMED.replace("nn.Linear(size, size)", "OwnLinear(size, size)"),
        REFERENCE + "\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        return kernel(x)\n",
        "class ModelNew: pass",
        "this is no Python",
    ],
)
def test_what_computes_something_of_its_own_is_no_copy(candidate: str) -> None:
    assert copied_reference(REFERENCE, candidate) == ""


def test_the_same_short_forward_over_an_own_submodule_is_no_copy() -> None:
    short = "import torch.nn as nn\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    short += "        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())\n"
    short += "    def forward(self, x):\n        return self.net(x)\n"
    own = short.replace("class Model", "class ModelNew").replace("nn.ReLU()", "OwnReLU()")
    own += "class OwnReLU(nn.Module):\n    def forward(self, x):\n        return kernel(x)\n"
    assert copied_reference(short, short.replace("class Model", "class ModelNew"))
    assert copied_reference(short, own) == ""


NETWORK = """
import torch.nn as nn

class Block(nn.Module):
    def __init__(self, n):
        super(Block, self).__init__()
        self.linear = nn.Linear(n, n)

    def forward(self, x):
        out = self.linear(x)
        out += x
        return out

class Model(nn.Module):
    def __init__(self, n, layers):
        super(Model, self).__init__()
        block = Block
        self.first = self._make_layer(block, n, layers)
        self.rest = nn.ModuleList()
        for _ in range(layers):
            self.rest.append(block(n))

    def _make_layer(self, block, n, layers):
        return nn.Sequential(*[block(n) for _ in range(layers)])

    def forward(self, x):
        x = self.first(x)
        for one in self.rest:
            x = one(x)
        return x
"""
COPY = NETWORK.replace("class Model(", "class ModelNew(").replace("super(Model,", "super(ModelNew,")
APPENDED = COPY.replace("        block = Block\n", "").replace("block(n))", "Block(n))")


@pytest.mark.parametrize(
    "own",
    [
        COPY.replace("out += x", "out = kernel(out, x)"),
        APPENDED.replace("out += x", "out = kernel(out, x)"),
        COPY.replace("nn.Sequential(*[block(n)", "nn.Sequential(Own(), *[block(n)") + "\nclass Own: ...\n",
        COPY.replace("append(block(n))", "append(own)") + "\nclass Own: ...\nown = Own()\n",
    ],
)
def test_a_block_of_its_own_that_a_local_name_or_a_loop_brings_in_is_no_copy(own: str) -> None:
    """An honest network was accused: the addition in its blocks was its own kernel."""
    assert copied_reference(NETWORK, COPY), "the copy is one"
    assert copied_reference(NETWORK, own) == ""


COPIED = REFERENCE.replace("class Model(", "class ModelNew(").replace("super(Model", "super(ModelNew")
OWN = """
kernel = c_kernel("...", "f")
def own(self, x):
    return kernel(x)
"""


@pytest.mark.parametrize(
    "candidate",
    [
        COPIED + OWN + "ModelNew.forward = own\n",
        COPIED + OWN + "setattr(ModelNew, 'forward', own)\n",
        COPIED + OWN + "for name in ['forward']:\n    setattr(ModelNew, name, own)\n",
        COPIED + OWN + "torch.softmax = own\n",
        COPIED + OWN + "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('_softmax', own, 'CPU')\n",
        COPIED + OWN.replace("def own", "@torch.library.impl('aten::_softmax', 'CPU')\ndef own"),
        COPIED + OWN + "class F:\n    relu = own\n",
        (OWN + COPIED).replace("class ModelNew", "@with_kernels\nclass ModelNew") + "def with_kernels(made): ...\n",
        (OWN + COPIED).replace("ModelNew(nn.Module)", "ModelNew(nn.Module, metaclass=Fused)") + "class Fused: ...\n",
        REFERENCE + OWN + "class ModelNew(Model):\n    forward = own\n",
        REFERENCE + "class Own:\n    def forward(self, x):\n        return 2\nclass ModelNew(Own, Model): ...\n",
        REFERENCE + "from parts import Own\nclass ModelNew(Own, Model): ...\n",
        COPIED.replace("self.gain = ", "self.forward = self.fused\n        self.gain = ")
        + "    def fused(self, x):\n        return self.kernel(x)\n",
        COPIED.replace("self.gain = ", "self.register_forward_hook(self.fused)\n        self.gain = ")
        + "    def fused(self, x):\n        return self.kernel(x)\n",
        COPIED + "    def __call__(self, x):\n        return self.kernel(x)\n",
    ],
)
def test_own_code_that_is_put_in_place_of_the_references_is_no_copy(candidate: str) -> None:
    """Honest kernels were accused unrun: their forward said what is computed, or was there to fall back on."""
    assert copied_reference(REFERENCE, COPIED), "the copy is one"
    assert copied_reference(REFERENCE, candidate) == ""


@pytest.mark.parametrize(
    "more",
    [
        "import os\nos.environ['A'] = '1'\ntorch.manual_seed(0)\n",
        OWN,
        "if __name__ == '__main__':\n    print(ModelNew(3)(torch.ones(3)))\n",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
    ],
)
def test_what_a_module_does_besides_hides_no_copy(more: str) -> None:
    assert copied_reference(REFERENCE, COPIED + more)
