"""From a captured graph to a recording, with graphs that are plain lists and tensors of the host."""

from __future__ import annotations

import struct
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kbrl_async.kernels.backends.launch import bundle
from kbrl_async.kernels.cuda_driver import KERNEL, MEMCPY, MEMSET, CudaError
from kbrl_async.kernels.verify import recording, values
from kbrl_async.kernels.verify.compare import far_apart
from kbrl_async.kernels.verify.cuda.record.child import reason_of
from kbrl_async.kernels.verify.cuda.record.forward import Scribe, TorchForward, are_apart
from kbrl_async.kernels.verify.cuda.record.graph import KernelLaunch, NotRecordable, Raw
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.machine_code import MachineCode, digest
from kbrl_async.kernels.verify.cuda.record.operators import OperatorSpan
from kbrl_async.kernels.verify.cuda.record.own_graphs import Inside

BASE, SIZE = 1 << 44, 1 << 20
X = values.describe(torch.empty(4), 0)


class Graph:
    """What is read from a graph: `raws`, and of each kernel its launch."""

    def __init__(self, *raws: Raw, arguments: tuple[int, ...] = (BASE + 64,), foreign: int = 0) -> None:
        self._raws, self._foreign = list(raws), foreign
        data = [struct.pack("<Q", word) for word in arguments]
        self._launch = KernelLaunch(7, "run", (4, 1, 1), (256, 1, 1), 0, data, (1, 1, 1), False, -1)

    def read(self, graph: object, known: dict[int, Any]) -> list[Raw]:
        self.known = {place: handle() for place, handle in known.items()}
        return self._raws

    def launch(self, node: int) -> KernelLaunch:
        return self._launch

    def module_of(self, function: int) -> int:
        return 70

    def is_memory(self, word: int) -> bool:
        return word == self._foreign != 0

    def memset(self, node: int) -> Any:
        return types.SimpleNamespace(place=BASE + 512, pitch=0, value=0, element=4, width=8, height=1)

    def copy(self, node: int) -> tuple[int, int, int]:
        return BASE + 1024, BASE, 16


class Code:
    def owner(self, module: int, name: str) -> str:
        assert (module, name) == (70, "run")
        return "ab" * 32


def written(graph: Graph, *steps: OperatorSpan) -> list[recording.Node]:
    scribe = Scribe(cast(Any, graph), Heap(), BASE, SIZE, cast(Any, Code()))
    captured = TorchForward(types.SimpleNamespace(raw_cuda_graph=lambda: 0), list(steps), ["L", []], [])
    return scribe.write(captured).nodes


def step(first: int, last: int, name: str = "aten::mm") -> OperatorSpan:
    return OperatorSpan(first, last, name, ["L", [["L", [["T", 0]]], ["D", {}]]], [X], [X], [(BASE + 2048, 16)])


def raw(kind: int, *after: int, place: int = 0) -> Raw:
    return Raw(1, kind, after, False, place)


def test_a_kernel_that_no_operator_made_is_the_candidates_own() -> None:
    (node,) = written(Graph(raw(KERNEL)))
    assert isinstance(node, recording.Kernel)
    assert (node.artifact, node.name, node.grid, node.arguments) == (
        "ab" * 32, "run", (4, 1, 1), [struct.pack("<Q", BASE + 64)],
    )  # fmt: skip


def test_the_kernels_of_an_operator_are_that_operator_once() -> None:
    graph = Graph(raw(KERNEL), raw(KERNEL, 0, place=1), raw(KERNEL, 1, place=2), raw(KERNEL, 2, place=3))
    nodes = written(graph, step(1, 3))
    assert [type(node).__name__ for node in nodes] == ["Kernel", "Operator", "Kernel"]
    assert [node.after for node in cast(Any, nodes)] == [[], [0], [1]]
    assert cast(Any, nodes[1]).allocations == [(2048, 16)]


def test_two_operators_one_after_the_other_stay_two() -> None:
    nodes = written(Graph(raw(KERNEL), raw(KERNEL, 0, place=1)), step(0, 1), step(1, 2, "aten::relu"))
    assert [cast(Any, node).name for node in nodes] == ["aten::mm", "aten::relu"]


def test_what_only_fills_or_copies_is_done_as_it_is_whoever_asked_for_it() -> None:
    nodes = written(Graph(raw(MEMSET), raw(MEMCPY, 0, place=1)), step(0, 2, "aten::clone"))
    assert nodes == [recording.Memset(512, 0, 4, 8, 1, 0, []), recording.Memcpy(1024, 0, 16, [0])]


