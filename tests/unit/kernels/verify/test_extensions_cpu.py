"""C++ extensions on a processor: whether their own code does the work, however it is called and whatever it calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import checks
from kbrl_async.kernels.verify.cpu import own_kernels
from kbrl_async.kernels.verify.cpu.own_kernels import past_the_dispatcher
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
ROWS = r"""
#include <cmath>
static void rows(const float *a, float *b, long n, long m) {
  for (long i = 0; i < n; i++, a += m, b += m) {
    float most = a[0], sum = 0;
    for (long j = 1; j < m; j++) most = std::max(most, a[j]);
    for (long j = 0; j < m; j++) sum += b[j] = std::exp(a[j] - most);
    for (long j = 0; j < m; j++) b[j] /= sum;
  }
}
"""
SOURCE = (
    ROWS
    + r"""
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
torch::Tensor static_buffer(torch::Tensor x) {
  static torch::Tensor y = torch::empty_like(x);
  rows(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
  return y.mul(1.0);
}
torch::Tensor row_by_row(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (long i = 0; i < x.size(0); i++)
    rows(x.select(0, i).data_ptr<float>(), y.select(0, i).data_ptr<float>(), 1, x.size(1));
  return y;
}
torch::Tensor until(torch::Tensor x) {
  auto y = torch::zeros_like(x), left = x.sub(y);
  while (left.abs().max().item<float>() > 0) {
    for (long i = 0; i < x.numel(); i++) y.data_ptr<float>()[i] = x.data_ptr<float>()[i];
    left = x.sub(y);
  }
  return own(y);
}
torch::Tensor joined(std::vector<torch::Tensor> xs) {
  auto y = torch::empty_like(xs[0]);
  for (long i = 0; i < y.numel(); i++) y.data_ptr<float>()[i] = xs[0].data_ptr<float>()[i];
  return y;
}
torch::Tensor probe(torch::Tensor x) { return x; }
torch::Tensor library_of_copied(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (long i = 0; i < y.numel(); i++) y.data_ptr<float>()[i] = x.data_ptr<float>()[i];
  return torch::softmax(y, -1);
}
torch::Tensor library_by_halves(torch::Tensor x) {
  auto y = torch::empty_like(x);
  auto *b = y.data_ptr<float>();
  for (long half = 0; half < 2; half++) {
    auto z = torch::softmax(x.narrow(0, 12 * (1 - half), 12), -1);
    for (long i = 0; i < z.numel(); i++) b[12 * (1 - half) * x.size(1) + i] = z.data_ptr<float>()[i];
  }
  return y;
}
torch::Tensor library_unless_spoilt(torch::Tensor x) {
  auto mark = torch::zeros({1}, x.options());
  mark.data_ptr<float>()[0] = 1;
  TORCH_CHECK(mark.add(0).item<float>() == 1, "somebody takes back what is written");
  return torch::softmax(x, -1);
}
torch::Tensor copy(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (long i = 0; i < y.numel(); i++) y.data_ptr<float>()[i] = x.data_ptr<float>()[i];
  return y;
}
"""
)
FUNCTIONS = re.findall(r"^(?:torch::Tensor|void) (\w+)\(", SOURCE, re.MULTILINE)
ALONE = "aten::_softmax gives the answer without"
CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
ours = load_inline(name="ours", cpp_sources=SOURCE, functions={functions})

class ModelNew(nn.Module):
    def forward(self, x):
        {body}
'''


Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def judged(evaluate: Evaluate, builder: Builder) -> Judge:
    """Every candidate has the same extension, so it is built once."""

    def source(body: str) -> str:
        text = "\n        ".join(body.splitlines())
        return CANDIDATE.format(source=SOURCE, functions=FUNCTIONS, body=text)

    built = builder.build(Candidate(source("return ours.whole(x)"), "cpp"))
    assert built.fault is Fault.OK, built.message
    paths = {key: builder.store.path(address) for key, address in built.artifacts.items()}

    def judge(body: str, problem: str = PROBLEM) -> Verdict:
        return evaluate(source(body), problem=problem, backend="cpp", **paths).verdict

    return judge


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
        "return ours.static_buffer(x)",
        "return ours.row_by_row(x)",
        "return ours.until(x)",
    ],
)
def test_honest_extensions_pass(judged: Judge, body: str) -> None:
    verdict = judged(body)
    assert verdict.fault is Fault.OK, verdict


@pytest.mark.parametrize(
    ("body", "fault", "rule", "said"),
    [
        ("return torch.softmax(x, -1)", Fault.UNPROVEN, "no_own_kernel", "not seen to launch or call what is its own"),
        ("return ours.library(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_and_copy(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_of_touched(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_in_place(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_of_copied(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_by_halves(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        ("return ours.library_unless_spoilt(x)", Fault.UNPROVEN, "no_own_kernel", ALONE),
        (
            "if ours.probe(x) is None:\n    raise ValueError\nreturn ours.copy(torch.softmax(x, -1))",
            Fault.UNPROVEN,
            "no_own_kernel",
            ALONE,
        ),
        (
            "e = x.numpy() - x.numpy().max(-1, keepdims=True)\nimport numpy\ne = numpy.exp(e)\n"
            "return ours.joined([torch.from_numpy(e / e.sum(-1, keepdims=True))])",
            Fault.CHEATING,
            "decoy_kernel",
            "before an own kernel ran",
        ),
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


TWO = PROBLEM.replace("torch.softmax(x, dim=-1)", "torch.softmax(x, dim=-1), x.sum(-1)")


def test_a_small_second_output_by_the_library_is_an_honest_step(judged: Judge) -> None:
    assert judged("return ours.whole(x), x.sum(-1)", TWO).fault is Fault.OK
    verdict = judged("return torch.softmax(x, -1), ours.whole(x).sum(-1) * 0 + x.sum(-1)", TWO)
    assert verdict.fault in (Fault.CHEATING, Fault.UNPROVEN)


@pytest.mark.parametrize("name", ["sgemm_", "cblas_sgemm", "_ZN2at3cpu8_softmaxERKNS_6TensorElb", "dlsym"])
def test_what_is_called_where_nobody_sees_it_proves_nothing(compile_raw: Callable[[str], Any], name: str) -> None:
    hidden = compile_raw(f"void {name}(void); void run(void) {{ {name}(); }}")
    found = past_the_dispatcher(list(hidden.values()))
    assert found is not None
    assert (found.fault, name in found.text) == (Fault.UNPROVEN, True)
    plain = compile_raw("double cos(double x); double run(double x) { return cos(x); }")
    assert past_the_dispatcher(list(plain.values())) is None


def test_a_buffer_that_lasts_is_its_own_where_one_set_alone_can_be_asked_about(
    judged: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not change from call to call is the library's, so that two calls have to be over different inputs,
    whatever lies in the slot of the other one."""
    monkeypatch.setattr(own_kernels, "to_ask", lambda order: list(order[-1:]))
    monkeypatch.setattr(checks, "checked_slots", lambda count, most, rng: [count - 1])
    monkeypatch.setattr(checks, "in_secret_order", lambda names, rng: [0, len(names) - 1, *range(1, len(names) - 1)])
    verdict = judged("return ours.static_buffer(x)")
    assert verdict.fault is Fault.OK, verdict
