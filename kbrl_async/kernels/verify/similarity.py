"""Reference code pasted into a candidate, found on syntax trees: names, comments, types and order do not matter.

::

    forward ─▶ what it reaches: methods, submodules' constructors, module-level functions and classes
            ─▶ last the classes and functions that any of their methods names: a module may be made and appended there
            ─▶ each with its names numbered in order of use, library names written out, docstrings and types left out

Equal texts of `Model` and `ModelNew` mean that the candidate computes the very same operators. One that keeps the
reference's `__init__` and replaces `forward`, or keeps `forward` over own submodules, reaches something else. So may
one that keeps the reference's forward to fall back on, or to say what is computed, and puts own code in its place when
it runs (`_Program.is_patched`): what that computes is seen when it does.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Iterator

_MIN_NODES = 8
_CALLED_FIRST = ("__call__", "__getattribute__")
_PUT_IN_PLACE = re.compile(r"(setattr|__setattr__|__dict__|__class__|register_\w*hook)")
"""Names with which methods put other code in the place of what a class defines, or around it."""
_REGISTERS = re.compile(r"\b(impl|register\w*)\b")
"""In a decorator: for an operator of the library's, maybe."""
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def copied_reference(reference: str, candidate: str, entry: str = "ModelNew") -> str:
    """Evidence where `entry` of `candidate` is `Model` of `reference` under other names; else an empty string."""
    wanted = canonical(reference, "Model")
    nodes = sum(text.count("(") for text in wanted)
    if nodes < _MIN_NODES or not _is_written_as(candidate, entry, wanted):
        return ""
    return f"forward and all that it reaches is the reference's: {nodes} syntax nodes, equal up to names"


@functools.lru_cache(maxsize=64)
def canonical(source: str, entry: str) -> list[str]:
    """The texts of what `entry`'s forward reaches; none where it has none or the source does not parse."""
    with contextlib.suppress(*_UNREADABLE):
        return list(_Program(ast.parse(source)).texts(entry))
    return []


def _is_written_as(source: str, entry: str, wanted: list[str]) -> bool:
    """As far as the first text that differs: most candidates' forwards do."""
    with contextlib.suppress(*_UNREADABLE):
        program = _Program(ast.parse(source))
        both = itertools.zip_longest(wanted, program.texts(entry))
        return all(one == other for one, other in both) and not program.is_patched()
    return False