def test_operators_in_a_graph_of_its_own_are_found_by_their_numbers_there() -> None:
    graph = Graph(
        raw(KERNEL),
        Raw(1, KERNEL, (0,), place=0, within=1),
        Raw(1, KERNEL, (1,), place=1, within=1),
        raw(KERNEL, 2, place=2),
    )
    inside = {1: Inside(lambda: 5, [step(0, 1)])}
    scribe = Scribe(cast(Any, graph), Heap(), BASE, SIZE, cast(Any, Code()))
    captured = TorchForward(types.SimpleNamespace(raw_cuda_graph=lambda: 0), [], ["L", []], [], inside=inside)
    nodes = scribe.write(captured).nodes
    assert [type(node).__name__ for node in nodes] == ["Kernel", "Operator", "Kernel", "Kernel"]
    assert [node.after for node in cast(Any, nodes)] == [[], [0], [1], [2]]
    assert graph.known == {1: 5}


def test_branches_and_where_they_meet_are_kept() -> None:
    graph = Graph(raw(KERNEL), raw(KERNEL, 0, place=1), raw(KERNEL, 0, place=2), raw(KERNEL, 1, 2, place=3))
    assert [node.after for node in cast(Any, written(graph))] == [[], [0], [0], [1, 2]]


def test_an_address_of_memory_outside_of_the_arena_is_refused() -> None:
    with pytest.raises(NotRecordable, match="run uses memory that torch has not allocated"):
        written(Graph(raw(KERNEL), arguments=(BASE, 5 << 32), foreign=5 << 32))


def test_numbers_that_only_look_like_addresses_are_no_reason() -> None:
    assert len(written(Graph(raw(KERNEL), arguments=(5 << 32, 0, 1 << 63)))) == 1


class Modules:
    """A driver that has loaded `images`, and finds the kernels `known` in what it loads."""

    def __init__(self, images: dict[int, bytes], known: dict[bytes, str]) -> None:
        self.images, self._known, self._loaded = images, known, dict[int, bytes]()

    def load_module(self, image: bytes) -> int:
        self._loaded[len(self._loaded) + 1000] = image
        return len(self._loaded) + 999

    def function(self, module: int, name: str) -> int:
        if self._known.get(self._loaded[module]) != name:
            raise CudaError("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND")
        return 1


def test_a_kernel_of_a_bundle_is_named_by_its_machine_code(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(bundle.pack({"a.cubin": b"one", "b.cubin": b"two"}))
    code = MachineCode(cast(Any, Modules({1: b"two", 2: b"three"}, {})), [str(path)])
    assert code.owner(1, "run") == digest(b"two")
    with pytest.raises(NotRecordable, match="run was compiled when it was called"):
        code.owner(2, "run")


def test_a_kernel_of_an_extension_is_named_by_the_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for name in ("one", "two"):
        paths.append(str(tmp_path / name))
        Path(paths[-1]).write_bytes(name.encode())
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.record.machine_code.elf.fatbins", lambda content: [content])
    code = MachineCode(cast(Any, Modules({}, {b"two": "run"})), paths)
    assert code.owner(0, "run") == digest(b"two")
    with pytest.raises(NotRecordable, match="no kernel that was built from the candidate's source"):
        code.owner(0, "cutlass")
    both = MachineCode(cast(Any, Modules({}, {b"one": "run", b"two": "run"})), paths)
    with pytest.raises(NotRecordable, match="two extensions"):
        both.owner(0, "run")


def test_reasons_are_one_line_and_say_what_a_capture_can_not_hold() -> None:
    assert reason_of(ValueError("no\nAdvice of the driver")) == "ValueError: no"
    text = "CUDA error: operation not permitted when stream is capturing\nCompile with X"
    assert "reads from it" in reason_of(RuntimeError(text))
    assert "CUDA graph of its own" in reason_of(RuntimeError("Cannot prepare for replay during capturing stage."))


def test_sums_in_another_order_are_the_same_and_missing_work_is_not() -> None:
    wanted = torch.randn(1000)
    assert far_apart(wanted + 1e-4, wanted) == 0
    assert far_apart(torch.full((1000,), 3.4e38), wanted) == 1000
    assert far_apart(torch.tensor([5.0]), torch.tensor([5.01])) == 0
    assert far_apart(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1


def test_outputs_are_apart_where_no_other_forward_has_worked() -> None:
    def forward(output: int, *between: int) -> Any:
        tensor = types.SimpleNamespace(
            is_cuda=True, untyped_storage=lambda: types.SimpleNamespace(data_ptr=lambda: output)
        )
        return types.SimpleNamespace(outputs=[tensor], taken=[(place, 512) for place in (output, *between)])

    assert are_apart([forward(1024, 0), forward(2048, 0)])
    assert not are_apart([forward(1024, 0), forward(2048, 1024)])
    assert not are_apart([forward(1024, 2048), forward(2048, 0)])
