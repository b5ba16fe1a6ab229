"""MultiKernelBench: `reference/CATEGORY/NAME.py`, most with KernelBench's contract, some with `get_input_groups()`.

A group is a list of inputs, made of a line of the JSON file beside the problem. Of these, some fifty a problem, a few
from the smallest to the largest are its workloads, and stand in its text: a confined child reads no files.
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
_LINES = r"""CASES""".splitlines()
_CASE = len(_LINES) - 1


def open(*_, **__):
    return io.StringIO(_LINES[_CASE])


'''
TAIL = f"""


def get_inputs(case=_CASE):
    global _CASE
    _CASE = case
    return {GROUPS}()[0]


WORKLOADS = ROWS
"""
WORKLOADS = 6
"""Their files open the JSON beside them; ours holds the lines, and gives one."""


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
    lines = _chosen(path.with_suffix(".json"))
    rows = [{"name": f"case {number}", "shape": {"case": number}} for number in range(len(lines))]
    return HEAD.replace("CASES", "\n".join(lines)) + source.rstrip() + TAIL.replace("ROWS", repr(rows))


def _chosen(path: Path) -> list[str]:
    """Lines from the one whose tensors have the fewest elements to the one with the most."""
    if not path.is_file():
        raise LeftOut("no JSON beside it")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        sized = [(_elements(json.loads(line)), line) for line in lines]
    except ValueError:
        raise LeftOut("the JSON beside it does not parse") from None
    if not sized:
        raise LeftOut("the JSON beside it is empty")
    ordered = [line for _, line in sorted(sized)]
    count = min(WORKLOADS, len(ordered))
    places = [round(n * (len(ordered) - 1) / max(1, count - 1)) for n in range(1, count)] if count > 1 else []
    return [ordered[place] for place in (0, *places)] if count > 1 else ordered


def _elements(node: Any) -> int:
    """Of all shapes below a node."""
    if isinstance(node, list):
        return sum(map(_elements, node))
    if not isinstance(node, dict):
        return 0
    shape = node.get("shape")
    own = math.prod(shape) if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else 0
    return own + sum(_elements(value) for value in node.values() if isinstance(value, list | dict))
