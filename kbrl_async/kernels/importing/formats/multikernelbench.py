"""MultiKernelBench: `reference/CATEGORY/NAME.py`, most with KernelBench's contract, some with `get_input_groups()`.

A group is a list of inputs, made of a line of the JSON file beside the problem. The line with the largest tensors is
taken, and stands in the problem's text: a confined child reads no files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbrl_async.kernels.importing.found import Found, LeftOut, parsed, stem_of
from kbrl_async.kernels.problems.contract import bound_names

GROUPS = "get_input_groups"
HEAD = '''import io

__file__ = "problem.py"
_LINES = r"""CASES"""


def open(*_, **__):
    return io.StringIO(_LINES)


'''
"""Their files open the JSON beside them; ours holds the line."""


def knows(place: Path) -> bool:
    first = sorted(place.glob("*/*.py"))[:3]
    return (place / "reference").is_dir() or any(GROUPS in path.read_text(errors="replace") for path in first)


def read(place: Path) -> Iterator[Found]:
    root = place / "reference" if (place / "reference").is_dir() else place
    for path in sorted(root.glob("*/*.py")):
        origin, name = str(path.relative_to(place)), f"{path.parent.name}_{path.stem}"
        try:
            yield Found(stem_of(name), _source(path), origin=origin)
        except LeftOut as reason:
            yield Found(stem_of(name), "", origin=origin, left_out=str(reason))


def _source(path: Path) -> str:
    source = path.read_text(encoding="utf-8", errors="replace")
    if GROUPS not in bound_names(parsed(source)):
        return source
    case = _largest(path.with_suffix(".json"))
    head = HEAD.replace("CASES", case)
    return f"{head}{source.rstrip()}\n\n\ndef get_inputs():\n    return {GROUPS}()[0]\n"


def _largest(path: Path) -> str:
    """The line whose tensors have the most elements."""
    if not path.is_file():
        raise LeftOut("no JSON beside it")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        sized = [(_elements(json.loads(line)), line) for line in lines]
    except ValueError:
        raise LeftOut("the JSON beside it does not parse") from None
    if not sized:
        raise LeftOut("the JSON beside it is empty")
    return max(sized)[1]


def _elements(node: Any) -> int:
    """Of all shapes below a node."""
    if isinstance(node, list):
        return sum(map(_elements, node))
    if not isinstance(node, dict):
        return 0
    shape = node.get("shape")
    own = math.prod(shape) if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else 0
    return own + sum(_elements(value) for value in node.values() if isinstance(value, list | dict))
