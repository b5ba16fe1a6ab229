"""Which of libtorch's operators a source names, declared from the installed torch's own headers.

::

    source ─names─▶ ATen/ops/NAME.h, NAME_ops.h, TensorBody.h ─▶ kbrl_ops.h: operators · method declarations · bodies

The full headers declare 3,000 operators and cost a minute to compile; a candidate uses a handful of them. What is
written here is taken word for word from the headers beside libtorch, so it always fits the library that it calls.

Invariants
* Nothing is guessed: an overload that needs a type unknown to `slim/` is left out; who needs it gets the full build.
* The result depends on the source and on the torch installation only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

_BASICS = (
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "fill_", "copy_", "zero_", "clone", "view"),
    *("select", "to", "eq", "ne", "lt", "le", "gt", "ge", "item", "reshape"),
)
_BASIC_FUNCTIONS = ("empty_like",)
_KNOWN_TYPES = frozenset(
    [
        *("Tensor", "TensorList", "ITensorListRef", "Scalar", "ScalarType", "Layout", "Device", "MemoryFormat"),
        *("Generator", "IntArrayRef", "SymInt", "SymIntArrayRef", "OptionalIntArrayRef", "OptionalSymIntArrayRef"),
        *("ArrayRef", "TensorOptions", "string_view", "_ops", "fromIntArrayRefSlow", "optTypeMetaToScalarType"),
        "impl",
    ]
)
_TYPE = re.compile(r"\b(?:at|c10)::(\w+)")
_MEMBER = re.compile(r"(?:\.|->)\s*(?:template\s+)?([A-Za-z_]\w*)")
_QUALIFIED = re.compile(r"\b(?:at|torch)\s*::\s*([A-Za-z_]\w*)")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_USING = re.compile(r"using\s+namespace\s+(?:at|torch)\s*;")
_STRUCT = re.compile(r"struct TORCH_API (\w+) \{.*?\n  static (.+?) call\((.*?)\);", re.DOTALL)
_FUNCTION = re.compile(r"^inline (.+?) ?\b(\w+)\((.*)\) \{\n    return (.*);\n\}", re.MULTILINE)
_METHOD = re.compile(r"^inline (.+?) Tensor::(\w+)\((.*)\) const \{\n    return (.*);\n\}", re.MULTILINE)
_DECLARED = re.compile(r"^  (\S.*?) (\w+)\((.*)\) const;$", re.MULTILINE)
_OPERATOR = re.compile(r"at::_ops::(\w+)::call")
_SYMBOLIC = re.compile(r"_symint$")


class Declarations(msgspec.Struct, frozen=True):
    """The three parts of `kbrl_ops.h`."""

    operators: str
    methods: str
    bodies: str

    def text(self) -> str:
        parts = (("KBRL_OPS", self.operators), ("KBRL_METHODS", self.methods), ("KBRL_BODIES", self.bodies))
        return "".join(f"#ifdef {name}\n{body}#endif\n" for name, body in parts)


class OperatorHeaders:
    """The operator headers of one torch installation, read on demand and kept."""

    def __init__(self, include: Path) -> None:
        self._ops = include / "ATen" / "ops"
        self._body = include / "ATen" / "core" / "TensorBody.h"
        self._structs = functools.cache(self._read_structs)
        self._functions = functools.cache(self._read_functions)

    def declare(self, source: str) -> Declarations:
        """For `source` without comments."""
        named = set(_MEMBER.findall(source))
        members = {*_BASICS, *named}
        functions = {*_BASIC_FUNCTIONS, *_QUALIFIED.findall(source)}
        if _USING.search(source):
            functions |= set(_CALLED.findall(source))
        declared, defined = self._methods()

        def of(lines: dict[str, list[str]]) -> list[str]:
            """What only our own headers call is not called with words, whose type costs a tenth of a compilation."""
            return [
                line
                for name in sorted(members)
                for line in lines.get(name, ())
                if name in named or "string_view" not in line
            ]

        methods, bodies = of(declared), of(defined)
        bodies += [text for name in sorted(functions) for text in self._functions(name)]
        operators = self._operators(_OPERATOR.findall("\n".join(bodies)), members | functions)
        return Declarations(operators, "".join(methods), "".join(bodies))

    def _operators(self, wanted: Iterable[str], names: Iterable[str]) -> str:
        known: dict[str, str] = {}
        for name in sorted(names):
            known |= self._structs(name)
        return "".join(known[name] for name in sorted(set(wanted)) if name in known)

    def _read_structs(self, name: str) -> dict[str, str]:
        """Operator structs that the header of function or method `name` holds."""
        found = {}
        for base in {name, name.rstrip("_"), re.sub(r"_outf?$", "", name)}:
            text = _read(self._ops / f"{base}_ops.h")
            for struct, result, parameters in _STRUCT.findall(text):
                found[struct] = f"struct {struct} {{ static {result} call({parameters}); }};\n"
        return found

    def _read_functions(self, name: str) -> tuple[str, ...]:
        text = _read(self._ops / f"{re.sub(r'_outf?$', '', name)}.h") or _read(self._ops / f"{name}.h")
        return tuple(
            f"inline {result} {found}({parameters}) {{ return {body}; }}\n"
            for result, found, parameters, body in _FUNCTION.findall(text)
            if found == name and _is_known(result, parameters, body)
        )

    @functools.cache  # noqa: B019 - one object for each torch installation, alive as long as the process
    def _methods(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        text = _read(self._body)
        declared: dict[str, list[str]] = {}
        defined: dict[str, list[str]] = {}
        for result, name, parameters in _DECLARED.findall(text[text.find("operator[](int64_t index)") :]):
            if _is_known(result, parameters) and not _SYMBOLIC.search(name):
                declared.setdefault(name, []).append(f"{result} {name}({parameters}) const;\n")
        for result, name, parameters, body in _METHOD.findall(text):
            if _is_known(result, parameters, body) and not _SYMBOLIC.search(name):
                line = f"inline {result} Tensor::{name}({parameters}) const {{ return {body}; }}\n"
                defined.setdefault(name, []).append(line)
        return declared, defined


def _is_known(*texts: str) -> bool:
    return all(found in _KNOWN_TYPES for text in texts for found in _TYPE.findall(text))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
