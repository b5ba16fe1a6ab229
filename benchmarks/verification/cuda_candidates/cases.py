"""What a case of the corpus is, and the Python around its C++."""

from __future__ import annotations

import msgspec

from protocols.records import Candidate, Problem

_CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""{cuda}"""
CPP = r"""{cpp}"""
extension = load_inline(name={name!r}, cpp_sources=CPP, {cuda_argument}{functions}{extra})


class ModelNew(nn.Module):
    def forward(self, {parameters}):
        return {call}
'''
_PROBLEM = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, {parameters}):
        return {reference}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


class Case(msgspec.Struct, frozen=True):
    name: str
    cuda: str = ""
    cpp: str = ""
    functions: str = '["run"]'
    """As Python text; empty where the source binds by hand."""
    extra: str = ""
    """Further arguments of load_inline."""
    call: str = "extension.run(x)"
    reference: str = "x * 2"
    inputs: str = "torch.randn(4, 64)"
    compiles: bool = True
    raises: str = ""
    """Part of the error that calling it must raise."""

    @property
    def candidate(self) -> Candidate:
        return self.variant("")

    def variant(self, mark: str) -> Candidate:
        """The same candidate with another text: `mark` becomes a comment of each source."""
        comment = f"\n// {mark}\n" if mark else ""
        source = _CANDIDATE.format(
            cuda=self.cuda + comment if self.cuda else "",
            cpp=self.cpp + comment,
            name=self.name,
            cuda_argument="cuda_sources=CUDA, " if self.cuda else "",
            functions=f"functions={self.functions}, " if self.functions else "",
            extra=self.extra,
            parameters=self._parameters,
            call=self.call,
        )
        return Candidate(source, "cuda" if self.cuda else "cpp")

    @property
    def problem(self) -> Problem:
        source = _PROBLEM.format(parameters=self._parameters, reference=self.reference, inputs=self.inputs)
        return Problem(f"corpus/{self.name}", 1, self.name, source)

    @property
    def _parameters(self) -> str:
        return ", ".join(("x", "y", "z")[: self.inputs.count("torch.rand")])
