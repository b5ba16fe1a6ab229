"""Backend `cpp`, built the fast way: behaves as with torch's own headers. The full way is a benchmark's business."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.building.context import ToolRun
from kbrl_async.kernels.backends.inline import backend as inline_backend
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.inline.build import Build, BuildAttempt
from kbrl_async.kernels.backends.inline.launch import Extension
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.backends.inline.ways import ways
from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.funnel import Builder
from protocols.records import BuildReport, Candidate, Fault, Problem

SOURCE = """
#include <pybind11/pybind11.h>  // many name them though torch/extension.h has both
#include <pybind11/stl.h>
torch::Tensor scale(torch::Tensor x, double by) {
  TORCH_CHECK(x.dim() > 0, "got a scalar of ", x.scalar_type(), " on ", x.device());
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "scale", [&] {
    auto* a = x.data_ptr<scalar_t>(); auto* b = y.data_ptr<scalar_t>();
    for (int64_t i = 0; i < x.numel(); i++) b[i] = a[i] * static_cast<scalar_t>(by);
  });
  return y;
}
torch::Tensor only_floats(torch::Tensor x) { return x.data_ptr<float>() ? x : x; }
int64_t extent(torch::Tensor x, int64_t dim) { return x.size(dim); }
torch::Tensor operators(torch::Tensor x, torch::Tensor y) {
  auto all = torch::cat({x.matmul(y), torch::ones({2, y.size(1)}, x.options())}, 0);
  return std::get<0>(all.max(1)) + all.sum(1) * 0.5 - 1 + all.mean(1).to(torch::kFloat64).to(torch::kFloat32);
}
std::vector<torch::Tensor> several(std::vector<torch::Tensor> xs, c10::optional<torch::Tensor> extra) {
  if (extra.has_value()) xs.push_back(*extra);
  return xs;
}
std::tuple<int64_t, double, bool, std::string> kinds(int64_t i, double d, bool b, std::string s) {
  return {i, d, b, s};
}
void fill(torch::Tensor x) { x.fill_(7.0f); }
torch::Tensor reshaped(torch::Tensor x, std::vector<int64_t> shape) { return x.view(shape); }
torch::Tensor half_roundtrip(torch::Tensor x) {
  auto y = torch::empty(x.sizes(), x.options().dtype(torch::kFloat16));
  auto z = torch::empty(x.sizes(), x.options().dtype(torch::kBFloat16));
  for (int64_t i = 0; i < x.numel(); i++) {
    y.data_ptr<at::Half>()[i] = x.data_ptr<float>()[i];
    z.data_ptr<at::BFloat16>()[i] = x.data_ptr<float>()[i];
  }
  return torch::stack({y.to(torch::kFloat32), z.to(torch::kFloat32)}, 0);
}
int64_t defaulted(int64_t a, int64_t b) { return 10 * a + b; }
int64_t lengths(std::tuple<at::IntArrayRef, at::IntArrayRef> both, std::optional<at::IntArrayRef> more) {
  int64_t sum = 0;
  for (const auto& each : {std::get<0>(both), std::get<1>(both), more.value_or(at::IntArrayRef())})
    for (auto one : each) sum = sum * 10 + one;
  return sum;
}
double of_a_pair(std::tuple<int, double> both, const std::pair<int64_t, bool>& more) {
  return std::get<0>(both) * std::get<1>(both) + more.first + more.second;
}
torch::Tensor indexed(torch::Tensor x, int place) {
  auto y = x.clone();
  y.index({place, 1L}) = x.index({0}).sum();
  return y;
}
torch::Tensor asserted(torch::Tensor x) {
  AT_ASSERT(x.defined() && std::beta(1.0, 2.0) == 0.5);
  AT_ASSERTM(x.dim() == 1, "x must have one dimension, not ", x.dim());
  TORCH_CHECK(!x.type().is_cuda() && x.type().scalarType() == torch::kFloat32, "x must be of a CPU's float32");
#if !defined(TORCH_VERSION_MAJOR) || TORCH_VERSION_MAJOR < 2
  TORCH_CHECK(false, "torch's version is known to those that are compiled for several");
#endif
  return x.cpu();
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scale", torch::wrap_pybind_function(scale), "scale a tensor");
  m.def("only_floats", &only_floats);
  m.def("extent", &extent);
  m.def("operators", &operators);
  m.def("several", &several, py::arg("xs"), py::arg("extra") = py::none());
  m.def("kinds", &kinds);
  m.def("fill", &fill);
  m.def("asserted", &asserted);
  m.def("indexed", &indexed);
  m.def("of_a_pair", &of_a_pair);
  m.def("lengths", &lengths);
  m.def("reshaped", &reshaped);
  m.def("half_roundtrip", &half_roundtrip);
  m.def("defaulted", &defaulted, py::arg("a"), py::arg("b") = 3);
}
"""
CANDIDATE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
extension = load_inline(name="{name}", cpp_sources=SOURCE, functions={functions})

class ModelNew(nn.Module):
    def forward(self, x):
        return extension.scale(x, 2.0)
'''


def make(source: str = SOURCE, functions: str = "None", name: str = "ours") -> Candidate:
    return Candidate(CANDIDATE.format(source=source, functions=functions, name=name), "cpp")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


@pytest.fixture(scope="module")
def extension(builder: Builder) -> Any:
    report = builder.build(make())
    assert report.fault is Fault.OK, report.message
    assert report.toolchain.endswith(" fast")
    namespace: dict[str, Any] = {}
    (path,) = (builder.store.path(address) for address in report.artifacts.values())
    with pytest.MonkeyPatch.context() as patch:
        import torch.utils.cpp_extension as loaders

        patch.setattr(loaders, "load_inline", loaders.load_inline)
        patch.setattr(loaders, "load", loaders.load)
        inline.install({next(iter(report.artifacts)): str(path)})
        exec(make(name="another_name").source, namespace)
    return namespace["extension"]


def test_it_computes(extension: Any) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(extension.scale(x, 2.0), x * 2)


def test_a_returned_tensor_is_freed_when_nobody_holds_it(extension: Any) -> None:
    y = extension.scale(torch.randn(3, 4), 2.0)
    held = weakref.ref(y)
    del y
    assert held() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_it_dispatches_on_the_element_type(extension: Any, dtype: torch.dtype) -> None:
    x = torch.randn(5).to(dtype)
    assert torch.equal(extension.scale(x, 0.5), x * 0.5)


def test_operators_are_those_of_torch(extension: Any) -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    both = torch.cat([x @ y, torch.ones(2, 5)])
    torch.testing.assert_close(extension.operators(x, y), both.max(1)[0] + both.sum(1) * 0.5 - 1 + both.mean(1))


def test_sixteen_bit_floats_round_as_those_of_torch(extension: Any) -> None:
    special = [0.0, -0.0, 1e-8, 6e-8, 6.1e-5, 65504.0, 65519.0, 65520.0, 1e30, float("inf"), -float("inf"), 1.0009765]
    x = torch.cat([torch.tensor(special), torch.randn(5000) * torch.logspace(-9, 6, 5000)])
    halves, bfloats = extension.half_roundtrip(x)
    assert torch.equal(halves, x.half().float())
    assert torch.equal(bfloats, x.bfloat16().float())
    assert extension.half_roundtrip(torch.tensor([float("nan")])).isnan().all()


def test_arguments_and_results_are_converted(extension: Any) -> None:
    x = torch.randn(2)
    assert extension.kinds(3, 2, True, "text") == (3, 2.0, True, "text")
    assert [found is x for found in extension.several([x, x], x)] == [True] * 3
    assert len(extension.several(xs=[x])) == 1
    assert extension.asserted(x) is x
    assert (extension.lengths(([1, 2], [3]), [4, 5]), extension.lengths(([], [6]), None)) == (12345, 6)
    assert extension.indexed(torch.ones(2, 3), -1).tolist() == [[1, 1, 1], [1, 3, 1]]
    assert (extension.of_a_pair((3, 0.5), (1, True)), extension.of_a_pair([3, 2], [0, False])) == (3.5, 6.0)
    assert extension.fill(x) is None
    assert x.tolist() == [7.0, 7.0]
    assert (extension.defaulted(1), extension.defaulted(a=1, b=2)) == (13, 12)
    assert extension.scale.__doc__ == "scale a tensor"


@pytest.mark.parametrize(
    ("function", "args", "error", "words"),
    [
        ("scale", (torch.tensor(1.0), 2.0), RuntimeError, "got a scalar of Float on cpu"),
        ("scale", (torch.ones(2, dtype=torch.int32), 2.0), NotImplementedError, "\"scale\" not implemented for 'Int'"),
        (
            "only_floats",
            (torch.ones(2, dtype=torch.float64),),
            RuntimeError,
            "expected scalar type Float but found Double",
        ),
        (
            "extent",
            (torch.ones(2), 3),
            IndexError,
            "Dimension out of range (expected to be in range of [-1, 0], but got 3)",
        ),
        ("asserted", (torch.ones(2, 2),), RuntimeError, "x.dim() == 1 INTERNAL ASSERT FAILED"),
        ("asserted", (torch.ones(2, 2),), RuntimeError, "x must have one dimension, not 2"),
        ("reshaped", (torch.ones(4), [3]), RuntimeError, "shape '[3]' is invalid for input of size 4"),
        ("scale", (torch.ones(2),), TypeError, "incompatible function arguments"),
        ("scale", (torch.ones(2), "two"), TypeError, "incompatible function arguments"),
        ("scale", ([1.0], 2.0), TypeError, "incompatible function arguments"),
        ("extent", (torch.ones(2), 0.0), TypeError, "(arg0: torch.Tensor, arg1: int)"),
        ("extent", (torch.ones(2), 1 << 70), TypeError, "incompatible function arguments"),
        ("of_a_pair", ((1, 2.0, 3), (0, False)), TypeError, "(arg0: tuple[int, float], arg1: tuple[int, bool])"),
        ("of_a_pair", ((1, "two"), (0, False)), TypeError, "incompatible function arguments"),
        ("of_a_pair", (3, (0, False)), TypeError, "incompatible function arguments"),
        ("defaulted", (1, 2, 3), TypeError, "incompatible function arguments"),
    ],
)
def test_errors_are_those_of_torch(
    extension: Any, function: str, args: tuple[Any, ...], error: type, words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        getattr(extension, function)(*args)


@pytest.mark.parametrize("named", [{"a": 1, "c": 2}, {"b": 2}, {"a": 1, "b": "x"}])
def test_keywords_must_fit(extension: Any, named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        extension.defaulted(**named)


def test_every_call_is_recorded(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "is_on", True)
    monkeypatch.setattr(RECORDER, "launches", {})
    extension.scale(torch.ones(2), 2.0)
    extension.defaulted(1, b=2)
    assert {name: count for name, (count, _) in RECORDER.launches.items()} == {"scale": 1, "defaulted": 1}


def test_tensors_are_not_leaked(extension: Any) -> None:
    x = torch.ones(2)
    before = (x._use_count(), sys.getrefcount(x))  # type: ignore[attr-defined]
    for _ in range(10):
        extension.several([x], x)
        extension.scale(x, 2.0)
        with pytest.raises(TypeError):
            extension.scale(x)
    assert (x._use_count(), sys.getrefcount(x)) == before  # type: ignore[attr-defined]


def test_the_second_build_comes_from_the_store_under_any_name(builder: Builder, extension: Any) -> None:
    assert builder.build(make(name="yet_another")).cached


@pytest.mark.parametrize(
    "source",
    [
        "torch::Tensor scale(torch::Tensor x, double by) { return x * by }",
        "torch::Tensor scale(torch::Tensor x, double by);",
        "torch::Tensor scale(torch::Tensor x, double by) { return torch::nn::functional::relu(x); }",
        "torch::Tensor scale(torch::Tensor x, double by) { return x.index({true}); }",
        "torch::Tensor scale(torch::Tensor x, double by) "
        "{ return torch::zeros({1}, torch::TensorOptions().requires_grad(true)); }",
        "torch::Tensor scale(torch::Tensor x, double by) { return x.index({x.sizes().size()}); }",
        "torch::Tensor scale(torch::Tensor x, std::tuple<int, int>& by) { return x; }",
        "torch::Tensor scale(torch::Tensor x, std::vector<at::IntArrayRef> by) { return x; }",
    ],
    ids=[
        *("syntax error", "not defined", "beyond the stand-in headers", "an index by a truth", "asks for gradients"),
        *("an unsigned index", "who changes a tuple", "lists in a list"),
    ],
)
def test_only_the_full_build_decides_that_a_candidate_fails(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    asked = []

    def full(build: Build, suspects: tuple[int, ...] = ()) -> BuildAttempt:
        asked.append(suspects)
        return BuildAttempt(run=ToolRun(1, "main.cpp:2:3: error: expected ';'", "full", 1.0))

    monkeypatch.setattr(Build, "full", full)
    report = builder.build(make(source, '["scale"]'))
    assert len(asked) == 1
    assert (report.fault, report.message) == (Fault.COMPILE_ERROR, "main.cpp:2:3: error: expected ';'")


@pytest.mark.parametrize("dispatches", [False, True], ids=["as this torch", "as one before 2.6"])
def test_what_torch_itself_does_not_dispatch_is_not_built_in_full(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, dispatches: bool
) -> None:
    """In full it fails in the same words, after twenty seconds of nvcc."""
    if dispatches:
        monkeypatch.setitem(vars(toolchain()), "dispatches_types", True)
    assert toolchain().dispatches_types is dispatches
    monkeypatch.setattr(
        Build, "full", lambda self, suspects=(): BuildAttempt(b"an older torch", ToolRun(0, "", "", 1.0))
    )
    source = (
        "torch::Tensor scale(torch::Tensor x, double by) "
        '{ AT_DISPATCH_FLOATING_TYPES(x.type(), "scale", [&] { x.mul_(by); }); return x; }'
    )
    report = builder.build(make(f"{source}  // {dispatches}", '["scale"]'))
    assert report.toolchain.count(" full") == dispatches
    other = builder.build(make(f"#ifdef A_MACRO_OF_TORCH\n#endif\n{source}  // {dispatches}", '["scale"]'))
    assert other.fault is Fault.OK, "what its conditions ask may be known to torch's own headers only"
    if dispatches:
        assert report.fault is Fault.OK
    else:
        assert report.fault is Fault.COMPILE_ERROR
        assert "scalar_type()" in report.hint
        assert "cannot convert" in report.message


SEVERAL = """
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

