"""flashinfer-trace: a JSON a definition (axes, inputs, `reference` with a function), and workloads as JSONL.

::

    definition ─▶ Model around its function, get_inputs(axis=…, scalar=…)   workloads ─▶ rows of WORKLOADS, six at most

The function is `run`, as the format has it; else the one that the definition names, else the only public one.

Small integers that a workload keeps in a safetensors file beside it stand in the problem's text. Without that file,
and without a workload, integers are drawn by what their names mean: offsets rise, page numbers stay below the number
of pages.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbrl_async.kernels.importing.found import Found, LeftOut, parsed, stem_of, with_model_of
from kbrl_async.kernels.problems.contract import bound_names
from kbrl_async.kernels.syntax.scope import INPUT_MAKERS

USUAL = "run"
NAMED_BY = ("entry_point", "name", "op_type")
"""What of a definition may name its function, `main.py::attention` too."""
BATCH, AXIS, TOP = 8, 64, 8
"""Of a variable axis without a workload: batches, anything else; and `k` of a selection."""
CASES = 6
KEPT_AT_MOST = 4096
"""Elements of an input from a file that may stand in a problem's text."""
INTEGERS = {"int8", "int16", "int32", "int64", "uint8"}
FLOATS = {"float32", "float16", "bfloat16", "float64"}
EIGHT_BITS = {"float8_e4m3fn", "float8_e5m2"}
BELOW = {
    "kv_indices": "num_pages", "page_table": "num_pages", "block_table": "num_pages", "sparse_indices": "num_pages",
    "input_ids": "vocab_size", "top_k": "vocab_size", "initial_state_indices": "pool_size",
    "state_batch_indices": "state_cache_size", "positions": "max_seq_len", "seq_lens": "max_seq_len",
    "kv_last_page_len": "page_size",
}  # fmt: skip
"""Which axis an integer input counts in."""
COUNTS = {"top_k", "seq_lens", "kv_last_page_len"}
"""These are numbers from 1 on, the others places from 0 on."""
OFFSETS = """

def _offsets(count, total, dtype):
    inner = torch.sort(torch.randint(0, total + 1, (count - 2,))).values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([total])]).to(dtype)
"""


def knows(place: Path) -> bool:
    return place.is_dir() and next(place.rglob("definitions/**/*.json"), None) is not None


def read(place: Path) -> Iterator[Found]:
    workloads = _workloads(place)
    for path in sorted(place.rglob("definitions/**/*.json")):
        origin = str(path.relative_to(place))
        try:
            source = _source(json.loads(path.read_text(encoding="utf-8")), workloads.get(path.stem, []), place)
            yield Found(stem_of(path.stem), source, origin=origin)
        except LeftOut as reason:
            yield Found(stem_of(path.stem), "", origin=origin, left_out=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError):
            yield Found(stem_of(path.stem), "", origin=origin, left_out="is no definition")


def _workloads(place: Path) -> Mapping[str, list[Mapping[str, Any]]]:
    """Those of each definition."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for path in sorted(place.rglob("workloads/**/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                found[row["definition"]].append(row["workload"])
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _source(definition: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]], place: Path) -> str:
    function = _function(definition)
    inputs = _as_called(definition["reference"], function, definition["inputs"])
    totals = _totals(definition)
    made = [_maker(name, spec, totals.get(name, "")) for name, spec in inputs.items()]
    kept = _kept(inputs, workloads, place)
    for number, name in enumerate(inputs):
        if name in kept:
            made[number] = f"torch.tensor(_{name.upper()}[case], dtype=torch.{inputs[name]['dtype']})"
    cases = _cases(definition, workloads, bool(kept))
    default = max((case for case, _ in cases), key=_size)
    text = with_model_of(definition["reference"], function)
    text += OFFSETS if any("_offsets(" in one for one in made) else ""
    text += "".join(f"\n_{name.upper()} = {values!r}\n" for name, values in kept.items())
    parameters = ", ".join(f"{name}={value!r}" for name, value in default.items())
    constants = "".join(
        f"    {name} = {axis['value']!r}\n" for name, axis in definition["axes"].items() if axis["type"] == "const"
    )
    text += f"\n\ndef get_inputs({parameters}):\n{constants}    return [{', '.join(made)}]\n"
    text += "\n\ndef get_init_inputs():\n    return []\n"
    whole = [n for n, spec in enumerate(inputs.values()) if spec["shape"] is not None and spec["dtype"] in INTEGERS]
    text += f"\n\nFIXED_INPUTS = {whole!r}\n" if whole else ""
    rows = [{"name": _name(case, n), "shape": case, "weight": times} for n, (case, times) in enumerate(cases)]
    return text + (f"\n\nWORKLOADS = {rows!r}\n" if len(rows) > 1 else "")


def _function(definition: Mapping[str, Any]) -> str:
    """The name of the reference's function.

    :raises LeftOut: there is none, or it is not clear which.
    """
    body = parsed(definition.get("reference") or "")
    if USUAL in bound_names(body):
        return USUAL
    made = {node.name for node in body if isinstance(node, ast.FunctionDef)} - INPUT_MAKERS
    if not made:
        raise LeftOut("without a reference")
    named = [str(definition.get(key) or "").rpartition("::")[2].rpartition(".")[2] for key in NAMED_BY]
    public = [name for name in made if not name.startswith("_")]
    function = next((name for name in named if name in made), public[0] if len(public) == 1 else "")
    if not function:
        raise LeftOut("several functions in its reference, none named")
    return function


def _as_called(
    reference: str, function: str, inputs: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """In the order of the function's parameters, where it has the same: a definition is called by names."""
    made = [n for n in parsed(reference) if isinstance(n, ast.FunctionDef) and n.name == function]
    names = [arg.arg for node in made for arg in node.args.args]
    return {name: inputs[name] for name in names} if sorted(names) == sorted(inputs) else inputs


