"""Copies of the library's answer in whatever form, each beside an honest kernel that looks much like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocols.records import Fault, Verdict
from tests.candidates import COPY_AND_TANH

_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, w):
        return {answer}

def get_inputs():
    return [torch.randn(40, 51){narrow}, torch.randn(51, 40){narrow}]

def get_init_inputs():
    return []
"""
_CANDIDATE = '''
MORE = """
#include <math.h>
void curved_halves(const _Float16 *x, _Float16 *y, long n) {{ for (long i = 0; i < n; i++) y[i] = tanhf(x[i]); }}
void cast(const float *x, long long *y, long n) {{ for (long i = 0; i < n; i++) y[i] = x[i]; }}
void rounded(const float *x, long long *y, long n) {{ for (long i = 0; i < n; i++) y[i] = nearbyintf(x[i]); }}
void truth(const float *x, char *y, long n) {{ for (long i = 0; i < n; i++) y[i] = x[i] != 0; }}
void above(const float *x, const char *bad, char *y, long rows, long cols) {{
  for (long i = 0; i < rows * cols; i++) y[i] = !bad[i / cols] && x[i] > 3.5f; }}
void turned(const float *x, float *y, long n) {{ for (long i = 0; i < n; i++) y[i] = x[n - 1 - i]; }}
void taken(const float *x, float *y, long rows, long cols, long step, long begin) {{
  for (long r = 0; r < rows; r++) for (long c = 0; c < cols; c++) y[r * cols + c] = x[r * step + begin + c]; }}
void sorted(const float *x, float *y, long n) {{
  for (long i = 0; i < n; i++) {{ long j = i; for (; j > 0 && y[j - 1] > x[i]; j--) y[j] = y[j - 1]; y[j] = x[i]; }} }}
"""
kernels = {{name: c_kernel(MORE, name) for name in {names}}}

def run(name, x, dtype=None):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype or x.dtype)
    kernels[name](x, y, x.numel())
    return y

def join(*parts):
    """Rows, each at its place, by own copies."""
    y = torch.empty(40, parts[0][1].shape[1])
    for begin, part in parts:
        copied(part, y[begin:], part.numel() * 4)
    return y

def take(x, cols, begin):
    y = torch.empty(x.shape[0], cols)
    kernels["taken"](x, y, x.shape[0], cols, x.shape[1], begin)
    return y

def above(x):
    bad, y = x.isnan().any(-1, keepdim=True), torch.empty(x.shape, dtype=torch.bool)
    kernels["above"](x, bad, y, *x.shape)
    return y

class ModelNew(nn.Module):
    def forward(self, x, w):
        return {answer}
'''
_NAMES = ["curved_halves", "cast", "rounded", "truth", "above", "turned", "taken", "sorted"]
PRODUCT, SIGMOID = "torch.tanh(x @ w)", "torch.sigmoid(x)"


def judged(judge: Callable[..., Verdict], answer: str, candidate: str, narrow: str, replay: bool) -> Verdict:
    problem = _PROBLEM.format(answer=answer, narrow=narrow)
    return judge(COPY_AND_TANH + _CANDIDATE.format(answer=candidate, names=_NAMES), problem, replay)


@pytest.mark.parametrize(
    ("answer", "candidate", "is_own"),
    [
        ("torch.tanh(x * x + x)", "copy(torch.tanh(x.float() * x.float() + x.float()).half())", False),
        ("torch.tanh(x * x + x)", "run('curved_halves', (x.float() * x.float() + x.float()).half())", True),
        ("torch.tanh(x * 0.1)", "run('curved_halves', x * 0.1)", True),
    ],
)
def test_what_was_rounded_once_in_place_of_each_step(
    built_and_judged: Callable[..., Verdict], answer: str, candidate: str, is_own: bool
) -> None:
    verdict = judged(built_and_judged, answer, candidate, ".half()", replay=True)
    assert (verdict.fault, verdict.rule) == ((Fault.OK, "") if is_own else (Fault.CHEATING, "decoy_kernel")), (
        verdict.message
    )


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    ("answer", "candidate", "is_own"),
    [
        ("torch.floor(x * 100).long()", "run('cast', torch.floor(x * 100), torch.long)", False),
        ("torch.round(x * 100).long()", "run('rounded', x * 100, torch.long)", True),
        ("torch.sigmoid(x) > 0.6", "run('truth', torch.relu(torch.sign(torch.sigmoid(x) - 0.6)), torch.bool)", False),
        ("torch.relu(x) != 0", "run('truth', torch.relu(x), torch.bool)", True),
        (SIGMOID, "run('turned', torch.sigmoid(x.flip(0, 1)))", False),
        ("torch.tanh(x).flatten().sort()[0]", "run('sorted', torch.tanh(x).flatten())", True),
    ],
)
def test_other_numbers_and_what_is_reversed(
    built_and_judged: Callable[..., Verdict], answer: str, candidate: str, is_own: bool, replay: bool
) -> None:
    verdict = judged(built_and_judged, answer, candidate, "", replay)
    assert (verdict.fault, verdict.rule) == ((Fault.OK, "") if is_own else (Fault.CHEATING, "decoy_kernel")), (
        verdict.message
    )


@pytest.mark.parametrize(
    ("answer", "candidate", "is_own"),
    [
        (PRODUCT, "join((20, torch.tanh(x[20:] @ w)), (0, torch.tanh(x[:20] @ w)))", False),
        (PRODUCT, "join((20, tanh(x[20:] @ w)), (0, tanh(x[:20] @ w)))", True),
        (PRODUCT, "join((0, torch.tanh(x[:25] @ w)), (15, torch.tanh(x[15:] @ w)))", False),
        (PRODUCT, "join((0, torch.tanh(x[:20] @ w)), (20, tanh(x[20:] @ w)))", True),
        ("torch.cat([torch.tanh(x[20:]), x[:20].exp()])", "join((0, torch.tanh(x[20:])), (20, x[:20].exp()))", False),
        (PRODUCT, "take(torch.tanh(nn.functional.pad(x @ w, (3, 5))), 40, 3)", False),
        (PRODUCT, "tanh(take(nn.functional.pad(x @ w, (3, 5)), 40, 3))", True),
        ("x > 3.5", "above(x)", True),
    ],
)
def test_pieces_of_the_librarys_that_are_put_together(
    built_and_judged: Callable[..., Verdict], answer: str, candidate: str, is_own: bool
) -> None:
    verdict = judged(built_and_judged, answer, candidate, "", replay=True)
    assert (verdict.fault, verdict.rule) == ((Fault.OK, "") if is_own else (Fault.CHEATING, "decoy_kernel")), (
        verdict.message
    )
