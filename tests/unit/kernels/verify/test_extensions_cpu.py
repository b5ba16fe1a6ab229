"""C++ extensions on a processor: whether their own code does the work, however it is called and whatever it calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault, Verdict
from tests.unit.kernels.verify.conftest import Evaluate

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.randn(24, 65)]

def get_init_inputs():
    return []
"""
SOURCE = r"""
#include <cmath>
static void rows(const float *a, float *b, long n, long m) {
  for (long i = 0; i < n; i++, a += m, b += m) {
    float most = a[0], sum = 0;
    for (long j = 1; j < m; j++) most = std::max(most, a[j]);
    for (long j = 0; j < m; j++) sum += b[j] = std::exp(a[j] - most);
    for (long j = 0; j < m; j++) b[j] /= sum;
  }
}
static torch::Tensor own(torch::Tensor x) {
  auto y = torch::empty_like(x);
  rows(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
  return y;
}
torch::Tensor whole(torch::Tensor x) { return own(x.contiguous()); }
void into(torch::Tensor x, torch::Tensor y) {
  rows(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
}
torch::Tensor with_a_branch(torch::Tensor x) { return x.dim() == 2 ? own(x) : torch::softmax(x, -1); }
torch::Tensor first_step(torch::Tensor x) {
  auto y = x - std::get<0>(x.max(1, true));
  auto *b = y.data_ptr<float>();
  for (long i = 0; i < y.size(0); i++, b += y.size(1)) {
    float sum = 0;
    for (long j = 0; j < y.size(1); j++) sum += b[j] = std::exp(b[j]);
    for (long j = 0; j < y.size(1); j++) b[j] /= sum;
  }
  return y;
}
torch::Tensor last_step(torch::Tensor x) {
  auto y = own(x);
  auto *b = y.data_ptr<float>();
  for (long i = 0; i < y.numel(); i++) b[i] *= 2;
  return y.mul(0.5);
}
torch::Tensor by_place(torch::Tensor x) {
  auto at = torch::empty({x.size(0)}, x.options().dtype(torch::kInt64));
  for (long i = 0; i < x.size(0); i++) at.data_ptr<int64_t>()[i] = i;
  return own(x).index_select(0, at);
}
torch::Tensor library(torch::Tensor x) { return torch::softmax(x, -1); }
torch::Tensor library_and_copy(torch::Tensor x) {
  auto y = torch::softmax(x, -1);
  auto z = torch::empty_like(y);
  for (long i = 0; i < y.numel(); i++) z.data_ptr<float>()[i] = y.data_ptr<float>()[i];
  return z;
}
torch::Tensor library_of_touched(torch::Tensor x) {
  auto y = x.clone();
  y.data_ptr<float>()[0] += 1e-6f;
  return torch::softmax(y, -1);
}
torch::Tensor library_in_place(torch::Tensor x) {
  const float was = x.data_ptr<float>()[1];
  x.data_ptr<float>()[1] += 1e-6f;
  auto y = torch::softmax(x, -1);
  x.data_ptr<float>()[1] = was;
  return y;
}
torch::Tensor copy(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (long i = 0; i < y.numel(); i++) y.data_ptr<float>()[i] = x.data_ptr<float>()[i];
  return y;
}
"""
FUNCTIONS = ["whole", "into", "with_a_branch", "first_step", "last_step", "by_place", "library", "library_and_copy"]
FUNCTIONS += ["library_of_touched", "library_in_place", "copy"]
CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
ours = load_inline(name="ours", cpp_sources=SOURCE, functions={functions})

class ModelNew(nn.Module):
    calls = 0

    def forward(self, x):
        {body}
'''


Judge = Callable[[str], Verdict]


@pytest.fixture(scope="module")
def judged(evaluate: Evaluate, builder: Builder) -> Judge:
    """Every candidate has the same extension, so it is built once."""

    def source(body: str) -> str:
        text = "\n        ".join(body.splitlines())
        return CANDIDATE.format(source=SOURCE, functions=FUNCTIONS, body=text)

    built = builder.build(Candidate(source("return ours.whole(x)"), "cpp"))
    assert built.fault is Fault.OK, built.message
    paths = {key: builder.store.path(address) for key, address in built.artifacts.items()}
    return lambda body: evaluate(source(body), problem=PROBLEM, backend="cpp", **paths).verdict


@pytest.mark.parametrize(
    "body",
    [
        "return ours.whole(x)",
        "y = torch.empty_like(x)\nours.into(x, y)\nreturn y",
        "return ours.with_a_branch(x)",
        "return ours.first_step(x)",
        "return ours.last_step(x)",
        "return ours.by_place(x)",
        "return ours.whole(x).clone()",
        "return ours.whole(x * 1.0)",
    ],
)
def test_honest_extensions_pass(judged: Judge, body: str) -> None:
    verdict = judged(body)
    assert verdict.fault is Fault.OK, verdict


@pytest.mark.parametrize(
    ("body", "fault", "rule", "said"),
    [
        ("return torch.softmax(x, -1)", Fault.UNPROVEN, "no_own_kernel", "not seen to call its extension"),
        ("return ours.library(x)", Fault.UNPROVEN, "no_own_kernel", "aten::_softmax, called by an own function"),
        ("return ours.library_and_copy(x)", Fault.UNPROVEN, "no_own_kernel", "aten::_softmax, called by"),
        ("return ours.library_of_touched(x)", Fault.UNPROVEN, "no_own_kernel", "aten::_softmax, called by"),
        ("return ours.library_in_place(x)", Fault.UNPROVEN, "no_own_kernel", "aten::_softmax, called by"),
        ("return ours.copy(torch.softmax(x, -1))", Fault.CHEATING, "decoy_kernel", "aten::_softmax computes the whole"),
        ("ours.whole(x)\nreturn torch.softmax(x, -1)", Fault.CHEATING, "decoy_kernel", "aten::_softmax computes"),
        (
            "import numpy\ne = numpy.exp(x.numpy() - x.numpy().max(-1, keepdims=True))\n"
            "return ours.copy(torch.from_numpy(e / e.sum(-1, keepdims=True)))",
            Fault.CHEATING,
            "decoy_kernel",
            "before an own kernel ran",
        ),
        (
            "from kbrl_async.kernels.backends.launch.recorder import RECORDER\n"
            "return ours.whole(x) if RECORDER.is_on else torch.softmax(x, -1)",
            Fault.CHEATING,
            "decoy_kernel",
            "switched off",
        ),
    ],
)
def test_the_library_behind_an_extension_is_found(judged: Judge, body: str, fault: Fault, rule: str, said: str) -> None:
    verdict = judged(body)
    assert (verdict.fault, verdict.rule) == (fault, rule), verdict
    assert said in verdict.message + verdict.evidence, verdict
