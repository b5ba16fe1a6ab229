"""flashinfer-trace: a JSON a definition (axes, inputs, `reference` with `run`), and workloads as JSONL.

A variable axis has the value of the first workload that names the definition. Inputs that a workload keeps in files
are not read: the definition is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbrl_async.kernels.importing.found import Found, LeftOut, stem_of, with_model_of

DEFAULT_AXIS = 64
DTYPES = {
    "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
}  # fmt: skip


def knows(place: Path) -> bool:
    return place.is_dir() and next(place.rglob("definitions/**/*.json"), None) is not None


def read(place: Path) -> Iterator[Found]:
    workloads = _workloads(place)
    for path in sorted(place.rglob("definitions/**/*.json")):
        origin = str(path.relative_to(place))
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
            yield Found(stem_of(path.stem), _source(definition, workloads.get(path.stem, {})), origin=origin)
        except LeftOut as reason:
            yield Found(stem_of(path.stem), "", origin=origin, left_out=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield Found(stem_of(path.stem), "", origin=origin, left_out="is no definition")


def _workloads(place: Path) -> dict[str, Mapping[str, Any]]:
    """The first of each definition."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(place.rglob("workloads/**/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                found.setdefault(row["definition"], row["workload"])
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _source(definition: Mapping[str, Any], workload: Mapping[str, Any]) -> str:
    axes = {
        name: axis["value"] if axis["type"] == "const" else workload.get("axes", {}).get(name, DEFAULT_AXIS)
        for name, axis in definition["axes"].items()
    }
    given = workload.get("inputs", {})
    makers = [_maker(name, spec, axes, given.get(name, {})) for name, spec in definition["inputs"].items()]
    text = with_model_of(definition["reference"], "run")
    return f"{text}\n\ndef get_inputs():\n    return [{', '.join(makers)}]\n\n\ndef get_init_inputs():\n    return []\n"


def _maker(name: str, spec: Mapping[str, Any], axes: Mapping[str, int], given: Mapping[str, Any]) -> str:
    kind, shape, dtype = given.get("type", "random"), spec["shape"], spec["dtype"]
    if kind == "scalar":
        return repr(given["value"])
    if kind != "random":
        raise LeftOut("inputs are kept in files")
    if dtype not in DTYPES:
        raise LeftOut(f"inputs of {dtype}")
    if shape is None:
        raise LeftOut("a scalar without a workload")
    sizes = ", ".join(str(axes[axis]) for axis in shape)
    if dtype == "bool":
        return f"torch.rand({sizes}) > 0.5"
    if "int" in dtype:
        raise LeftOut("integers whose meaning the definition does not say")
    return f"torch.randn({sizes}, dtype=torch.{dtype})"
