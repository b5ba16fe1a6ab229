"""Operators that an extension registers in C++, and functions of one that return more than tensors, only watched: who
works by them passes, whom the library works for does not. On a processor; and as on a GPU, where no call may fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify.proof import Finding
from protocols.records import Candidate, Fault, Verdict
from tests.unit.kernels.verify.conftest import Evaluate
from tests.unit.kernels.verify.test_extensions_cpu import PROBLEM, ROWS
from tests.unit.kernels.verify.test_watched import Child, watched

SOURCE = (
    ROWS
    + r"""
#include <torch/library.h>
using at::Tensor;
Tensor whole(const Tensor &x) {
  auto y = at::empty_like(x);
  rows(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
  return y;
}
void into(const Tensor &x, Tensor y) {
  rows(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
}
Tensor in_place(Tensor x) {
  rows(x.data_ptr<float>(), x.data_ptr<float>(), x.size(0), x.size(1));
  return x;
}
double most(const Tensor &x) {
  double found = x.data_ptr<float>()[0];
  for (long i = 0; i < x.numel(); i++) found = std::max(found, (double)x.data_ptr<float>()[i]);
  return found;
}
int64_t width(const Tensor &x) { return x.size(1); }
std::tuple<Tensor, Tensor> exps(const Tensor &x, double most) {
  auto y = at::empty_like(x), sums = at::empty({x.size(0), 1}, x.options());
  for (long i = 0; i < x.size(0); i++) {
    float sum = 0;
    for (long j = 0; j < x.size(1); j++) {
      const long at = i * x.size(1) + j;
      sum += y.data_ptr<float>()[at] = std::exp(x.data_ptr<float>()[at] - most);
    }
    sums.data_ptr<float>()[i] = sum;
  }
  return {y, sums};
}
std::vector<Tensor> parts(const Tensor &x) {
  return {whole(x.narrow(0, 0, 12).contiguous()), whole(x.narrow(0, 12, 12).contiguous())};
}
std::tuple<Tensor, double, int64_t, bool> beside(const Tensor &x) {
  return {whole(x), most(x), x.size(1), true};
}
std::vector<double> sums(const Tensor &x) {
  std::vector<double> found;
  for (long i = 0; i < x.size(0); i++) {
    double sum = 0;
    for (long j = 0; j < x.size(1); j++) sum += std::exp((double)x.data_ptr<float>()[i * x.size(1) + j]);
    found.push_back(sum);
  }
  return found;
}
Tensor copy(const Tensor &x) {
  auto y = at::empty_like(x);
  for (long i = 0; i < y.numel(); i++) y.data_ptr<float>()[i] = x.data_ptr<float>()[i];
  return y;
}
Tensor library(const Tensor &x) { return x.softmax(-1); }
Tensor library_and_copy(const Tensor &x) { return copy(x.softmax(-1)); }
std::tuple<Tensor, double> copy_beside(const Tensor &x) { return {copy(x), most(x)}; }
TORCH_LIBRARY(ours, m) {
  m.def("whole(Tensor x) -> Tensor");
  m.def("into(Tensor x, Tensor(a!) y) -> ()");
  m.def("in_place(Tensor(a!) x) -> Tensor(a!)");
  m.def("most(Tensor x) -> float");
  m.def("width(Tensor x) -> int");
  m.def("exps(Tensor x, float most) -> (Tensor, Tensor)");
  m.def("parts(Tensor x) -> Tensor[]");
  m.def("beside(Tensor x) -> (Tensor, float, int, bool)");
  m.def("sums(Tensor x) -> float[]");
  m.def("copy(Tensor x) -> Tensor");
  m.def("copy_beside(Tensor x) -> (Tensor, float)");
  m.def("library(Tensor x) -> Tensor");
  m.def("library_and_copy(Tensor x) -> Tensor");
  m.def("of_any_key(Tensor x) -> Tensor", &whole);
  m.def("library_of_any_key(Tensor x) -> Tensor", &library_and_copy);
  m.def("copy_of_any_key(Tensor x) -> Tensor", &copy);
}
TORCH_LIBRARY_IMPL(ours, CPU, m) {
  m.impl("whole", &whole);
  m.impl("into", &into);
  m.impl("in_place", &in_place);
  m.impl("most", &most);
  m.impl("width", &width);
  m.impl("exps", &exps);
  m.impl("parts", &parts);
  m.impl("beside", &beside);
  m.impl("sums", &sums);
  m.impl("copy", &copy);
  m.impl("copy_beside", &copy_beside);
  m.impl("library", &library);
  m.impl("library_and_copy", &library_and_copy);
}
"""
)
FUNCTIONS = re.findall(r"^(?:[\w:<>, ]+) (\w+)\((?:const )?Tensor", SOURCE, re.MULTILINE)
CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
bound = load_inline(name="ours", cpp_sources=SOURCE, functions={functions}, is_python_module={is_module})

class ModelNew(nn.Module):
    def forward(self, x):
        ours = {ours}
        {body}
'''
OURS = ("torch.ops.ours", "bound")
HONEST = [
    "return ours.whole(x)",
    "y = torch.empty_like(x)\nours.into(x, y)\nreturn y",
    "return ours.in_place(x.clone())",
    "y, sums = ours.exps(x, ours.most(x))\nreturn y / sums",
    "y = torch.empty(len(x), ours.width(x))\nours.into(x, y)\nreturn y",
    "return torch.cat(ours.parts(x))",
    "y, most, width, done = ours.beside(x)\nassert done and y.shape[1] == width\nreturn y + most * 0",
    "return torch.exp(x) / torch.tensor(ours.sums(x))[:, None]",
    "y = ours.whole(x)\nreturn y if float(y.sum()) > 0 else ours.whole(y)",
    "assert ours.into(x, y := torch.empty_like(x)) is None\nreturn y",
]
NUMBERS = HONEST[3:8]
ANY_KEY = [
    "return torch.ops.ours.of_any_key(x)",
    "return torch.ops.ours.of_any_key.default(x=x)",
]
DECOYS = [
    "return ours.library(x)",
    "return ours.library_and_copy(x)",
    "return ours.copy(torch.softmax(x, -1))",
    "ours.whole(x)\nreturn torch.softmax(x, -1)",
    "y, most = ours.copy_beside(torch.softmax(x, -1))\nreturn y if most != 2 else y * 2",
    "ours.most(x)\nreturn torch.softmax(x, -1)",
    "return torch.softmax(x.view(-1, ours.width(x)), -1)",
    "y, most, width, done = ours.beside(x)\nreturn torch.softmax(x, -1) if done else y",
    "ours.sums(x)\nreturn torch.cat([torch.softmax(x[:12], -1), torch.softmax(x[12:], -1)])",
    "y = torch.softmax(x, -1)\nours.into(x, torch.empty_like(x))\nreturn y",
]
DECOYS_OF_ANY_KEY = [
    "return torch.ops.ours.library_of_any_key(x)",
    "return torch.ops.ours.copy_of_any_key(torch.softmax(x, -1))",
    "return torch.ops.ours.of_any_key(x) * 0 + torch.softmax(x, -1)",
    "library = torch.library.Library('ours', 'IMPL')\n"
    "library.impl('of_any_key', lambda x: torch.softmax(x, -1), 'CPU')\nreturn torch.ops.ours.of_any_key(x)",
]


class Built(NamedTuple):
    judge: Callable[..., Verdict]
    path: Path


def source(body: str, ours: str, functions: list[str] | None = FUNCTIONS) -> str:
    text = "\n        ".join(body.splitlines())
    return CANDIDATE.format(source=SOURCE, functions=functions, is_module=bool(functions), body=text, ours=ours)


@pytest.fixture(scope="module")
def built(evaluate: Evaluate, builder: Builder) -> Built:
    """Every candidate has the same extension, so it is built once."""
    made = builder.build(Candidate(source("return ours.whole(x)", "bound"), "cpp"))
    assert made.fault is Fault.OK, made.message
    paths = {key: builder.store.path(address) for key, address in made.artifacts.items()}

    def judge(body: str, ours: str) -> Verdict:
        return evaluate(source(body, ours), problem=PROBLEM, backend="cpp", **paths).verdict

    return Built(judge, next(path for path in paths.values() if path is not None))


@pytest.fixture
def forward_of(built: Built) -> Callable[[str], Callable[[torch.Tensor], torch.Tensor]]:
    """In this process, in which new memory holds no earlier answer, as where a bench poisons it."""
    torch.ops.load_library(built.path)  # type: ignore[no-untyped-call, unused-ignore] # torch's is not typed

    def make(body: str) -> Callable[[torch.Tensor], torch.Tensor]:
        names: dict[str, Any] = {"torch": torch, "ours": torch.ops.ours, "poisoned": poisoned}
        for asked, given in (("torch.empty_like(x)", "poisoned(*x.shape)"), ("torch.empty(", "poisoned(")):
            body = body.replace(asked, given)
        exec("def forward(x):\n " + body.replace("\n", "\n "), names)
        return lambda x: names["forward"](x.view(24, 65))

    return make


@pytest.mark.parametrize(
    ("ours", "body"), [*((OURS[0], body) for body in HONEST), *((OURS[1], body) for body in NUMBERS)]
)
def test_own_work_passes_on_a_processor(built: Built, body: str, ours: str) -> None:
    verdict = built.judge(body, ours)
    assert verdict.fault is Fault.OK, verdict


@pytest.mark.parametrize("body", ANY_KEY)
def test_so_does_an_operator_that_is_registered_for_all_devices(built: Built, body: str) -> None:
    """Torch calls what is behind it before anybody sees an operator: no launch was counted, and it was `unproven`."""
    verdict = built.judge(body, "None")
    assert verdict.fault is Fault.OK, verdict


def test_a_library_of_operators_alone_is_loaded(evaluate: Evaluate, builder: Builder) -> None:
    text = source("return torch.ops.ours.of_any_key(x)", "None", None)
    made = builder.build(Candidate(text, "cpp"))
    assert made.fault is Fault.OK, made.message
    paths = {key: builder.store.path(address) for key, address in made.artifacts.items()}
    assert evaluate(text, problem=PROBLEM, backend="cpp", **paths).verdict.fault is Fault.OK


@pytest.mark.parametrize("body", DECOYS)
def test_the_librarys_work_does_not_on_a_processor(built: Built, body: str) -> None:
    verdict = built.judge(body, OURS[DECOYS.index(body) % 2])
    assert verdict.rule in ("decoy_kernel", "no_own_kernel"), verdict


@pytest.mark.parametrize("body", DECOYS_OF_ANY_KEY)
def test_nor_behind_an_operator_that_is_registered_for_all_devices(built: Built, body: str) -> None:
    verdict = built.judge(body, "None")
    assert verdict.rule in ("decoy_kernel", "no_own_kernel"), verdict


def poisoned(*size: int) -> torch.Tensor:
    return torch.full(size, math.nan)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.view(24, 65), -1)


def found_of_rows(forward: Callable[[torch.Tensor], torch.Tensor]) -> Finding | None:
    return watched(Child(forward, 24 * 65), right=softmax).of_watched()


@pytest.mark.parametrize("body", HONEST)
def test_own_operators_pass_where_a_call_without_them_must_not_fail(
    forward_of: Callable[[str], Callable[[torch.Tensor], torch.Tensor]], body: str
) -> None:
    """As on a GPU, where they were `unproven`: an operator that was left out was an error."""
    assert found_of_rows(forward_of(body)) is None


@pytest.mark.parametrize("body", DECOYS)
def test_nor_does_the_librarys_work_pass_there(
    forward_of: Callable[[str], Callable[[torch.Tensor], torch.Tensor]], body: str
) -> None:
    found = found_of_rows(forward_of(body))
    assert found is not None
    assert found.rule in ("decoy_kernel", "no_own_kernel")
