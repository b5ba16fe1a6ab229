"""A candidate's own graphs in the process that records it and in one that is watched, with a driver of plain lists."""

from __future__ import annotations

import importlib.util
import types
import weakref
from typing import Any, cast

import pytest
import torch

from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.cuda_driver import CHILD, KERNEL, MEMCPY, CudaError
from kbrl_async.kernels.verify import values, wire
from kbrl_async.kernels.verify.cpu import trace
from kbrl_async.kernels.verify.cuda import own_graphs
from kbrl_async.kernels.verify.cuda.record.graph import NotRecordable
from kbrl_async.kernels.verify.cuda.record.heap import Heap
from kbrl_async.kernels.verify.cuda.record.own_graphs import Contents, Inside, OwnGraphs

STREAM = 5


class Graphs:
    """Each operator makes a node; `captured` is what the current stream is captured into."""

    def __init__(self) -> None:
        self.captured, self.asked, self.inserted = 9, 0, list[tuple[int, int]]()
        self.refused = ""

    def captured_on(self, stream: int) -> int:
        return self.captured if stream == STREAM else 0

    def count(self, graph: int) -> int:
        self.asked += 1
        return self.asked // 2

    def read(self, graph: int) -> None:
        if self.refused:
            raise NotRecordable(self.refused)

    def insert(self, stream: int, child: int) -> int:
        self.inserted.append((stream, child))
        return 3


class Graph:
    def __init__(self, pool: tuple[int, int] = (1, 0), raw: int = 70) -> None:
        self.pool, self.raw_cuda_graph = lambda: pool, lambda: raw


def place(tensor: torch.Tensor) -> wire.TensorMeta:
    return values.describe(tensor, 0)


def made() -> tuple[OwnGraphs, Graphs, Heap]:
    graphs, heap = Graphs(), Heap()
    heap.begin(4096, 1 << 20)
    return OwnGraphs(cast(Any, graphs), heap, place, lambda: STREAM), graphs, heap


def captured(own: OwnGraphs, run: Any, graph: Graph, pool: Any = None) -> Contents:
    own.begins()
    own.begun(pool)
    run()
    own.ends()
    return own.captured(graph)


def test_a_replay_in_a_recorded_forward_becomes_a_node_with_the_operators_of_its_capture() -> None:
    own, graphs, _ = made()
    graph, x = Graph(), torch.ones(3, 3)
    contents = captured(own, lambda: torch.mm(x, x), graph)
    assert [(step.name, step.first, step.last) for step in contents.steps] == [("aten::mm", 0, 1)]
    with own.recorded() as inside:
        assert own.replays(graph, contents)
    assert inside == {3: Inside(graph.raw_cuda_graph, contents.steps)}
    assert graphs.inserted == [(STREAM, 70)]
    assert own.count == 1


@pytest.mark.parametrize("is_recorded", [False, True])
def test_other_replays_are_torchs(is_recorded: bool) -> None:
    """Outside of a recording, or on a stream that is not captured."""
    own, graphs, _ = made()
    contents = captured(own, lambda: None, Graph())
    if is_recorded:
        graphs.captured = 0
        with own.recorded():
            assert not own.replays(Graph(), contents)
            assert not own.replays(Graph(), None), "never captured: torch says so"
    assert not own.replays(Graph(), contents)
    assert graphs.inserted == []


def test_what_is_taken_while_a_graph_is_captured_is_its_pools() -> None:
    own, _, heap = made()
    seen: list[int] = []

    def run() -> None:
        seen.append(heap.take(512, 7))
        heap.give(seen[-1])

    captured(own, run, Graph((1, 0)))
    assert heap.take(512, 7) == 4096 + 512
    captured(own, run, Graph((1, 0)), pool=(1, 0))
    captured(own, run, Graph((2, 0)))
    assert seen == [4096, 4096, 4096 + 1024], "the same pool again, then another one"
    assert not heap.is_pooled


def test_what_a_graph_can_not_be_recorded_for_is_told_where_it_is_replayed() -> None:
    own, graphs, _ = made()
    drawn = captured(own, lambda: torch.rand_like(torch.ones(2)), Graph())
    with own.recorded(), pytest.raises(NotRecordable, match="own, aten::rand_like draws random numbers"):
        own.replays(Graph(), drawn)
    assert not own.replays(Graph(), drawn), "a plain call may replay it"
    graphs.refused = "its graph holds a call of the host"
    with own.recorded(), pytest.raises(NotRecordable, match="call of the host"):
        own.replays(Graph(), Contents([], ""))


