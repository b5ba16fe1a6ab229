"""What `lint-imports` has no contract for: no import goes in a circle, also not among the modules of one wing."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def circle(importers: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(importers).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_import_goes_in_a_circle() -> None:
    graph = grimp.build_graph("services", "kbrl_async", "protocols", cache_dir=None)
    assert len(graph.modules) > 400
    assert circle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


@pytest.mark.parametrize("importers", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"a"}}])
def test_a_circle_is_found(importers: dict[str, set[str]]) -> None:
    assert set(circle(importers)) == set(importers)
