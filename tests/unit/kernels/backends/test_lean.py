"""The stand-in headers without the standard library's heavy ones: the same words, and nobody else's tensors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.backends.building.context import ToolRun
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.inline.build import Build
from kbrl_async.kernels.backends.inline.flags import chosen
from kbrl_async.kernels.backends.inline.launch import Extension, Unit
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault

LEAN = """
#include <torch/extension.h>
void tell(const torch::Tensor& x, int64_t which) {
  unsigned char letter = 'u';
  TORCH_CHECK(which != 0, "whole ", 7, " ", -7L, " ", 7ul, " ", true, " ", 'c', letter, " ", (short)3);
  TORCH_CHECK(which != 1, "broken ", 0.1f, " ", 1e30, " ", 3.0, " ", 1.0 / 3, " ", -1e-7);
  TORCH_CHECK(which != 2, x.sizes(), " ", x.strides(), " ", x.dtype(), " ", x.scalar_type(), " ", x.device(), x.dim());
  TORCH_CHECK(which != 3);
  TORCH_CHECK_VALUE(which != 4, "a value ", c10::Half(0.5f));
  TORCH_CHECK(which != 5, "by ", static_cast<const void*>(nullptr), " ", at::Device(at::kCUDA, 1));
}
torch::Tensor doubled(torch::Tensor& x) {
  x = x.add(x);
  return x;
}
torch::Tensor moved(torch::Tensor&& x) { return std::move(x); }
torch::Tensor kept(const torch::Tensor& x) { return x; }
int64_t counted(torch::Tensor a, const torch::Tensor& b) {
  torch::Tensor c = a, d;
  d = c;
  d = d;
  c = std::move(d);
  c.reset();
  std::vector<torch::Tensor> many(3, b);
  return static_cast<int64_t>(many.size()) + a.dim() + (d.defined() ? 1 : 0);
}
torch::Tensor first(py::tuple saved, int64_t by) { return saved[0].cast<torch::Tensor>() * (by * saved.size()); }
int64_t second(const py::tuple& saved) { return saved[1].cast<int64_t>(); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("first", &first);
  m.def("second", &second);
  m.def("tell", &tell);
  m.def("doubled", &doubled);
  m.def("moved", &moved);
  m.def("kept", &kept);
  m.def("counted", &counted, py::arg("a"), py::arg("b"));
}
"""
STREAMS = """
#include <torch/extension.h>
struct Place { int row, column; };
std::ostream& operator<<(std::ostream& out, const Place& place) { return out << place.row << "," << place.column; }
void tell(torch::Tensor x, std::string name) {
  TORCH_CHECK(false, "at ", Place{1, 2}, " of ", name, " ", x.device(), " ", x.sizes(), " ", std::to_string(3));
}
"""
CANDIDATE = """
import torch
from torch.utils.cpp_extension import load_inline

extension = load_inline(name="n", cpp_sources=r'''{source}''', functions={functions})

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return extension.kept(x)
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store"))) as made:
        yield made


def loaded(builder: Builder, source: str, functions: str = "None") -> Any:
    text = CANDIDATE.format(source=source, functions=functions)
    report = builder.build(Candidate(text, "cpp"))
    assert report.fault is Fault.OK, report.message
    assert report.toolchain.endswith(" fast"), report.toolchain
    namespace: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        import torch.utils.cpp_extension as loaders

        patch.setattr(loaders, "load_inline", loaders.load_inline)
        patch.setattr(loaders, "load", loaders.load)
        inline.install({key: str(builder.store.path(address)) for key, address in report.artifacts.items()})
        exec(text, namespace)
    return namespace["extension"]


@pytest.fixture(scope="module")
def lean(builder: Builder) -> Any:
    return loaded(builder, LEAN)


