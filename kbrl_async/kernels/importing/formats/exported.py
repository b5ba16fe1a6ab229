"""`torch.export` archives (`.pt2`): the graph as a Python file, one operator a line.

::

    model.json ─▶ inputs, parameters, nodes ─▶ Model.forward, get_inputs      weights: drawn; small buffers: as they are

Nothing is unpickled and no torch reads it: an archive is a stranger's, and its graph is JSON. Sample inputs are
pickled, so inputs are drawn of the sizes that the graph says.
"""

from __future__ import annotations

import json
import keyword
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kbrl_async.kernels.importing.found import LeftOut

ENDING = ".pt2"
LARGEST_GRAPH = 64 << 20
KEPT_AT_MOST = 4096
"""Elements of a buffer that stand in the text; larger ones of floating point are drawn."""
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 12: "bool",
    13: "bfloat16",
}  # fmt: skip
"""By torch's number of a scalar type in the archive."""
MEMORY = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
PYTHON = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/"}
"""Of sizes."""
PLAIN = ("as_int", "as_ints", "as_float", "as_floats", "as_bool", "as_bools", "as_string", "as_strings", "as_int_lists")
OPERATORS = "torch.ops.aten."
NO_WORK = ("_assert", "sym_constrain_range")
SINGLE, SHORT = 2, 12
"""Operators of a problem of level 1, and of level 2."""


def source_of(path: Path) -> tuple[str, int]:
    """The problem's text and its level.

    :raises LeftOut: it is no archive, or holds what a text can't.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            program = json.loads(_member(archive, "models/model.json"))
            kept = _ArchiveValues(archive)
            return _Text(program, kept).source()
    except (zipfile.BadZipFile, ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError, OSError):
        raise LeftOut("is no archive of torch.export that can be read") from None


def _member(archive: zipfile.ZipFile, ending: str) -> bytes:
    found = [one for one in archive.infolist() if one.filename.endswith(ending)]
    if len(found) != 1:
        raise LeftOut(f"an archive with {len(found)} times {ending}")
    if found[0].file_size > LARGEST_GRAPH:
        raise LeftOut("a graph of more than 64 MiB")
    return archive.read(found[0])


class _ArchiveValues:
    """Values of weights, buffers and constants in the archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._where: dict[str, tuple[str, str]] = {}
        for kind in ("weights", "constants"):
            config = json.loads(_member(archive, f"data/{kind}/model_{kind}_config.json"))
            for name, one in config.get("config", {}).items():
                if not one.get("use_pickle"):
                    self._where[name] = (kind, str(one["path_name"]))

    def values(self, name: str, shape: Sequence[int], dtype: str) -> list[Any] | None:
        """As nested lists; None where they are too many, or pickled."""
        if math.prod(shape) > KEPT_AT_MOST or name not in self._where or dtype == "bfloat16":
            return None
        kind, file = self._where[name]
        raw = np.frombuffer(_member(self._archive, f"data/{kind}/{file}"), dtype="?" if dtype == "bool" else dtype)
        values: list[Any] = raw[: math.prod(shape)].reshape(shape).tolist()
        return values if np.isfinite(raw.astype("float64")).all() else None