def _cases(
    definition: Mapping[str, Any], workloads: Sequence[Mapping[str, Any]], has_kept: bool
) -> list[tuple[dict[str, Any], int]]:
    """Arguments of `get_inputs`, with how often they occur; from the smallest to the largest where there are many."""
    counted: Counter[str] = Counter()
    for number, workload in enumerate(workloads if not has_kept else workloads[:CASES]):
        given = workload.get("inputs", {})
        scalars = {name: one["value"] for name, one in given.items() if one.get("type") == "scalar"}
        case = {**_defaults(definition, workload.get("axes", {})), **scalars}
        counted[json.dumps({**case, **({"case": number} if has_kept else {})})] += 1
    found = sorted(((json.loads(text), times) for text, times in counted.items()), key=lambda one: _size(one[0]))
    if not found:
        return [(_defaults(definition, {}), 1)]
    if len(found) <= CASES:
        return found
    return [found[round(n * (len(found) - 1) / (CASES - 1))] for n in range(CASES)]


def _defaults(definition: Mapping[str, Any], axes: Mapping[str, int]) -> dict[str, Any]:
    """Variable axes and scalars: as a workload says, else a small size that keeps the definition's own rules."""
    found: dict[str, Any] = {}
    for name, axis in definition["axes"].items():
        if axis["type"] != "const":
            usual = BATCH if name.startswith(("batch", "num_seqs")) else BATCH + 1 if name.startswith("len_") else AXIS
            found[name] = axes.get(name, usual)
    for name, spec in definition["inputs"].items():
        if not spec["shape"]:
            found[name] = _scalar(name, spec["dtype"])
    return found


def _scalar(name: str, dtype: str) -> float | int | bool:
    if dtype == "bool":
        return True
    if dtype in INTEGERS:
        return 0 if "offset" in name else TOP
    return 0.125 if "sm_scale" in name or name == "scale" else 1.0


def _totals(definition: Mapping[str, Any]) -> dict[str, str]:
    """By the name of an input with offsets, the axis that its last one equals."""
    rules = " ; ".join(map(str, definition.get("constraints") or ()))
    return {name: axis for axis, name in re.findall(r"(\w+) == (\w+)\[-1\]\.item\(\)", rules)}


def _maker(name: str, spec: Mapping[str, Any], total: str) -> str:
    """An expression of the axes' names."""
    shape, dtype = spec["shape"], spec["dtype"]
    if shape is None:
        return name
    if not shape:
        return f"torch.tensor({name}, dtype=torch.{dtype})"
    sizes = ", ".join(map(str, shape))
    if not all(re.fullmatch(r"\w+", str(axis)) for axis in shape):
        raise LeftOut("axes that are computed")
    if dtype == "bool":
        return f"torch.rand({sizes}) > 0.5"
    if dtype in FLOATS:
        drawn = f"torch.softmax(torch.randn({sizes}), -1)" if name == "probs" else f"torch.randn({sizes})"
        return drawn if dtype == "float32" else f"{drawn}.to(torch.{dtype})"
    if dtype in EIGHT_BITS:
        return f"torch.randn({sizes}).to(torch.{dtype})"
    if dtype not in INTEGERS:
        raise LeftOut(f"inputs of {dtype}")
    if name.endswith("indptr") or name == "cu_seqlens":
        if not total:
            raise LeftOut("offsets into what the definition does not say")
        return f"_offsets({sizes}, {total}, torch.{dtype})"
    if name not in BELOW:
        raise LeftOut("integers whose meaning the definition does not say")
    ends = f"1, {BELOW[name]} + 1" if name in COUNTS else f"0, {BELOW[name]}"
    return f"torch.randint({ends}, ({sizes},), dtype=torch.{dtype})"


def _kept(
    inputs: Mapping[str, Mapping[str, Any]], workloads: Sequence[Mapping[str, Any]], place: Path
) -> dict[str, list[Any]]:
    """Inputs that every one of the first workloads keeps in a file that is there, as lists, a workload each."""
    found: dict[str, list[Any]] = {}
    for name in inputs:
        given = [workload.get("inputs", {}).get(name, {}) for workload in workloads[:CASES]]
        if given and all(one.get("type") == "safetensors" for one in given):
            values = [_from_file(place, one) for one in given]
            if all(value is not None for value in values):
                found[name] = values
    return found


def _from_file(place: Path, given: Mapping[str, Any]) -> Any:
    """None where the file is not there. A path that leads out of the place is none of it.

    :raises LeftOut: it is too large for a problem's text.
    """
    from safetensors import SafetensorError, safe_open

    path = (place / str(given.get("path", ""))).resolve()
    if not path.is_relative_to(place.resolve()) or not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            part = file.get_slice(str(given.get("tensor_key", "")))
            if math.prod(part.get_shape()) > KEPT_AT_MOST:
                raise LeftOut("inputs in files, too large for a text")
            return part[:].tolist()
    except (SafetensorError, OSError, TypeError):
        raise LeftOut("a file of inputs can't be read") from None


def _size(case: Mapping[str, Any]) -> float:
    return math.prod(max(1, value) for value in case.values() if isinstance(value, int))


def _name(case: Mapping[str, Any], number: int) -> str:
    words = " ".join(f"{name}={value}" for name, value in case.items() if isinstance(value, int) and name != "case")
    return f"{number + 1} {words}"[:60]
