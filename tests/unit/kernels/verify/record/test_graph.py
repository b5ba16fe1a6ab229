"""Reading captured graphs, through a driver that holds them as plain lists."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from kbrl_async.kernels.cuda_driver import CHILD, EMPTY, KERNEL, MEMCPY, MEMSET
from kbrl_async.kernels.verify.cuda.record.graph import Graphs, NotRecordable, Raw, _Copy

HOST = 3


class Driver:
    """`graphs`: for each, its nodes as (kind, numbers of those before, child graph, programmatic)."""

    def __init__(self, **graphs: list[tuple[Any, ...]]) -> None:
        self._graphs = {number + 1: nodes for number, nodes in enumerate(graphs.values())}
        self._handles = {name: number + 1 for number, name in enumerate(graphs)}

    def _node(self, node: int) -> tuple[Any, ...]:
        return (*self._graphs[node // 100][node % 100], None, False)

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def cuGraphGetNodes(self, graph: int, array: Any, count: Any) -> None:  # noqa: N802 - the driver's name
        nodes = self._graphs[graph]
        for place in range(len(nodes) if array is not None else 0):
            array[place] = 100 * graph + place
        count._obj.value = len(nodes)

    def cuGraphGetEdges_v2(self, graph: int, begin: Any, end: Any, how: Any, count: Any) -> None:  # noqa: N802
        nodes = enumerate(self._graphs[graph])
        edges = [(before, place, node[3:] == (True,)) for place, node in nodes for before in node[1]]
        for number, (before, place, programmatic) in enumerate(edges if begin is not None else ()):
            begin[number], end[number] = 100 * graph + before, 100 * graph + place
            how[number].kind = int(programmatic)
        count._obj.value = len(edges)

    def cuGraphNodeGetType(self, node: int, kind: Any) -> None:  # noqa: N802
        kind._obj.value = self._node(node)[0]

    def cuGraphChildGraphNodeGetGraph(self, node: int, graph: Any) -> None:  # noqa: N802
        graph._obj.value = self._handles[self._node(node)[2]]


def read(**graphs: list[tuple[Any, ...]]) -> list[tuple[int, tuple[int, ...], int]]:
    """Kind, what it waits for, and its place in the captured graph."""
    found = Graphs(cast(Any, Driver(**graphs))).read(1)
    return [(raw.kind, raw.after, raw.place) for raw in found]


def test_nodes_come_in_the_order_of_capture_with_what_they_wait_for() -> None:
    found = read(whole=[(KERNEL, []), (MEMSET, [0]), (KERNEL, [0]), (MEMCPY, [1, 2])])
    assert found == [(KERNEL, (), 0), (MEMSET, (0,), 1), (KERNEL, (0,), 2), (MEMCPY, (1, 2), 3)]


def test_an_empty_node_passes_on_what_it_waits_for() -> None:
    found = read(whole=[(KERNEL, []), (KERNEL, []), (EMPTY, [0, 1]), (KERNEL, [2])])
    assert found[-1] == (KERNEL, (0, 1), 3)


def test_a_graph_inside_is_unrolled_between_its_neighbours() -> None:
    inner = [(KERNEL, []), (KERNEL, [0]), (KERNEL, [0])]
    found = read(whole=[(MEMSET, []), (CHILD, [0], "inner"), (MEMCPY, [1])], inner=inner)
    assert [after for _, after, _ in found] == [(), (0,), (1,), (1,), (2, 3)]
    assert [place for *_, place in found] == [0, 1, 1, 1, 2]


def test_an_empty_graph_inside_keeps_the_order_around_it() -> None:
    found = read(whole=[(MEMSET, []), (CHILD, [0], "inner"), (MEMCPY, [1])], inner=[])
    assert found == [(MEMSET, (), 0), (MEMCPY, (0,), 2)]


def test_a_known_graph_inside_is_read_itself_and_its_nodes_have_their_own_numbers() -> None:
    copy, original = [(KERNEL, [])], [(KERNEL, []), (CHILD, [0], "deeper"), (MEMSET, [1])]
    driver = Driver(
        whole=[(MEMSET, []), (CHILD, [0], "copy"), (KERNEL, [1])], copy=copy, original=original, deeper=[(KERNEL, [])]
    )
    found = Graphs(cast(Any, driver)).read(1, {1: lambda: 3})
    assert [(raw.kind, raw.after, raw.within, raw.place) for raw in found] == [
        (MEMSET, (), -1, 0), (KERNEL, (0,), 1, 0), (KERNEL, (1,), 1, 1), (MEMSET, (2,), 1, 2), (KERNEL, (3,), -1, 2),
    ]  # fmt: skip
    assert found[1].node // 100 == 3


class Capturing:
    """A stream that is captured into graph 9, which has two nodes and goes on from these."""

    def __init__(self, *after: int) -> None:
        self.after, self.added, self.status = list(after), list[tuple[Any, ...]](), 1

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuStreamGetCaptureInfo_v2":
            arguments[1]._obj.value, arguments[3]._obj.value = self.status, 9
        elif name == "cuGraphGetNodes":
            arguments[2]._obj.value = 2
        else:
            node, graph, after, count, child = arguments
            self.added.append((name, graph, [after[number] for number in range(count)], child))
            node._obj.value = 77

    def dependencies(self, stream: int) -> list[int]:
        return self.after

    def set_dependencies(self, stream: int, nodes: list[int]) -> None:
        self.after = nodes


@pytest.mark.parametrize("after", [[], [11, 12]])
def test_a_graph_is_put_behind_what_was_captured_and_before_what_comes(after: list[int]) -> None:
    driver = Capturing(*after)
    assert Graphs(cast(Any, driver)).insert(5, 4) == 2
    assert driver.added == [("cuGraphAddChildGraphNode", 9, after, 4)]
    assert driver.after == [77]


@pytest.mark.parametrize(("status", "graph"), [(0, 0), (1, 9), (2, 0)], ids=["none", "active", "broken"])
def test_only_of_an_active_capture_is_said_which_graph_it_is(status: int, graph: int) -> None:
    driver = Capturing()
    driver.status = status
    assert Graphs(cast(Any, driver)).captured_on(5) == graph


def test_a_kernel_that_may_begin_before_the_one_before_it_has_ended_is_marked() -> None:
    graphs = Graphs(cast(Any, Driver(whole=[(KERNEL, []), (KERNEL, [0], None, True)])))
    assert [raw.is_serialized for raw in graphs.read(1)] == [False, True]


@pytest.mark.parametrize(("kind", "words"), [(HOST, "a call of the host"), (13, "depends on values"), (99, "type 99")])
def test_what_is_no_work_of_the_device_is_refused_by_its_name(kind: int, words: str) -> None:
    with pytest.raises(NotRecordable, match=words):
        read(whole=[(KERNEL, []), (kind, [0])])


def test_a_node_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(NotRecordable, match="order of its work"):
        read(whole=[(KERNEL, [1]), (KERNEL, [])])


class Copying:
    """A copy node's parameters."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def call(self, name: str, node: int, params: Any) -> None:
        copy: _Copy = params._obj
        copy.to.kind = copy.source.kind = 2
        copy.to.device, copy.source.device, copy.width, copy.height, copy.depth = 1000, 2000, 64, 1, 1
        copy.source.x = 16
        for field, value in self._fields.items():
            side, _, part = field.partition("_")
            setattr(getattr(copy, side), part, value) if part else setattr(copy, side, value)


def copied(**fields: Any) -> tuple[int, int, int]:
    return Graphs(cast(Any, Copying(**fields))).copy(1)


def test_a_copy_within_the_device_is_to_from_and_size() -> None:
    assert copied() == (1000, 2016, 64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"source_kind": 1}, "host and device"), ({"height": 2}, "rectangle"), ({"to_y": 1}, "rectangle")],
)
def test_other_copies_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(NotRecordable, match=words):
        copied(**fields)


def test_the_layout_of_a_copy_is_the_drivers() -> None:
    assert ctypes.sizeof(_Copy) == 200


def test_a_raw_node_stands_for_itself() -> None:
    assert Raw(1, KERNEL, ()).place == 0