one = load_inline(name="one", cpp_sources="int one() { return 1; }", functions=["one"])
two = load_inline(name="two", cpp_sources="int two() { return 2; }", functions=["two"])
again = load_inline(name="again", cpp_sources="int one() { return 1; }", functions=["one"])

class ModelNew(nn.Module):
    def forward(self, x):
        return x * one.one() * two.two()
"""


@pytest.mark.parametrize("failing", [(), ("two",), ("one", "two"), ("one", "host")])
def test_extensions_of_one_candidate_are_built_at_the_same_time(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...]
) -> None:
    """One after the other they were most of what slow candidates took."""
    both, asked = threading.Barrier(2, timeout=20), []

    def unit(self: object, extension: Extension, context: object) -> BuildReport:
        name = "two" if "two()" in extension.units[0].text else "one"
        asked.append(name)
        both.wait()
        if "host" in failing and name == "two":
            raise InfraError("a compiler was killed", "It is tried again elsewhere")
        fault = Fault.COMPILE_ERROR if name in failing else Fault.OK
        return BuildReport(fault, {extension.key: "00"}, message=name, kernels=[name])

    monkeypatch.setattr(type(inline_backend.CPP), "unit", unit)
    report = builder.build(Candidate(f"{SEVERAL}# {failing}", "cpp"))
    assert len(asked) == 2, "two are the same"
    assert (report.fault is Fault.OK) == (not failing)
    assert report.message == failing[0] if failing else report.kernels == ["one", "two"]


def test_what_only_the_full_build_can_is_built(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToolRun(0, "", "full", 1.0)
    monkeypatch.setattr(Build, "full", lambda self, suspects=(): BuildAttempt(b"the full artifact", run))
    source = "torch::Tensor scale(torch::Tensor x, double by) { return torch::nn::functional::relu(x); }"
    report = builder.build(make(source + "// full", '["scale"]'))
    assert report.fault is Fault.OK
    (why,) = ways(report.toolchain)
    assert why.startswith("error: "), "and why the fast build was not enough"


def test_each_of_several_extensions_says_how_it_was_built(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that needs torch's own headers is the first: its reason must not be lost behind the other's."""
    run = ToolRun(0, "", "full", 1.0)
    monkeypatch.setattr(Build, "full", lambda self, suspects=(): BuildAttempt(b"the full artifact", run))
    source = SEVERAL.replace("int one() {", "int one() { torch::ones({1}).requires_grad_(true);")
    report = builder.build(Candidate(source, "cpp"))
    assert ways(report.toolchain) == ("asks for gradients", "fast")