class _Program:
    """A module's definitions, and the canonical text of what a class's `forward` reaches."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports = dict(_imported(tree))
        self.defined: dict[str, ast.AST] = {}
        self._methods: dict[ast.ClassDef, dict[str, ast.FunctionDef]] = {}
        self._tree = tree
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined[node.name] = node
            elif isinstance(node, ast.Assign):
                self.defined.update({t.id: node.value for t in node.targets if isinstance(t, ast.Name)})

    def texts(self, entry: str) -> Iterator[str]:
        """Nothing where there is no such class or it has no forward."""
        node = self._follow(entry)
        if isinstance(node, ast.ClassDef) and "forward" in self.methods(node):
            yield from _NormalWriter(self).write(node)

    def _follow(self, name: str) -> ast.AST | None:
        """Through `ModelNew = Model`."""
        node = self.defined.get(name)
        for _ in range(8):
            if not isinstance(node, ast.Name):
                break
            node = self.defined.get(node.id)
        return node

    def named(self, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        """The module's definitions that are named there, or by a value that is: `act = Own()`. `super(Own, self)` says
        nothing.
        """
        names, seen = _names(node), set[str]()
        while names:
            name = names.pop(0)
            if name in seen or (found := self.defined.get(name)) is None:
                continue
            seen.add(name)
            yield name, found
            if not isinstance(found, (ast.ClassDef, ast.FunctionDef)):
                names += _names(found)

    def methods(self, owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        """Its own, and those of bases in this module."""
        if owner in self._methods:  # asked once each: bases of bases, each named twice, would be asked for 2ⁿ times
            return self._methods[owner]
        found: dict[str, ast.FunctionDef] = {}
        for base in reversed(owner.bases):  # the first one's count
            above = self._follow(base.id) if isinstance(base, ast.Name) else None
            if isinstance(above, ast.ClassDef) and above is not owner:
                found.update(self.methods(above))
        for item in owner.body:
            if isinstance(item, ast.FunctionDef):
                found[item.name] = item
            for target in item.targets if isinstance(item, ast.Assign) else ():
                found.pop(ast.unparse(target), None)
        self._methods[owner] = found
        return found

    def is_patched(self) -> bool:
        """Whether other code may run than what a forward reaches: the module does something with what it defines, or
        one of its classes has bases from elsewhere, is called by itself, or puts something in a method's place.
        """
        classes = [node for node in self._tree.body if isinstance(node, ast.ClassDef)]
        done = {name for node in _done(self._tree.body) for name in _names(node)}
        return (
            not done.isdisjoint(self.defined)
            or not self.defined.keys().isdisjoint(self.imports)
            or any(map(_is_registered, self._tree.body))
            or any(self._is_from_elsewhere(base) for owner in classes for base in owner.bases)
            or any(map(self._replaces, classes))
        )

    def _is_from_elsewhere(self, base: ast.expr) -> bool:
        root, _, _ = ast.unparse(base).partition(".")
        return root not in self.defined and root != "object" and not f"{self.imports.get(root)}.".startswith("torch.")

    def _replaces(self, owner: ast.ClassDef) -> bool:
        methods = self.methods(owner)
        nodes = [node for method in methods.values() for node in ast.walk(method)]
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        names = [node.id for node in nodes if isinstance(node, ast.Name)] + [node.attr for node in attributes]
        stored = [node.attr for node in attributes if isinstance(node.ctx, ast.Store)]
        return (
            any(name in methods for name in _CALLED_FIRST)
            or any(name in methods for name in stored)
            or any(_PUT_IN_PLACE.fullmatch(name) for name in names)
        )


def _done(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """What a module does when it is imported, other than to import, define and name; decorators of its classes, too."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from node.decorator_list
            yield from (keyword.value for keyword in node.keywords)
        elif not isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)) and not _only_names(node):
            yield node


def _only_names(node: ast.stmt) -> bool:
    """Such as `a = 1`; what is done only where the file is the main program is not done."""
    if isinstance(node, ast.If):
        return "__name__" in ast.unparse(node.test)
    targets = node.targets if isinstance(node, ast.Assign) else []
    return all(isinstance(target, ast.Name) for target in targets) and bool(targets)


def _is_registered(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        _REGISTERS.search(ast.unparse(decorator)) for decorator in node.decorator_list
    )


def _names(node: ast.AST) -> list[str]:
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    of_super = {id(given) for call in calls if ast.unparse(call.func) == "super" for given in call.args}
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and id(one) not in of_super]


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    alias.name if alias.asname else alias.name.partition(".")[0],
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


