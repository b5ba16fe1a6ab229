"""A candidate is one text. The files beside it (helper modules, sources that it compiles) are comments at its end.

::

    kernel.py + helper.py ─ pack ─▶ "…kernel.py…\\n# kbrl: beside helper.py\\n#|import torch…" ─ files_of ─▶ helper.py

So whatever handles candidates (archives, caches, the wire, retrieval) handles those with files, too. Nothing here runs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath

MAX_FILES = 64
MAX_BYTES = 1 << 20
_MARK = "# kbrl: beside "
_LINE = "#|"
_BLOCK = re.compile(rf"^{_MARK}(?P<name>[\w.][\w./-]*)\n(?P<lines>(?:#\|[^\n]*(?:\n|\Z))*)", re.MULTILINE)
_EVERYWHERE = [["kbrl_async"], ["torch"], ["triton"], ["numpy"]]
"""Packages that a sandbox has."""
_COMPILED = frozenset([".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".c", ".json", ".txt"])
"""Of files that are no modules: what a candidate compiles or reads, where a string of it names them."""


def pack(source: str, files: dict[str, str]) -> str:
    """`files`: texts by their paths relative to the candidate.

    :raises ValueError: a path leads elsewhere.
    """
    blocks = []
    for name, text in sorted(files.items()):
        if not _is_below(name):
            raise ValueError(f"{name!r} does not lie beside the candidate")
        lines = "".join(f"{_LINE}{line}\n" for line in text.split("\n"))
        blocks.append(f"{_MARK}{name}\n{lines}")
    return "\n\n".join([source.rstrip("\n"), *blocks]) + ("" if blocks else "\n")


def files_of(source: str) -> dict[str, str]:
    """The files that a candidate brings, by their paths relative to it; at most `MAX_FILES`."""
    found: dict[str, str] = {}
    for block in _BLOCK.finditer(source) if _MARK in source else ():
        if len(found) < MAX_FILES and _is_below(block["name"]):
            lines = block["lines"].rstrip("\n").split("\n")
            found[block["name"]] = "\n".join(line.removeprefix(_LINE) for line in lines)
    return found


def modules_of(source: str) -> str:
    """The candidate with the text of its helper modules, for whoever looks at code."""
    return "\n".join([source, *(text for name, text in files_of(source).items() if name.endswith(".py"))])


def gathered(path: Path, source: str | None = None) -> str:
    """The candidate at `path` (`source`: its text, where it is not there) with what lies beside it that it imports, or
    names in a string; theirs, too.
    """
    source = path.read_text() if source is None else source
    found: dict[str, str] = {}
    todo, room = [(source, path.parent)], MAX_BYTES
    while todo:
        text, folder = todo.pop()
        for file in _named(text, folder, path.parent):
            name = file.relative_to(path.parent).as_posix()
            if name in found or file == path or len(found) == MAX_FILES or file.stat().st_size > room:
                continue
            try:
                found[name] = file.read_text()
            except (OSError, UnicodeDecodeError):
                continue
            room -= len(found[name])
            todo.append((found[name], file.parent))
    return pack(source, found) if found else source


def _named(text: str, folder: Path, root: Path) -> list[Path]:
    """Existing files below `root` that a module in `folder` imports or names. What every candidate has anyway is none,
    also where it lies beside: whoever works in a checkout of ours has all of it there.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [file for alias in node.names for file in _module(root, alias.name.split("."))]
        elif isinstance(node, ast.ImportFrom):
            start = folder if node.level else root
            for _ in range(node.level - 1):
                start = start.parent
            parts = node.module.split(".") if node.module else []
            found += _module(start, parts)
            found += [file for alias in node.names for file in _module(start, [*parts, alias.name])]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            name = PurePosixPath(node.value)
            if name.suffix in _COMPILED and _is_below(node.value) and (folder / name).is_file():
                found.append(folder / name)
    return [file for file in found if file.resolve().is_relative_to(root.resolve())]


def _module(start: Path, parts: list[str]) -> list[Path]:
    """A module's file with the `__init__.py` of each package on its way; nothing where it does not lie there."""
    if parts[:1] in _EVERYWHERE:
        return []
    if not parts:
        return [path] if (path := start / "__init__.py").is_file() else []
    place = start.joinpath(*parts)
    file = place.with_name(place.name + ".py")
    found = [file] if file.is_file() else [path] if (path := place / "__init__.py").is_file() else []
    packages = [start.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts))] if found else []
    return [*(path for path in packages if path.is_file()), *found]


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(re.fullmatch(r"[\w.][\w./-]*", name))