def test_a_capture_in_the_forward_that_is_recorded_is_refused_before_it_begins() -> None:
    own, _, heap = made()
    with own.recorded(), pytest.raises(NotRecordable, match="captures a CUDA graph of its own in later calls"):
        own.begins()
    assert not heap.is_pooled


def test_a_graph_that_its_candidate_drops_lives_until_that_is_done_with() -> None:
    """Destroyed while forward is recorded, it would break the capture."""
    own, _, _ = made()
    graph = Graph()
    captured(own, lambda: None, graph)
    lives = weakref.ref(graph)
    del graph
    with own.recorded():
        assert lives() is not None
    own.close()
    assert lives() is None


def test_a_capture_that_never_ends_is_over_with_its_candidate() -> None:
    own, _, heap = made()
    own.begins()
    own.begun(None)
    own.ends()
    own.ends()
    assert not heap.is_pooled
    before = own._watch
    assert before is not None
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert before.steps == []


class Driver:
    """A graph that is captured on the current stream, or was: the kinds of its nodes."""

    def __init__(self) -> None:
        self.kinds, self.done, self.is_implicit, self.is_broken = list[int](), list[tuple[Any, ...]](), False, False

    def nodes(self, graph: int) -> list[tuple[int, int]]:
        return list(enumerate(self.kinds))

    def instantiate(self, graph: int) -> int:
        return 500 + graph

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuStreamGetCaptureInfo_v2":
            if self.is_implicit:
                raise CudaError(name, 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
            arguments[1]._obj.value, arguments[3]._obj.value = 1, 9
        elif name == "cuGraphGetNodes":
            if self.is_broken:
                raise CudaError(name, 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
            arguments[2]._obj.value = len(self.kinds)
        else:
            self.done.append((name, *arguments))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[own_graphs.CountedGraphs, Driver]:
    driver = Driver()
    monkeypatch.setattr(own_graphs, "driver", lambda: driver)
    stream = types.SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return own_graphs.CountedGraphs(), driver


def counted(counter: own_graphs.CountedGraphs, driver: Driver, *own: str, nodes: tuple[int, ...] = (KERNEL,)) -> Any:
    """Of a graph that begins with an operator's copy and kernel; then each own launch makes these nodes."""
    counter.begins()
    counter.begun(None)
    torch.ones(2) * 2
    driver.kinds += [MEMCPY, KERNEL]
    for name in own:
        RECORDER.call(name, lambda: driver.kinds.extend(nodes))
    counter.ends()
    return counter.captured(Graph())


def test_a_replay_counts_as_what_was_captured(watched: tuple[own_graphs.CountedGraphs, Driver]) -> None:
    counter, driver = watched
    contents = counted(counter, driver, "shifted", "shifted")
    assert (RECORDER.is_on, RECORDER.place) == (False, None)
    _, found = trace.recorded(lambda: [counter.replays(Graph(), contents) for _ in range(2)])
    assert found.launches["shifted"][0] == 4
    assert found.ops["aten::mul"][0] == 2
    assert not counter.replays(Graph(), contents)


def test_a_muted_replay_lacks_own_kernels_and_nothing_else(
    watched: tuple[own_graphs.CountedGraphs, Driver],
) -> None:
    counter, driver = watched
    contents = counted(counter, driver, "shifted", nodes=(MEMCPY, KERNEL))
    done, found = trace.recorded(lambda: counter.replays(Graph(raw=7), contents), muted=True)
    assert done
    assert driver.done == [
        ("cuGraphNodeSetEnabled", 507, 3, 0), ("cuGraphLaunch", 507, STREAM), ("cuCtxSynchronize",),
        ("cuGraphExecDestroy", 507),
    ]  # fmt: skip
    assert found.unseen == "aten::mul", "what it computed there is compared with nothing"
    library, _ = trace.recorded(lambda: counter.replays(Graph(), counted(counter, driver)), muted=True)
    assert not library, "no own kernel is in it: it is launched as ever"


@pytest.mark.parametrize(
    ("nodes", "flaw"),
    [((), ""), ((MEMCPY,), ""), ((KERNEL, CHILD), ""), ((KERNEL,), "is_implicit"), ((KERNEL,), "is_broken")],
    ids=["launched beside the capture", "a copy", "a graph inside", "no graph is known", "nodes are not counted"],
)
def test_launches_that_are_not_told_from_the_librarys_count_for_nothing(
    watched: tuple[own_graphs.CountedGraphs, Driver], nodes: tuple[int, ...], flaw: str
) -> None:
    """Else a decoy in a graph would take the library's work with it where own kernels are off."""
    counter, driver = watched
    driver.is_implicit, driver.is_broken = flaw == "is_implicit", flaw == "is_broken"
    contents = counted(counter, driver, "shifted", nodes=nodes)
    done, found = trace.recorded(lambda: counter.replays(Graph(), contents), muted=True)
    assert not done, "torch launches all of it"
    assert (found.launches, found.ops, driver.done) == ({}, {}, [])


def test_a_capture_in_a_muted_call_launches_all_the_same(watched: tuple[own_graphs.CountedGraphs, Driver]) -> None:
    counter, _ = watched
    called: list[int] = []

    def capture() -> None:
        counter.begins()
        counter.begun(None)
        RECORDER.call("shifted", lambda: called.append(1))
        counter.ends()

    trace.recorded(capture, muted=True)
    assert called == [1]


class Plain:
    """As torch's own class, as far as its states go."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keeps, self.done = keep_graph, list[str]()

    def capture_begin(self, pool: Any = (0, 0), capture_error_mode: str = "global") -> None:
        assert isinstance(pool, tuple)
        assert "instantiate" not in self.done, "it owns a captured graph"
        self.done.append(capture_error_mode)

    def capture_end(self) -> None:
        self.done.append("end")

    def instantiate(self) -> None:
        assert self.keeps
        self.done.append("instantiate")

    def replay(self) -> None:
        self.done.append("replay")


class Told:
    """An observer that takes replays of what it has seen, where told to."""

    def __init__(self) -> None:
        self.heard, self.takes = list[Any](), False

    def begins(self) -> None:
        self.heard.append("begins")

    def begun(self, pool: Any) -> None:
        self.heard.append(pool)

    def ends(self) -> None:
        self.heard.append("ends")

    def captured(self, graph: Any) -> Any:
        return "contents"

    def replays(self, graph: Any, contents: Any) -> bool:
        self.heard.append(contents)
        return self.takes


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Told]:
    """`torch.cuda`, where the class is ours over `Plain`, and who is told."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Plain)
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", Plain)
    spec = importlib.util.spec_from_file_location("own_graphs_over_plain", own_graphs.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = Told()
    module.install(told)
    return torch.cuda, told


def test_a_graph_is_ready_for_its_launch_when_its_capture_ends_as_torchs_is(torchs: tuple[Any, Told]) -> None:
    """`raw_cuda_graph_exec` is there, another capture is refused, and the first replay takes no longer than others."""
    cuda, told = torchs
    graph, kept = cuda.CUDAGraph(), cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="relaxed")
    graph.capture_end()
    graph.replay()
    assert graph.keeps
    assert graph.done == ["relaxed", "end", "instantiate", "replay"]
    with pytest.raises(AssertionError, match="owns a captured graph"):
        graph.capture_begin()
    kept.capture_begin((0, 1), "thread_local")
    kept.capture_end()
    assert kept.done == ["thread_local", "end"], "who keeps it says when"
    assert told.heard == ["begins", None, "ends", "contents", "begins", "begins", (0, 1), "ends"]


def test_what_is_known_of_a_graph_is_not_its_candidates_to_say(torchs: tuple[Any, Told]) -> None:
    cuda, told = torchs
    told.takes = True

    class Lying(cuda.CUDAGraph):  # type: ignore[misc, name-defined]
        contents: Any = ({"shifted": (1, 1)}, {}, [])
        observer: Any = None

    graph = Lying()
    graph.contents = graph.observer = None
    graph.replay()
    assert (told.heard, graph.done) == ([None], [])
    assert not {"observer", "contents"} & set(dir(cuda.CUDAGraph))