class _NormalWriter:
    """Writes definitions in order of first use; each reached name becomes the number of its definition."""

    def __init__(self, program: _Program) -> None:
        self.program = program
        self.numbers: dict[str, int] = {}
        self.queue: list[tuple[ast.AST, ast.ClassDef | None]] = []

    def write(self, entry: ast.ClassDef) -> Iterator[str]:
        self.refer("class", entry.name, entry, entry)
        for place, (node, owner) in enumerate(self.queue):  # grows while it is read
            if isinstance(node, ast.ClassDef):
                methods = self.program.methods(node)
                forward = methods.get("forward")
                parts = [forward] if forward is not None else list(methods.values())
                yield "class " + " ".join(self.body(part, node) for part in parts)
            else:
                yield self.body(node, owner)
            if place == len(self.queue) - 1:
                self._refer_others()

    def _refer_others(self) -> None:
        """What methods of the classes so far name, and nothing has led to: a block that a loop appends, or a local name
        has. It may be all that a candidate has of its own.
        """
        reached = {id(node) for node, _ in self.queue}
        classes = [node for node, _ in self.queue if isinstance(node, ast.ClassDef)]
        for method in (method for owner in classes for method in self.program.methods(owner).values()):
            for name, found in self.program.named(method):
                if isinstance(found, (ast.ClassDef, ast.FunctionDef)) and id(found) not in reached:
                    self.refer("module", name, found, None)

    def refer(self, space: str, name: str, node: ast.AST, owner: ast.ClassDef | None) -> str:
        key = f"{space}:{name}"
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.queue.append((node, owner))
        return f"d{self.numbers[key]}"

    def body(self, node: ast.AST, owner: ast.ClassDef | None) -> str:
        renamed = _Renamer(self, owner, node).visit(copy.deepcopy(node))
        return ast.dump(renamed, annotate_fields=False)

    def state(self, owner: ast.ClassDef, attribute: str) -> ast.AST | None:
        """What `__init__` assigns to `self.attribute`, or registers under that name."""
        constructor = self.program.methods(owner).get("__init__")
        for node in ast.walk(constructor) if constructor is not None else ():
            if isinstance(node, ast.Assign) and any(_is_self(target, attribute) for target in node.targets):
                return node.value
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) >= 2:
                first = node.args[0]
                if (
                    node.func.attr.startswith("register_")
                    and isinstance(first, ast.Constant)
                    and first.value == attribute
                ):
                    return node.args[1]
        return None


def _is_self(target: ast.AST, attribute: str) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == attribute and isinstance(target.value, ast.Name)


class _Renamer(ast.NodeTransformer):
    """One definition in canonical form."""

    def __init__(self, writer: _NormalWriter, owner: ast.ClassDef | None, root: ast.AST) -> None:
        self.writer, self.owner, self.root = writer, owner, root
        self.names: dict[str, str] = {}
        constructor = writer.program.methods(owner).get("__init__") if owner is not None else None
        if constructor is not None and not isinstance(root, ast.FunctionDef):
            # An expression of the constructor: its arguments are known by their places.
            for place, argument in enumerate(constructor.args.args[1:]):
                self.names[argument.arg] = f"argument{place}"

    def local(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns, node.name = [], None, "f"
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:]
        node.body = [item for item in node.body if not isinstance(item, ast.Pass)]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.local(node.arg), None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        assigned: ast.AST = self.visit(ast.Assign([node.target], node.value))
        return assigned

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.keyword(node.arg, self.visit(node.value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords.sort(key=lambda keyword: keyword.arg or "")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        program = self.writer.program
        if node.id in self.names or isinstance(node.ctx, ast.Store):
            return ast.Name(self.local(node.id), node.ctx)
        if node.id in program.defined:
            found = program.defined[node.id]
            return ast.Name(self.writer.refer("module", node.id, found, None), node.ctx)
        return ast.Name(program.imports.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        dotted = self._dotted(node)
        if dotted:
            return ast.Name(dotted, node.ctx)
        if self.owner is not None and isinstance(node.value, ast.Name) and self.names.get(node.value.id) == "v0":
            return self._of_self(node)
        return self.generic_visit(node)

    def _of_self(self, node: ast.Attribute) -> ast.AST:
        assert self.owner is not None
        method = self.writer.program.methods(self.owner).get(node.attr)
        found = method if method is not None else self.writer.state(self.owner, node.attr)
        if found is None:
            return ast.Attribute(ast.Name("self"), node.attr, node.ctx)
        name = self.writer.refer(f"{self.owner.name}.self", node.attr, found, self.owner)
        return ast.Attribute(ast.Name("self"), name, node.ctx)

    def _dotted(self, node: ast.Attribute) -> str:
        """`F.relu` → `torch.nn.functional.relu`; empty where the root is no import."""
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name) or value.id in self.names or value.id not in self.writer.program.imports:
            return ""
        return ".".join([self.writer.program.imports[value.id], *reversed(parts)])
