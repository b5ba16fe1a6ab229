"""Tests look at what a caller sees: a result, a log line, a counter, a file. Private names of ours are used by those
listed here and by no other."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("kbrl_async", "services", "protocols", "benchmarks", "environments")
PATCHES = ("setattr", "getattr", "delattr", "hasattr", "patch", "object")
FOREIGN = {"_C", "_compile_kernel", "_replace", "_repr_html_", "_exit"}
"""Torch's, a named tuple's, a notebook's, the system's."""
RECORDERS = "processes of a GPU that hold others' recordings: what they keep is put there, as no host without one can"
FORWARDS = "halves of a check that needs a GPU to be had whole"
REMAINING: dict[str, tuple[int, str]] = {
    "tests/protocol/test_nanny.py": (3, "children that live for minutes"),
    "tests/tinker_models.py": (1, "of a stand-in of the tests' own"),
    "tests/unit/cli/test_launch.py": (2, "honcho's own hooks"),
    "tests/unit/kernels/backends/test_lean.py": (2, "the command that a build runs, to see what it reads"),
    "tests/unit/kernels/backends/test_triton.py": (4, FORWARDS),
    "tests/unit/kernels/verify/pretended_gpu.py": (1, "memory of a device, which torch can't see here"),
    "tests/unit/kernels/verify/record/test_graph.py": (
        1,
        "a structure that its stand-in for a driver fills",
    ),
    "tests/unit/kernels/verify/record/test_own_graphs.py": (1, FORWARDS),
    "tests/unit/kernels/verify/record/test_recorders.py": (1, RECORDERS),
    "tests/unit/kernels/verify/record/test_second_recorders.py": (37, RECORDERS),
    "tests/unit/kernels/verify/test_cuda_parts.py": (11, FORWARDS),
    "tests/unit/kernels/verify/test_device_places.py": (15, FORWARDS),
    "tests/unit/kernels/verify/test_large.py": (2, "a secret draw: what is in memory when one is made"),
    "tests/unit/kernels/verify/test_memory.py": (2, FORWARDS),
    "tests/unit/kernels/verify/test_no_memory.py": (4, RECORDERS),
    "tests/unit/kernels/verify/test_one_set.py": (35, FORWARDS),
    "tests/unit/kernels/verify/test_replay_parts.py": (6, FORWARDS),
    "tests/unit/kernels/verify/test_reservations.py": (3, FORWARDS),
    "tests/unit/kernels/verify/test_shared_arenas.py": (10, FORWARDS),
    "tests/unit/kernels/verify/test_spared.py": (4, FORWARDS),
    "tests/unit/kernels/verify/test_starting.py": (3, FORWARDS),
    "tests/unit/kernels/verify/test_timed_alike.py": (26, FORWARDS),
    "tests/unit/kernels/verify/test_watched.py": (9, FORWARDS),
    "tests/unit/kernels/verify/test_whole_temporaries.py": (13, FORWARDS),
}
"""How many, and why there."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to something, attributes of its objects included."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def used(tree: ast.Module) -> Iterator[str]:
    """Private names that are asked of something else than `self`, imported, or patched."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=given) if called in PATCHES:
                texts = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                names = [text.rpartition(".")[2] for text in texts]
            case _:
                continue
        yield from filter(is_private, names)


def counted(tests: dict[str, str], ours: set[str]) -> Counter[str]:
    return Counter(place for place, source in tests.items() for name in used(ast.parse(source)) if name in ours)


def test_private_names_are_used_where_they_are_listed_and_nowhere_else() -> None:
    modules = [path for top in OURS for path in (ROOT / top).rglob("*.py")]
    ours = {name for path in modules for name in defined(ast.parse(path.read_text())) if is_private(name)} - FOREIGN
    assert len(ours) > 1000
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    listed = {place: number for place, (number, _) in REMAINING.items()}
    assert dict(counted(tests, ours)) == listed, "ask for what a caller sees, or pass in what the test needs"


def test_each_way_to_a_private_name_is_counted() -> None:
    source = """
from a import _one, two
class Test:
    def test(self):
        self._one, cls._one, x.__class__, x.one
x._one = x.y._one
monkeypatch.setattr(x, "_one", 1)
patch("a.b._one")
"""
    assert counted({"a": source, "b": "x.one"}, {"_one"}) == {"a": 5}
