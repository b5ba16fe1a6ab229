"""The parts of a reference's syntax tree that say what it computes, and what its names stand for.

Input makers, sizes, imports and docstrings are left out: two problems that differ only in them are the same problem.
"""

from __future__ import annotations

import ast
import warnings

INPUT_MAKERS = frozenset({"get_inputs", "get_init_inputs"})
DEFAULT_IMPORTS = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "math": "math", "np": "numpy"}
"""What these names mean in sources that forgot, or cut off, their imports."""

Definition = ast.ClassDef | ast.FunctionDef


class Unreadable(ValueError):  # noqa: N818 - reads as the sentence it is
    """A source that can't be read; `reason` is a word to count by."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Scope:
    """Definitions of a source, its imports, and the class that is the module."""

    def __init__(self, source: str, entry_point: str = "Model") -> None:
        tree = _parse(source)
        self.imports = {**DEFAULT_IMPORTS, **_imports(tree)}
        self.definitions: dict[str, Definition] = {
            node.name: node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name not in INPUT_MAKERS
        }
        self.module = self._module(entry_point)

    def _module(self, entry_point: str) -> ast.ClassDef:
        classes = [node for node in self.definitions.values() if isinstance(node, ast.ClassDef)]
        forwards = [node for node in classes if "forward" in methods(node)]
        named = [node for node in forwards if node.name == entry_point]
        if not forwards:
            raise Unreadable("no module with a forward")
        return named[0] if named else forwards[-1]

    def qualified(self, node: ast.expr) -> str:
        """`nn.functional.relu` → `torch.nn.functional.relu`; empty where the root is not an import."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imports or node.id in self.definitions:
            return ""
        return ".".join([self.imports[node.id], *reversed(parts)])


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that do something."""
    return [
        node
        for node in body
        if not isinstance(node, ast.Pass) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def is_super_init(node: ast.stmt) -> bool:
    """`super().__init__(…)`, in either spelling."""
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "__init__"
        and isinstance(call.func.value, ast.Call)
        and isinstance(call.func.value.func, ast.Name)
        and call.func.value.func.id == "super"
    )


def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # a stranger's "\d" is no concern of ours
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError):
        raise Unreadable("does not parse") from None
    except (RecursionError, MemoryError):
        # the parser's own two ways of saying that brackets nest too deeply
        raise Unreadable("nests too deeply") from None


def _imports(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {
                alias.name.partition(".")[0]: alias.name.partition(".")[0] for alias in node.names if not alias.asname
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found