class _Text:
    """One graph."""

    def __init__(self, program: Mapping[str, Any], kept: _ArchiveValues) -> None:
        self._kept = kept
        module = program["graph_module"]
        self._graph, self._signature = module["graph"], module["signature"]
        self._ranges = program.get("range_constraints", {})
        self._values = self._graph["tensor_values"]
        self._free: dict[str, int] = {}
        self._attributes: list[str] = []
        self._said: dict[str, str] = {}
        self._inputs: list[str] = []
        self._first = ""

    def source(self) -> tuple[str, int]:
        for spec in self._signature["input_specs"]:
            ((kind, one),) = spec.items()
            self._input(kind, one)
        lines = [line for node in self._graph["nodes"] if (line := self._line(node))]
        work = sum(OPERATORS in line for line in lines)
        outputs = [self._output(spec) for spec in self._signature["output_specs"]]
        made = [self._drawn(name) for name in self._inputs]
        parameters = ", ".join(f"{name}={value}" for name, value in self._free.items())
        text = "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        text += "".join(f"        {line}\n" for line in self._attributes)
        text += f"\n    def forward(self, {', '.join(self._inputs)}):\n"
        text += "".join(f"        {line}\n" for line in lines) + f"        return {', '.join(outputs)}\n"
        text += f"\n\ndef get_inputs({parameters}):\n    return [{', '.join(made)}]\n"
        text += "\n\ndef get_init_inputs():\n    return []\n"
        if self._free:
            text += f"\n\nFREE_SHAPES = {{{', '.join(map(self._range, self._free))}}}\n"
        return text, 1 if work <= SINGLE else 2 if work <= SHORT else 3

    def _input(self, kind: str, one: Mapping[str, Any]) -> None:
        if kind == "user_input":
            if "as_tensor" not in one["arg"]:
                raise LeftOut("an input that is no tensor")
            name = _word(one["arg"]["as_tensor"]["name"])
            self._inputs.append(name)
            self._first = self._first or name
            return
        if kind == "constant_input":
            ((_, value),) = one["value"].items()
            name = _word(one["name"])
            self._inputs.append(f"{name}=None")
            self._said[name] = repr(value)
            return
        named = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
        if kind not in named:
            raise LeftOut(f"an input of the kind {kind}")
        name = _word(one["arg"]["name"])
        self._said[name] = f"self.{name}"
        self._attributes.append(self._held(name, str(one[named[kind]]), is_weight=kind == "parameter"))

    def _held(self, name: str, label: str, *, is_weight: bool) -> str:
        shape, dtype = self._shape(name), self._dtype(name)
        if not all(isinstance(size, int) for size in shape):
            raise LeftOut("a weight of no fixed size")
        sizes = [int(size) for size in shape]
        if is_weight and dtype in ("float32", "float16", "bfloat16", "float64"):
            drawn = f"torch.randn({sizes})"
            drawn = f"{drawn} / {math.sqrt(math.prod(sizes[1:])):.4g}" if len(sizes) > 1 else drawn
            drawn = drawn if dtype == "float32" else f"({drawn}).to(torch.{dtype})"
            return f"self.{name} = torch.nn.Parameter({drawn})"
        values = self._kept.values(label, sizes, dtype)
        if values is not None:
            drawn = f"torch.tensor({values!r}, dtype=torch.{dtype})"
        elif "float" in dtype:
            drawn = f"(torch.rand({sizes}) + 0.5).to(torch.{dtype})"
        else:
            raise LeftOut("a table of integers too large for a text")
        return f"self.register_buffer({name!r}, {drawn})"

    def _line(self, node: Mapping[str, Any]) -> str:
        """Empty for what does no work: asserts of sizes and types, and what they compare."""
        outputs, target = node["outputs"], str(node["target"])
        base = target.removeprefix(OPERATORS).partition(".")[0]
        if base.startswith(NO_WORK) or any("as_sym_bool" in one for one in outputs):
            return ""
        if target.startswith("_operator."):
            left, right = (self._argument(one["arg"]) for one in node["inputs"])
            sign = PYTHON.get(target.removeprefix("_operator."))
            if sign is None:
                raise LeftOut(f"it calls {target}"[:60])
            return f"{self._bound(outputs)} = {left} {sign} {right}"
        if not target.startswith(OPERATORS) or not base.isidentifier():
            raise LeftOut(f"it calls {target}"[:60])
        words = [(_word(one["name"]) if one.get("kind") == 2 else "", one["arg"]) for one in node["inputs"]]
        given = [f"{name}={self._argument(arg)}" if name else self._argument(arg) for name, arg in words]
        if base == "sym_size":
            return f"{self._bound(outputs)} = {given[0]}.size({given[1]})"
        return f"{self._bound(outputs)} = {OPERATORS}{base}({', '.join(given)})"

    def _bound(self, outputs: Sequence[Mapping[str, Any]]) -> str:
        names = [name for one in outputs for name in self._names(one)]
        if not names:
            raise LeftOut("an operator without a result")
        is_list = len(outputs) == 1 and "as_tensors" in outputs[0]
        return ", ".join(names) + ("," if is_list and len(names) == 1 else "")

    def _names(self, output: Mapping[str, Any]) -> list[str]:
        ((kind, one),) = output.items()
        if kind == "as_tensor":
            return [_word(one["name"])]
        if kind == "as_tensors":
            return [_word(tensor["name"]) for tensor in one]
        if kind in ("as_sym_int", "as_sym_float"):
            return [_word(one["as_name"])]
        if kind in ("as_none", "as_optional_tensor"):
            return [_word(one["as_tensor"]["name"]) if isinstance(one, dict) and "as_tensor" in one else "_"]
        raise LeftOut(f"a result of the kind {kind}"[:60])

    def _argument(self, argument: Mapping[str, Any]) -> str:
        ((kind, value),) = argument.items()
        if kind == "as_none":
            return "None"
        if kind == "as_tensor":
            return self._name(value["name"])
        if kind in ("as_tensors", "as_optional_tensors", "as_sym_ints"):
            listed = [self._name(one["name"]) if "name" in one else self._argument(one) for one in value]
            return f"[{', '.join(listed)}]"
        if kind in ("as_sym_int", "as_sym_float", "as_optional_tensor"):
            return self._argument(value)
        if kind == "as_name":
            return self._name(value)
        if kind == "as_scalar_type":
            return f"torch.{DTYPES[value]}"
        if kind == "as_memory_format":
            return f"torch.{MEMORY[value]}"
        if kind == "as_layout":
            return "torch.strided"
        if kind == "as_device":
            return f"{self._first}.device" if self._first else "None"
        if kind in PLAIN:
            return _number(value)
        raise LeftOut(f"an argument of the kind {kind}"[:60])

    def _name(self, name: Any) -> str:
        word = _word(name)
        return self._said.get(word, word)

    def _output(self, spec: Mapping[str, Any]) -> str:
        ((kind, one),) = spec.items()
        if kind != "user_output":
            raise LeftOut("it changes its buffers or inputs")
        return self._argument(one["arg"])

    def _shape(self, name: str) -> list[int | str]:
        """A variable size is an argument of `get_inputs`."""
        found: list[int | str] = []
        for size in self._values[name]["sizes"]:
            if "as_int" in size:
                found.append(int(size["as_int"]))
                continue
            expression = str(size["as_expr"]["expr_str"])
            word = expression.split("'")[1] if expression.startswith("Symbol('") else ""
            if not word or expression.count("Symbol(") > 1:
                raise LeftOut("a size that is computed")
            hint = size["as_expr"].get("hint") or {}
            self._free.setdefault(_word(word), int(hint.get("as_int", 4)))
            found.append(word)
        return found

    def _range(self, name: str) -> str:
        found = self._ranges.get(name, {})
        low, high = found.get("min_val") or 1, found.get("max_val") or 0
        usual = self._free[name]
        return f"{name!r}: ({max(0, int(low))}, {min(int(high), 4 * usual) if high else 4 * usual})"

    def _dtype(self, name: str) -> str:
        if self._values[name]["dtype"] not in DTYPES:
            raise LeftOut("tensors of a type that is not read")
        return DTYPES[self._values[name]["dtype"]]

    def _drawn(self, name: str) -> str:
        if name.endswith("=None"):
            return self._said[name.removesuffix("=None")]
        shape, dtype = ", ".join(map(str, self._shape(name))), self._dtype(name)
        if dtype == "bool":
            return f"torch.rand([{shape}]) > 0.5"
        if "float" in dtype:
            return f"torch.randn([{shape}])" + ("" if dtype == "float32" else f".to(torch.{dtype})")
        return f"torch.randint(0, {self._rows_for(name)}, [{shape}], dtype=torch.{dtype})"

    def _rows_for(self, name: str) -> int:
        """Of the table that these integers are looked up in.

        :raises LeftOut: nothing says what they mean.
        """
        for node in self._graph["nodes"]:
            if node["target"] == "torch.ops.aten.embedding.default":
                table, places = (one["arg"]["as_tensor"]["name"] for one in node["inputs"][:2])
                rows = self._shape(table)[0]
                if places == name and isinstance(rows, int):
                    return rows
        raise LeftOut("integers whose meaning the archive does not say")


def _word(name: Any) -> str:
    """:raises LeftOut: it is none that may stand in a text as it is."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in ("torch", "self"):
        raise LeftOut("a name that is none of Python's")
    return name


def _number(value: Any) -> str:
    """Infinity and no number are texts in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return f"float({value!r})"
    return repr(value)


def archives(place: Path) -> Iterator[Path]:
    """Those below a folder, or the one that it is."""
    yield from ([place] if place.suffix == ENDING else sorted(place.rglob(f"*{ENDING}")))
