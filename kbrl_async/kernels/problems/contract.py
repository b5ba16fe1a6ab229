"""The KernelBench contract of one problem's source, checked without running it, and its shapes.

A size line `rows = 512  # gpu: 16384` carries two shapes; `shapes="gpu"` takes the second.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.problems.declared import declared, refuse_misspelt
from kbrl_async.kernels.problems.workloads import GROUPS, INPUTS
from protocols.records import Problem

REQUIRED = ("Model", "get_inputs", "get_init_inputs")
_FIRST_GROUP = f"\n\ndef {INPUTS}():\n    return list({GROUPS}()[0])\n"
SIZE_LINE = re.compile(r"^(\w+ = )(.+?)  # gpu: (.+)$", re.MULTILINE)


def parse_problem(
    source: str,
    problem_id: str,
    *,
    level: int = 0,
    origin: str = "",
    shapes: str = "cpu",
    difficulty: float = 0.5,
    split: str = "train",
) -> Problem:
    """Checks the contract statically and chooses the shapes. Raises `ProblemError` with file and line."""
    origin = origin or problem_id
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ProblemError(
            f"{origin}:{error.lineno} does not parse: {error.msg}", "Mend the file or take it out"
        ) from None
    names = bound_names(tree.body)
    if GROUPS in names and INPUTS not in names:
        source, names = source.rstrip() + _FIRST_GROUP, {*names, INPUTS}
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ProblemError(
            f"{origin} lacks {', '.join(missing)}", "A problem defines Model, get_inputs() and get_init_inputs()"
        )
    refuse_misspelt(tree, origin)
    text = SIZE_LINE.sub(r"\1\3" if shapes == "gpu" else r"\1\2", source)
    declared(text, origin)
    return Problem(problem_id, level, problem_id.partition("/")[2], text, float(difficulty), split)


def bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """What a file defines at its top level: functions, classes, and other names for them, as in `Model = Other`."""
    names = {getattr(node, "name", "") for node in body}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}