def included(source: str, folder: Path) -> set[str]:
    """Names of the standard library's headers that a source brings along."""

    class Unconfined:
        def run(self, *_: Any, **__: Any) -> ToolRun:
            raise AssertionError

    extension = Extension("e", (Unit(False, source),))
    build = Build(extension, chosen(extension, "sm_90"), toolchain(), Unconfined())  # type: ignore[arg-type]
    (folder / "main.cpp").write_text(source)
    more = [*(toolchain().slim_defines or ()), *build._prepare_slim(source, folder), "-E"]
    done = subprocess.run([*build._gxx("main.cpp", True), *more], cwd=folder, capture_output=True, check=True)
    del done
    return set(re.findall(r'^# \d+ "[^"]*/c\+\+/\d+/([^"]+)"', (folder / "unit.o").read_text(), re.MULTILINE))


def test_heavy_headers_are_there_for_who_names_them_only(tmp_path: Path) -> None:
    heavy = {"bits/basic_string.h", "sstream", "atomic", "memory"}
    assert not included(LEAN, tmp_path) & heavy
    assert included(STREAMS, tmp_path) >= {"bits/basic_string.h", "sstream"}
    assert "string_view" in included(
        "#include <torch/extension.h>\nauto f(at::Tensor x) { return at::gelu(x); }", tmp_path
    )


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        (0, RuntimeError, "whole 7 -7 7 1 cu 3"),
        (1, RuntimeError, "broken 0.1 1e+30 3 0.333333 -1e-07"),
        (2, RuntimeError, "[2, 3] [3, 1] float Float cpu2"),
        (3, RuntimeError, "Expected which != 3 to be true, but got false.  (Could this error message be improved?"),
        (4, ValueError, "a value 0.5"),
        (5, RuntimeError, "by 0 cuda:1"),
    ],
)
def test_words_are_those_of_a_stream(lean: Any, which: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        lean.tell(torch.ones(2, 3), which)


def test_a_call_that_does_not_fit_is_told_as_ever(lean: Any) -> None:
    with pytest.raises(TypeError) as told:
        lean.counted(torch.ones(1), 2)
    assert str(told.value).startswith(
        "counted(): incompatible function arguments. The following argument types are supported:\n"
        "    1. (a: torch.Tensor, b: torch.Tensor)\n\nInvoked with: tensor([1.]), 2"
    )


def test_a_parameter_that_is_changed_is_not_python_s_own(lean: Any) -> None:
    x = torch.ones(2)
    assert lean.doubled(x).tolist() == [2, 2]
    assert x.tolist() == [1, 1]
    assert lean.moved(x) is x
    assert x.tolist() == [1, 1]
    assert lean.kept(x) is x


def test_every_handle_is_given_back(lean: Any) -> None:
    x, y = torch.ones(2, 2), torch.ones(3)
    before = [(one._use_count(), sys.getrefcount(one)) for one in (x, y)]  # type: ignore[attr-defined]
    for _ in range(20):
        assert lean.counted(x, y) == 5
        lean.doubled(x)
        lean.moved(x)
        lean.kept(y)
        with pytest.raises(TypeError):
            lean.counted(x)
    assert [(one._use_count(), sys.getrefcount(one)) for one in (x, y)] == before  # type: ignore[attr-defined]


def test_a_tuple_is_read(lean: Any) -> None:
    x = torch.ones(2)
    given = (x, 7)
    before = x._use_count(), sys.getrefcount(x), sys.getrefcount(given)  # type: ignore[attr-defined]
    assert lean.first(given, 3).tolist() == [6, 6]
    assert lean.second(given) == 7
    for wrong, error, words in (
        (([x, 7],), TypeError, "(arg0: tuple)"),
        (((x,),), IndexError, "tuple index out of range"),
        (((7, x),), RuntimeError, "Unable to cast Python instance"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            lean.second(*wrong)
    del wrong
    assert (x._use_count(), sys.getrefcount(x), sys.getrefcount(given)) == before  # type: ignore[attr-defined]


def test_who_prints_by_streams_has_them(builder: Builder) -> None:
    extension = loaded(builder, STREAMS, '["tell"]')
    with pytest.raises(RuntimeError, match=re.escape("at 1,2 of x cpu [2] 3")):
        extension.tell(torch.ones(2), "x")
