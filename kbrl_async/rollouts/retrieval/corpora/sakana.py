"""AI-CUDA-Engineer-Archive: thousands of CUDA kernels for the problems of KernelBench, with their measured runtimes.

`CUDA_Code` is a torch C++ extension, not a `ModelNew`: an example to read, not an answer to copy. Only rows marked
correct are taken, unless `include_incorrect`.
"""

from __future__ import annotations

import re

from kbrl_async.rollouts.retrieval.corpora.rows import Row, flag, number, optional_text, text
from kbrl_async.rollouts.retrieval.entries import Entry, Skip, digest

NAME = "sakana"
HUB = "SakanaAI/AI-CUDA-Engineer-Archive"
COLUMNS = frozenset({"CUDA_Code", "PyTorch_Code_Module"})


def entry(row: Row, levels: frozenset[int], include_incorrect: bool) -> Entry:
    """The example of a row. Raises `Skip`."""
    kernel, reference = text(row, "CUDA_Code"), text(row, "PyTorch_Code_Module")
    level = level_of(row)
    if level not in levels:
        raise Skip("another level")
    correct = flag(row, "Correct")
    if not correct and not include_incorrect:
        raise Skip("not correct")
    return Entry(
        uid=f"{NAME}:{digest(reference, kernel)}",
        corpus=NAME,
        reference=reference,
        kernel=kernel,
        backend="cuda",
        problem_id=_problem_id(row, level),
        level=level,
        speedup=number(row, "CUDA_Speedup_Native") if correct else None,
        verified=correct,
        origin=optional_text(row, "Kernel_Name"),
    )


def level_of(row: Row) -> int:
    """`1`, `"1"`, `1.0` and `"level_1"`; 0 where there is none."""
    value = row.get("Level_ID")
    if isinstance(value, str):
        found = re.search(r"(\d{1,3})(\.0)?$", value)
        return int(found.group(1)) if found else 0
    level = number(row, "Level_ID")
    return int(level) if level is not None and 0 <= level < 1000 else 0


def _problem_id(row: Row, level: int) -> str:
    name = optional_text(row, "Op_Name")
    return f"L{level}/{name}" if name else ""
