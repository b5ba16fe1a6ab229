"""The chain of operations of a module's `forward`, in the order of execution.

::

    self.act = nn.ReLU()           forward: x = self.linear(x)
    self.linear = nn.Linear(…)              return self.act(x) * 0.5        ─▶  linear relu mul

Invariants
* Style does not matter: `nn.ReLU()(x)`, `F.relu(x)`, `torch.relu(x)` and `x.relu_()` are all `relu`.
* Names, constants, shapes and devices do not matter.
* Walks at most `MAX_STEPS` nodes and `MAX_DEPTH` calls, so that hostile code costs little.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kbrl_async.kernels.syntax.scope import Scope, methods

MAX_DEPTH = 6
MAX_STEPS = 40_000

NOT_OPERATIONS = frozenset(
    [
        "size",
        "shape",
        "numel",
        "contiguous",
        "dim",
        "to",
        "type",
        "item",
        "float",
        "double",
        "half",
        "detach",
        "clone",
        "cuda",
        "cpu",
        "device",
        "dtype",
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "viewas",
        "expand",
        "expandas",
        "empty",
        "emptylike",
        "zeros",
        "zeroslike",
        "ones",
        "oneslike",
        "full",
        "tensor",
        "parameter",
        "modulelist",
        "moduledict",
        "sequential",
        "rand",
        "randn",
        "arange",
        "super",
        "append",
        "registerbuffer",
        "registerparameter",
    ]
)
"""Shapes, devices, initial values and plumbing."""

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow",
    ast.FloorDiv: "floordiv", ast.Mod: "mod",
}  # fmt: skip
ARITHMETIC = frozenset({*BINARY.values(), "neg"})


def short_name(name: str) -> str:
    """`torch.nn.LeakyReLU`, `F.leaky_relu`, `leaky_relu_` → `leakyrelu`."""
    return name.rpartition(".")[2].rstrip("_").replace("_", "").lower()


def operations(scope: Scope) -> tuple[str, ...]:
    """The chain of the source's module."""
    return _Walk(scope).of_class(scope.module, 0)


class _Walk:
    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._steps = 0

    def of_class(self, node: ast.ClassDef, depth: int) -> tuple[str, ...]:
        if depth > MAX_DEPTH or "forward" not in methods(node):
            return ()
        found = methods(node)
        members = _Members(self, node, depth)
        return tuple(self._statements(found["forward"], members, depth))

    def of_node(self, node: ast.AST, members: _Members | None, depth: int) -> Iterator[str]:
        """Operations of a node, operands first."""
        self._steps += 1
        if self._steps > MAX_STEPS or depth > MAX_DEPTH:
            return
        if isinstance(node, ast.Call):
            yield from self._call(node, members, depth)
            return
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            return
        if isinstance(node, ast.For) and members is not None and isinstance(node.iter, ast.Attribute):
            # `for layer in self.layers`: the loop's body calls what the list holds
            yield from members.called(node.iter, depth) or ()
        for child in ast.iter_child_nodes(node):
            yield from self.of_node(child, members, depth)
        if isinstance(node, ast.BinOp | ast.AugAssign):
            if name := BINARY.get(type(node.op)):
                yield name
        elif (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and not isinstance(node.operand, ast.Constant)
        ):
            yield "neg"

    def _call(self, node: ast.Call, members: _Members | None, depth: int) -> Iterator[str]:
        function = node.func
        if isinstance(function, ast.Attribute) and not self._scope.qualified(function):
            yield from self.of_node(function.value, members, depth)
        elif not isinstance(function, ast.Name | ast.Attribute):
            yield from self.of_node(function, members, depth)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from self.of_node(argument, members, depth)
        yield from self._called(function, members, depth)

    def _called(self, function: ast.expr, members: _Members | None, depth: int) -> Iterator[str]:
        if qualified := self._scope.qualified(function):
            name = short_name(qualified)
            if name not in NOT_OPERATIONS and not qualified.startswith("math."):
                yield name
        elif isinstance(function, ast.Name):
            yield from self.of_definition(function.id, depth)
        elif isinstance(function, ast.Attribute):
            own = members.called(function, depth) if members is not None else None
            if own is not None:
                yield from own
            elif short_name(function.attr) not in NOT_OPERATIONS:
                yield short_name(function.attr)

    def of_definition(self, name: str, depth: int) -> tuple[str, ...]:
        """What calling (or constructing and calling) a name of this source does."""
        node = self._scope.definitions.get(name)
        if isinstance(node, ast.ClassDef):
            return self.of_class(node, depth + 1)
        if isinstance(node, ast.FunctionDef) and depth < MAX_DEPTH:
            return tuple(self._statements(node, None, depth + 1))
        return ()

    def _statements(self, node: ast.FunctionDef, members: _Members | None, depth: int) -> Iterator[str]:
        for statement in node.body:
            yield from self.of_node(statement, members, depth)

    def of_method(self, node: ast.FunctionDef, members: _Members, depth: int) -> tuple[str, ...]:
        return tuple(self._statements(node, members, depth + 1))


class _Members:
    """What `self.NAME(…)` does: a submodule of the constructor, or a method."""

    def __init__(self, walk: _Walk, node: ast.ClassDef, depth: int) -> None:
        self._walk = walk
        self._methods = methods(node)
        self._modules: dict[str, tuple[str, ...]] = {}
        constructor = self._methods.get("__init__")
        for statement in ast.walk(constructor) if constructor else ():
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if _is_own(target):
                    assert isinstance(target, ast.Attribute)
                    made = walk.of_node(statement.value, None, depth + 1)
                    # arithmetic there is on sizes, never on tensors
                    self._modules[target.attr] = tuple(name for name in made if name not in ARITHMETIC)

    def called(self, function: ast.Attribute, depth: int) -> tuple[str, ...] | None:
        if not _is_own(function):
            return None
        if function.attr in self._modules:
            return self._modules[function.attr]
        if function.attr in self._methods and function.attr not in ("forward", "__init__"):
            return self._walk.of_method(self._methods[function.attr], self, depth)
        return ()


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
