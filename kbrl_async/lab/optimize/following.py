"""Follows a forward: from its syntax tree to C lines that compute one row. Pure.

What can't be followed raises `Unfollowed` with what it is; nothing is guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import msgspec

from kbrl_async.lab.optimize.formulas import DEFAULTS, ELEMENTWISE, MODULES, OPERATORS
from kbrl_async.lab.optimize.module_text import columns, is_plain, is_tensor, members, method
from kbrl_async.lab.optimize.row_code import LOOP, REDUCTIONS, RowCode, Value

_NAMESPACES = frozenset(["torch", "F", "nn", "functional", "special"])


class Unfollowed(Exception):  # noqa: N818 - it is no error: the policy is asked instead
    """What in the module is beyond this writer."""


class Operand(msgspec.Struct, frozen=True):
    """A tensor that the kernel reads; `python` is how forward names it."""

    name: str
    python: str
    layout: str = "full"
    """`"full"` one float an element, `"vector"` one a column, `"column"` one a row, `"scalar"` one."""


class Reader:
    """Follows one forward; `layouts` says how each operand lies in memory."""

    def __init__(self, model: ast.ClassDef, layouts: dict[str, str]) -> None:
        self._layouts = layouts
        self.init = method(model, "__init__")
        self.forward = method(model, "forward")
        if self.forward is None:
            raise Unfollowed("Model has no forward")
        self.arguments = [a.arg for a in self.forward.args.args[1:]]
        self.members = members(self.init)
        self.operands: dict[str, Operand] = {}
        self.numbers: list[str] = []
        self.code = RowCode()
        self._env: dict[str, Value] = {}
        self.result = Value("", "")
        self.main = ""

    def operands_of(self) -> list[str]:
        """The tensors that it reads, in order of use."""
        self.read()
        return list(self.operands)

    def read(self) -> list[str]:
        """The lines of one row."""
        assert self.forward is not None
        self._env = {}
        for name in self.arguments:
            self._env[name] = self._tensor(name, name)
        for statement in self.forward.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            if isinstance(statement, ast.Return) and statement.value is not None:
                self.result = self._value(statement.value)
                return self._finished()
            self._assign(statement)
        raise Unfollowed("forward returns nothing")

    def _assign(self, node: ast.stmt) -> None:
        if isinstance(node, ast.AugAssign):
            value: ast.expr = ast.BinOp(ast.Name(ast.unparse(node.target), ast.Load()), node.op, node.value)
            target: ast.expr = node.target
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            value, target = node.value, node.targets[0]
        else:
            raise Unfollowed(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
        if not isinstance(target, ast.Name):
            raise Unfollowed(f"an assignment to {ast.unparse(target)}")
        made = self._value(value)
        self._env[target.id] = self.code.short(made) if self._uses(target.id) > 1 else made

    def _uses(self, name: str) -> int:
        assert self.forward is not None
        found = [n for n in ast.walk(self.forward) if isinstance(n, ast.Name) and n.id == name]
        written = sum(isinstance(n.ctx, ast.Store) for n in found)
        # a name that is written again and again is read once between two writings
        return (len(found) - written) // max(1, written)

    def _finished(self) -> list[str]:
        code = self.result.code
        if self.result.kind == "each":
            self.code.lines.append(f"{LOOP}out[r * cols + c] = {code};")
        elif self.result.kind == "row":
            self.code.lines.append(f"out[r] = {code};")
        elif self.result.kind != "all":
            raise Unfollowed("forward returns no tensor that it computed")
        return self.code.lines

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _value(self, node: ast.expr) -> Value:
        if self._is_number(node):
            return self._number(node)
        if isinstance(node, ast.Name):
            return self._env[node.id]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._apply(OPERATORS["USub"], [self._value(node.operand)])
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]).__name__ in OPERATORS:
            sides = [self._value(node.left), self._value(node.comparators[0])]
            return self._apply(OPERATORS[type(node.ops[0]).__name__], sides)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise Unfollowed(ast.unparse(node))

    def _attribute(self, node: ast.Attribute) -> Value:
        name = ast.unparse(node)
        if name.startswith("self."):
            return self._tensor(name.replace(".", "_"), name)
        if node.attr == "values":
            return self._value(node.value)
        raise Unfollowed(name)

    def _binary(self, node: ast.BinOp) -> Value:
        operator = type(node.op).__name__
        if operator not in OPERATORS:
            raise Unfollowed(ast.unparse(node))
        left = self._value(node.left)
        if operator == "Pow" and isinstance(node.right, ast.Constant) and node.right.value == 2:
            return self._apply("({0} * {0})", [self.code.short(left)])
        return self._apply(OPERATORS[operator], [left, self._value(node.right)])

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        if not isinstance(function, ast.Attribute):
            raise Unfollowed(ast.unparse(node.func))
        owner, name = ast.unparse(function.value), function.attr
        if owner == "self":
            return self._module(name, node)
        is_function = owner.rpartition(".")[2] in _NAMESPACES
        given = [*node.args] if is_function else [function.value, *node.args]
        return self._known(name, given, {k.arg or "": k.value for k in node.keywords})

    def _module(self, name: str, node: ast.Call) -> Value:
        made = self.members.get(name)
        if not isinstance(made, ast.Call):
            raise Unfollowed(f"self.{name}")
        kind = ast.unparse(made.func).rpartition(".")[2]
        if kind not in MODULES or made.args or made.keywords:
            raise Unfollowed(f"self.{name}")
        return self._known(MODULES[kind], node.args, {})

    def _known(self, name: str, given: Sequence[ast.expr], keywords: dict[str, ast.expr]) -> Value:
        if name in REDUCTIONS | {"softmax", "log_softmax"}:
            return self._over_rows(name, given, keywords)
        if name in ("layer_norm", "rms_norm"):
            return self._normalised(name, given, dict(keywords))
        if name in ("clamp", "clip"):
            return self._clamp(given, keywords)
        if name == "gelu" and (how := keywords.pop("approximate", None)) is not None:
            name = "gelu_tanh" if ast.unparse(how) == "'tanh'" else "gelu"
        if name in ("contiguous", "float", "clone"):
            return self._value(given[0])
        formula = ELEMENTWISE.get(name)
        if formula is None or keywords:
            raise Unfollowed(name)
        if name == "pow" and len(given) == 2 and ast.unparse(given[1]) in ("2", "2.0"):
            formula, given = "({0} * {0})", given[:1]
        values = [self._value(argument) for argument in given]
        values += [Value("number", text) for text in DEFAULTS.get(name, ())[: 2 - len(values)]]
        if formula.count("{0}") > 1:
            values[0] = self.code.short(values[0])
        return self._apply(formula, values)

    def _clamp(self, given: Sequence[ast.expr], keywords: dict[str, ast.expr]) -> Value:
        bounds = dict(zip(("min", "max"), given[1:], strict=False)) | keywords
        value = self._value(given[0])
        for name, formula in (("min", "fmaxf({0}, {1})"), ("max", "fminf({0}, {1})")):
            if (bound := bounds.get(name)) is not None and ast.unparse(bound) != "None":
                value = self._apply(formula, [value, self._value(bound)])
        return value

    def _apply(self, formula: str, values: Sequence[Value]) -> Value:
        kinds = {value.kind for value in values}
        if "all" in kinds and kinds & {"each", "row"}:
            raise Unfollowed("a total that goes on element by element")
        if "row" in kinds and "each" in kinds and not all(v.keep for v in values if v.kind == "row"):
            raise Unfollowed("a row's number without keepdim beside elements")
        kind = next((k for k in ("each", "row", "all") if k in kinds), "number")
        keep = any(value.keep for value in values)
        code = formula.format(*(value.code for value in values))
        if kind == "all":
            return Value("all", code)
        return Value(kind, code, keep)

    # ── leaves ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensor(self, name: str, python: str) -> Value:
        if python.startswith("self.") and not is_tensor(self.members.get(python[5:])):
            raise Unfollowed(f"{python} is no parameter or buffer")
        if name not in self.operands:
            default = "vector" if python.startswith("self.") else "full"
            self.operands[name] = Operand(name, python, self._layouts.get(name, default))
        layout = self.operands[name].layout
        if layout == "full" and not self.main:
            self.main = name
        if layout == "column":
            return Value("row", f"{name}[r]", True)
        return Value("each", f"{name}[{ {'full': 'r * cols + c', 'vector': 'c', 'scalar': '0'}[layout] }]")

    def _is_number(self, node: ast.expr) -> bool:
        """Nothing of a tensor's content is in it."""
        for part in ast.walk(columns(node)):
            if isinstance(part, ast.Name) and part.id in self._env and self._env[part.id].kind != "number":
                return False
            if isinstance(part, ast.Attribute):
                owner = ast.unparse(part.value)
                if owner == "self" and not is_plain(self.members.get(part.attr)):
                    return False
                if owner not in ("self", "math"):
                    return False
        return True

    def _number(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return Value("number", f"{float(node.value)!r}f")
        if isinstance(node, ast.Name) and node.id in self._env:
            return self._env[node.id]
        text = ast.unparse(columns(node))
        if any(isinstance(n, ast.Name) and n.id in self._env for n in ast.walk(columns(node))):
            raise Unfollowed(text)
        if text not in self.numbers:
            self.numbers.append(text)
        return Value("number", f"k{self.numbers.index(text)}")

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _over_rows(self, name: str, given: Sequence[ast.expr], keywords: dict[str, ast.expr]) -> Value:
        named = dict(keywords)
        dim = given[1] if len(given) > 1 else named.pop("dim", None)
        keep = ast.unparse(named.pop("keepdim", ast.Constant(False))) == "True"
        unbiased = ast.unparse(named.pop("unbiased", ast.Constant(True))) == "True"
        if correction := named.pop("correction", None):
            unbiased = ast.unparse(correction) == "1"
        value = self._value(given[0])
        if dim is None and not named and name in ("sum", "mean") and value.kind in ("each", "row"):
            return self.code.total(name, value)
        if named or dim is None or ast.unparse(dim) not in ("-1", "(-1,)", "[-1]") or value.kind != "each":
            raise Unfollowed(f"{name} over {ast.unparse(dim) if dim else 'all'}")
        if name in ("softmax", "log_softmax"):
            return self.code.softmax(name, value)
        return Value("row", self.code.reduced(name, value, unbiased), keep)

    def _normalised(self, name: str, given: Sequence[ast.expr], keywords: dict[str, ast.expr]) -> Value:
        """Over the last dimension: (x, shape, weight, bias, eps) as F.layer_norm takes them; rms_norm has no bias."""
        names = ("weight", "bias", "eps") if name == "layer_norm" else ("weight", "eps")
        named = dict(zip(names, given[2:], strict=False)) | keywords
        shape = given[1] if len(given) > 1 else named.pop("normalized_shape", None)
        if (
            not isinstance(shape, ast.Tuple | ast.List)
            or len(shape.elts) != 1
            or (name == "rms_norm" and "eps" not in named)
        ):
            raise Unfollowed(f"{name} over more than the last dimension, or without eps")
        value = self._value(given[0])
        eps = self._value(named.pop("eps", ast.Constant(1e-5))).code
        made = self.code.standardised(value, eps, centred=name == "layer_norm")
        for part, formula in (("weight", "({0} * {1})"), ("bias", "({0} + {1})")):
            if (weight := named.get(part)) is not None and ast.unparse(weight) != "None":
                made = self._apply(formula, [made, self._value(weight)])
        return made
