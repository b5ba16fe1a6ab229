"""What the text of a module says without being run: its methods, what its constructor assigns, of what kind that is."""

from __future__ import annotations

import ast


class _Columns(ast.NodeTransformer):
    """`x.shape[-1]` and `x.size(-1)` are the kernel's `cols`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return ast.Name("cols", ast.Load()) if ast.unparse(node).endswith(".shape[-1]") else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.Name("cols", ast.Load()) if ast.unparse(node).endswith(".size(-1)") else node


def columns(node: ast.expr) -> ast.expr:
    """The expression with `cols` for the size of the last dimension."""
    copied = ast.parse(ast.unparse(node), mode="eval")
    changed: ast.Expression = _Columns().visit(copied)
    return changed.body


def method(model: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((n for n in model.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def members(init: ast.FunctionDef | None) -> dict[str, ast.expr]:
    """What `self.NAME = …` of the constructor assigns, and registers."""
    found: dict[str, ast.expr] = {}
    for node in init.body if init is not None else []:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            found[node.targets[0].attr] = node.value
        if isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("self.register_buffer("):
            assert isinstance(node.value, ast.Call)
            found[str(ast.literal_eval(node.value.args[0]))] = node.value
    return found


def is_tensor(node: ast.expr | None) -> bool:
    """A parameter or a buffer."""
    text = "" if node is None else ast.unparse(node)
    return text.startswith(("nn.Parameter(", "torch.nn.Parameter(", "self.register_buffer("))


def is_plain(node: ast.expr | None) -> bool:
    """A number, as far as the text tells: no call but of math."""
    if node is None:
        return False
    calls = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return all(name.startswith("math.") or name in ("float", "int") for name in calls)
