"""What no linter has a rule for: no import goes in a circle, also not in one wing, and no two classes have one name."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

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


ROOT = Path(__file__).parents[2]
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
NAMED_TWICE = {
    "Model": "of problems that a page or a benchmark quotes",
    "ModelNew": "of candidates that a page or a benchmark quotes",
    "Result": "public in Python, and on the wire",
}


def named_twice(sources: list[tuple[str, str]]) -> dict[str, list[str]]:
    """By name of a class, the places of its definitions, where there are several."""
    places: dict[str, list[str]] = {}
    for place, source in sources:
        for name in CLASS.findall(source):
            places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_one_name() -> None:
    folders = [(ROOT / top).rglob("*.py") for top in ("kbrl_async", "services", "protocols", "benchmarks", "examples")]
    paths = [path for path in chain(*folders) if "suite" not in path.parts and "candidates" not in path.parent.name]
    found = named_twice([(str(path.relative_to(ROOT)), path.read_text()) for path in paths])
    assert {name: places for name, places in found.items() if name not in NAMED_TWICE} == {}


def test_a_name_of_two_classes_is_found() -> None:
    sources = [("a.py", "class Row(Struct):\n"), ("b.py", "if True:\n    class Row:\n"), ("c.py", "class Rows:\n")]
    assert named_twice(sources) == {"Row": ["a.py", "b.py"]}
