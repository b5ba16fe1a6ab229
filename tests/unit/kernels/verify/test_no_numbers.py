"""Answers that are infinite or NaN in places, in fp8, or in unsigned integers: a copy of the library's result is found
there, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.verify.bench import Bench
from protocols.records import Candidate, Fault, Verdict

_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(torch.{operator}(x)){cast}

def get_inputs():
    return [torch.randn(40, 51)]

def get_init_inputs():
    return []
"""
_DECOY = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

own = c_kernel("void own(const float *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = x[i]; }}", "own")

class ModelNew(nn.Module):
    def forward(self, x):
        found = torch.{operator}(x)
        found = torch.tanh(found)
        y = torch.empty_like(found)
        own(found, y, y.numel())
        return y{cast}
"""
_HONEST = (
    _DECOY.replace("y[i] = x[i]", "y[i] = tanhf(x[i])")
    .replace('"void own', '"#include <math.h>\\nvoid own')
    .replace("        found = torch.tanh(found)\n", "")
)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("operator", ["sqrt", "log"])
@pytest.mark.parametrize("cast", ["", ".to(torch.float8_e4m3fn)"])
@pytest.mark.parametrize("is_honest", [True, False])
def test_a_copy_of_the_librarys_answer_is_a_decoy(
    built_and_judged: Callable[..., Verdict], operator: str, replay: bool, cast: str, is_honest: bool
) -> None:
    source = (_HONEST if is_honest else _DECOY).format(operator=operator, cast=cast)
    problem = _PROBLEM.format(operator=operator, cast=cast)
    verdict = built_and_judged(source, problem, replay)
    assert (verdict.fault, verdict.rule) == ((Fault.OK, "") if is_honest else (Fault.CHEATING, "decoy_kernel")), (
        verdict.message
    )


_BYTES = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        y = x.view(torch.uint8)
        return torch.cat([y[1::2], y[0::2]]).view(x.dtype)

def get_inputs():
    return [{given}.to(torch.{dtype})]

def get_init_inputs():
    return []
"""
_OF_BYTES = """
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = '''
void own(const unsigned char *x, unsigned char *y, long n, long m) {{
  for (long i = 0; i < n; i++)
    for (long j = 0; j < m; j++) y[i * m + j] = x[{place} * m + j];
}}
'''
own = c_kernel(SOURCE, "own")

class ModelNew(nn.Module):
    def forward(self, x):
        t = {library}
        y = torch.empty_like(x)
        own(t.view(torch.uint8), y.view(torch.uint8), x.shape[0], x.view(torch.uint8).shape[1])
        return y
"""
_TURNS = ("(((i < n / 2 ? 2 * i + 1 : 2 * (i - n / 2)) + n - 8) % n)", "torch.cat([x[8:], x[:8]])")
_COPIES = ("i", "torch.cat([x[1::2], x[0::2]])")
_COPIES_BYTES = ("i", "torch.cat([x.view(torch.uint8)[1::2], x.view(torch.uint8)[0::2]]).view(x.dtype)")


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("float8_e4m3fn", "torch.randn(64, 32)"),
        ("float8_e5m2", "torch.randn(64, 32)"),
        ("uint16", "torch.randint(0, 60000, (64, 32))"),
        ("uint32", "torch.randint(0, 1 << 31, (64, 32))"),
        ("uint64", "torch.randint(0, 1 << 62, (64, 32))"),
    ],
)
@pytest.mark.parametrize(("way", "fault"), [(_TURNS, Fault.OK), (_COPIES, Fault.CHEATING)])
def test_what_torch_has_no_order_of_is_judged(
    built_and_judged: Callable[..., Verdict], dtype: str, given: str, way: tuple[str, str], fault: Fault
) -> None:
    """fp8 is not turned by torch, nor `uint16` and wider compared: the bench ended."""
    problem = _BYTES.format(given=given, dtype=dtype)
    verdict = built_and_judged(_OF_BYTES.format(place=way[0], library=way[1]), problem)
    assert verdict.fault is fault, verdict.message


def test_a_copy_of_bytes_that_are_the_answers_is_a_decoy(built_and_judged: Callable[..., Verdict]) -> None:
    problem = _BYTES.format(given="torch.randn(64, 32)", dtype="float8_e4m3fn")
    decoy = _OF_BYTES.format(place=_COPIES_BYTES[0], library=_COPIES_BYTES[1])
    assert built_and_judged(decoy, problem).rule == "decoy_kernel"


ENDS = """
import os
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        if x.dtype is torch.float64:
            os._exit(3)
        return torch.tanh(x)

def get_inputs():
    return [torch.randn(16, 8)]

def get_init_inputs():
    return []
"""


def test_a_reference_that_ends_while_nobody_needs_its_answer_is_the_problems_fault(bench: Bench) -> None:
    """Whoever asked it next met a closed socket (`OSError: Bad file descriptor`)."""
    problem = parse_problem(ENDS, "L1/19_ends")
    with pytest.raises(ProblemError, match="exit code 3"):
        bench.evaluate(problem, Candidate(ENDS.replace("Model", "ModelNew", 1), "torch"), {}, timing=False)
