"""The figures that KernelBench's own analysis prints of a run folder, from the same files. Pure but for `read`.

It looks at sample 0 only; a problem without results counts as wrong; one without a baseline time is left out of the
speed figures but not of the rates. Speedups are baseline mean over runtime, both in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.kernelbench.files import Baseline
from kbrl_async.kernels.kernelbench.formats import EVAL_FILE

THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)


class Analysis(msgspec.Struct, frozen=True):
    """The fields of the `output_file` that KernelBench's analysis writes, under its names."""

    level: int
    total_count: int
    total_eval: int
    compiled_count: int
    correct_count: int
    compilation_rate: float
    correctness_rate: float
    geo_mean_speedup: float
    fast_p: dict[str, float]


def analyse(
    table: Mapping[str, Sequence[Mapping[str, Any]]],
    names: Mapping[int, str],
    baseline: Mapping[str, Baseline],
    level: int,
) -> Analysis:
    """`names`: file name by number, of all problems of the level; `baseline`: by file name."""
    first = {int(key): entry for key, entries in table.items() for entry in entries if entry["sample_id"] == 0}
    total = len(names)
    compiled = sum(entry["compiled"] is True for entry in first.values())
    correct = sum(entry["correctness"] is True for entry in first.values())
    aligned = [first.get(pid) for pid, name in sorted(names.items()) if name in baseline]
    means = [baseline[name].mean for _, name in sorted(names.items()) if name in baseline]
    ratios = [
        mean / entry["runtime"] for entry, mean in zip(aligned, means, strict=True) if entry and entry["correctness"]
    ]
    return Analysis(
        level,
        total,
        len(table),
        compiled,
        correct,
        compiled / total if total else 0.0,
        correct / total if total else 0.0,
        _mean(ratios),
        {str(p): sum(r > p for r in ratios) / len(aligned) if aligned else 0.0 for p in THRESHOLDS},
    )


def _mean(ratios: Sequence[float]) -> float:
    """Their geometric mean: 0 of nothing, not a number where a correct kernel was not timed (its runtime is −1)."""
    if not ratios:
        return 0.0
    product = math.prod(ratios)
    return product ** (1 / len(ratios)) if product >= 0 or len(ratios) == 1 else math.nan


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """`eval_results.json` of a run folder.

    :raises UserError: it is missing or no such file.
    """
    path = folder / EVAL_FILE
    try:
        table: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", "Give a KernelBench run folder with results") from None
    return table