def test_a_constructor_that_compiles_is_recorded_without_a_gpu(builder: Builder) -> None:
    text = """
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

def source(factor):
    return f"torch::Tensor scale(torch::Tensor x) {{ return x * {factor}; }}"

class ModelNew(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4)).cuda()
        self.ext = load_inline(name="scaled", cpp_sources=[source(factor)], functions="scale")
    def forward(self, x):
        return self.ext.scale(x)
"""
    problem = Problem("p", 1, "p", "def get_init_inputs():\n    return [3]\n")
    report = builder.build(Candidate(text, "cuda"), problem)
    wanted = inline.inline_extension(
        "scaled", ["torch::Tensor scale(torch::Tensor x) { return x * 3; }"], functions="scale"
    )
    assert (report.fault, list(report.artifacts)) == (Fault.OK, [wanted.key])


def test_a_candidate_that_fails_before_it_compiles_says_why(builder: Builder) -> None:
    text = make().source.replace("SOURCE = r", "raise ValueError('no')\nSOURCE = str().join([]) or r")
    report = builder.build(Candidate(text, "cpp"))
    assert (report.fault, report.message) == (Fault.RUNTIME_ERROR, "line 6: ValueError: no")


def test_a_host_without_compilers_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kbrl_async.kernels.backends import backend
    from kbrl_async.kernels.backends.inline import toolchain as inline_toolchain

    inline_toolchain.toolchain.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        assert "g++ is not installed" in backend("cpp").missing()
        assert "g++ is not installed" in backend("cuda").missing()
    finally:
        inline_toolchain.toolchain.cache_clear()
