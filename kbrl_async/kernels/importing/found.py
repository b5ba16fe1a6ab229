"""What a format makes of one row: the text of a problem, or why there is none. And texts that several formats write."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kbrl_async.kernels.problems.contract import bound_names


class LeftOut(Exception):  # noqa: N818 - a row's fate, not a failure
    """This row is no problem of ours; the reason in a few words, the same for the same cause."""


class Found(msgspec.Struct, frozen=True):
    """One row as a problem file, not yet run."""

    name: str
    source: str
    level: int = 1
    origin: str = ""
    """Where it comes from: a file, a repository."""
    license: str = ""
    left_out: str = ""
    """Why it is no problem; `source` is then empty."""


def stem_of(text: str) -> str:
    """A file's name made of any text."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:80] or "problem"


def parsed(source: str) -> list[ast.stmt]:
    """:raises LeftOut: it does not parse."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise LeftOut("does not parse") from None


def as_model(source: str, entry: str) -> str:
    """The module named `entry` as `Model`; as it is where it has that name, or a `Model` of its own.

    :raises LeftOut: `entry` is no name.
    """
    if not entry.isidentifier() or keyword.iskeyword(entry):
        raise LeftOut("entry point is no name")
    if entry == "Model" or re.search(r"\bModel\b", source):
        return source
    return re.sub(rf"(?<![\w.]){entry}\b", "Model", source)  # not the library's own, as nn.Upsample


def with_model_of(source: str, function: str, words: str = "", given: str = "*inputs") -> str:
    """A `Model` whose forward calls a function of the source with its inputs. `words`: keyword arguments, as text."""
    imported = {alias.name for node in parsed(source) if isinstance(node, ast.Import) for alias in node.names}
    source = source if "torch" in imported else f"import torch\n\n{source}"
    call = f"{function}({given}{', ' + words if words else ''})"
    model = f"class Model(torch.nn.Module):\n    def forward(self, *inputs):\n        return {call}\n"
    return f"{source.rstrip()}\n\n\n{model}"


def fresh_inputs(made: str, lines: str = "    pass") -> str:
    """`get_inputs` for tensors that a text writes out, the elements of `made` behind `lines`: what it gives the same
    twice is drawn again, in that shape and range.
    """
    return f"""def _fresh(value, again):
    if not isinstance(value, torch.Tensor) or value.numel() == 0 or not torch.equal(value, again):
        return value
    if not value.is_floating_point():
        return value.flatten()[torch.randperm(value.numel())].view_as(value)
    low, high = value.min(), value.max()
    if low == high:
        low, high = torch.minimum(low, 0 * low), torch.maximum(high, 0 * high + (low == 0))
    return torch.rand_like(value) * (high - low) + low


def _written():
{lines}
    return [{made}]


def get_inputs():
    return [_fresh(value, again) for value, again in zip(_written(), _written())]
"""


def with_arguments(source: str, config: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """`get_inputs` and the constructor called with what a configuration says, where they take it. `others`: further
    configurations, each a workload.
    """
    body = parsed(source)
    takes, builds = parameters(body, "get_inputs"), parameters(body, "Model")
    given = {name: value for name, value in config.items() if name in takes}
    inits = {name: value for name, value in config.items() if name in builds}
    text = source.rstrip() + "\n"
    if given:
        call = f"_get_inputs(**{{**{given!r}, **other}})"
        text += f"\n\n_get_inputs = get_inputs\n\n\ndef get_inputs(**other):\n    return {call}\n"
    if inits or "get_init_inputs" not in bound_names(body):
        text += f"\n\ndef get_init_inputs():\n    return [[], {inits!r}]\n"
    rows = [{"name": "single"}, *(_workload(n, other, takes, builds) for n, other in enumerate(others))]
    return f"{text}\n\nWORKLOADS = {rows!r}\n" if others else text


def _workload(number: int, config: Mapping[str, Any], takes: list[str], builds: list[str]) -> dict[str, Any]:
    shape = {name: value for name, value in config.items() if name in takes}
    init = {name: value for name, value in config.items() if name in builds}
    return {"name": f"configuration {number + 1}", "shape": shape, "init": [[], init]}


def parameters(body: list[ast.stmt], name: str) -> list[str]:
    """Of a function, or of a class's constructor."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return parameters(node.body, "__init__")
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs) if argument.arg != "self"]
    return []
