"""Which line of a candidate a finding of the bench is about. The bench sees addresses and values, no lines: what is
said here is where a reader has to look, read from the syntax tree. Nothing runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

_HAS_LINE = re.compile(r"\bline \d+")
_LONGEST = 90
_ENDS = re.compile(r"\r\n|\r|\n")
"""Of lines, as the parser counts them."""
_TORCH = ("torch", "F")
_ALLOCATES = re.compile(r"empty|zeros|.*\bcuda\b")
_Find = Callable[[ast.AST, str], Iterator[ast.AST]]


def located(message: str, source: str, rule: str, most: int) -> str:
    """The message, of at most `most` characters, with the line that it is about where it names none itself."""
    found = place(source, rule, message)
    return f"{message[: most - len(found) - 3]} ({found})" if message and found else message


def place(source: str, rule: str, message: str) -> str:
    """As ``line 12: `return self.out` ``; empty where the message names a line itself, or the candidate has no forward.
    `rule`: its name, or a fault's where no rule has one.
    """
    if _HAS_LINE.search(message):
        return ""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    forward = _forward(tree)
    if forward is None:
        return ""
    within = tree if rule in _OF_THE_BUILD else forward
    finds = (*_FINDS.get(rule, ()), _returns)
    lines = (sorted(node.lineno for node in find(within, message)) for find in finds)  # type: ignore[attr-defined]
    line = next((found[0] for found in lines if found), forward.lineno)
    texts = _ENDS.split(source)
    text = texts[line - 1].strip()[:_LONGEST] if line <= len(texts) else ""
    return f"line {line}: `{''.join(letter if letter.isprintable() else '?' for letter in text)}`"


def _forward(tree: ast.Module) -> ast.FunctionDef | None:
    """ModelNew's; else the last class's that has one."""
    models = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    models.sort(key=lambda node: node.name == "ModelNew")
    for model in reversed(models):
        for node in model.body:
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                return node
    return None


def _returns(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(forward) if isinstance(node, ast.Return))


def _torch_calls(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    """Where the library computes: calls of `torch.…`, `F.…`, or a matrix product, allocations aside."""
    for node in ast.walk(forward):
        match node:
            case ast.BinOp(op=ast.MatMult()):
                yield node
            case ast.Call() if _base(node.func) in _TORCH and not _ALLOCATES.match(_attributes(node.func)):
                yield node


def _named_operator(forward: ast.AST, message: str) -> Iterator[ast.AST]:
    """A call whose name the message has in quotes or as a word."""
    words = set(re.findall(r"[A-Za-z_]\w+", message))
    for node in ast.walk(forward):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in words:
            yield node


def _attributes(node: ast.AST) -> str:
    """Of `torch.cuda.stream` it is `stream.cuda`."""
    found = []
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        found += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.value
    return ".".join(found)


def _base(node: ast.AST) -> str:
    """Of `x[0].data` it is `x`."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _inputs(forward: ast.AST) -> set[str]:
    return {one.arg for one in forward.args.args[1:]} if isinstance(forward, ast.FunctionDef) else set()


def _writes_to_inputs(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    """`x[…] = …`, `x += …`, `x.add_(…)`, `out=x`."""
    names = _inputs(forward)
    written: Sequence[ast.AST]
    for node in ast.walk(forward):
        match node:
            case ast.Assign():
                written = [target for target in node.targets if isinstance(target, ast.Subscript)]
            case ast.AugAssign():
                written = [node.target]
            case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_"):
                written = [node.func]
            case ast.Call():
                written = [word.value for word in node.keywords if word.arg == "out"]
            case _:
                continue
        if any(_base(target) in names for target in written):
            yield node


def _gives_inputs(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    names = _inputs(forward)
    return (node for node in _calls(forward) if any(_base(given) in names for given in node.args))


def _state(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    """What outlives a call: attributes of `self` that forward assigns, names that it declares global."""
    for node in ast.walk(forward):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        if isinstance(node, (ast.Global, ast.Nonlocal)) or any(_base(target) == "self" for target in targets):
            yield node


def _branches(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(forward) if isinstance(node, (ast.If, ast.IfExp, ast.Try)))


def _streams(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    return (node for node in _calls(forward) if "stream" in _attributes(node.func).lower())


def _calls(forward: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(forward) if isinstance(node, ast.Call))


def _grids(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    """`kernel[grid](…)`."""
    return (node for node in _calls(forward) if isinstance(node.func, ast.Subscript))


def _own_calls(forward: ast.AST, _: str) -> Iterator[ast.AST]:
    """`self.kernel(…)`, `extension.forward(…)`: any that is not torch's."""
    return (node for node in _calls(forward) if _base(node.func) not in _TORCH)


def _compiled(within: ast.AST, _: str) -> Iterator[ast.AST]:
    """Where a compiler is asked for something."""
    return (node for node in _calls(within) if (_attributes(node.func) or _base(node.func)) in _COMPILERS)


_COMPILERS = ("load_inline", "load", "c_kernel", "cuda_kernel")
_OF_THE_BUILD = frozenset(["flag", "extension", "cuda_source", "foreign_call", "no_extension"])
_LAUNCH: tuple[_Find, ...] = (_grids, _own_calls)
_FINDS: dict[str, tuple[_Find, ...]] = {
    "forbidden_operator": (_named_operator, _torch_calls),
    "no_own_kernel": (_torch_calls,),
    "unproven": _LAUNCH,
    "decoy_kernel": (_torch_calls,),
    "input_mutation": (_writes_to_inputs, _gives_inputs),
    "state_carried": (_state, *_LAUNCH),
    "wrong_when_timed": (_state, _branches, *_LAUNCH),
    "phase": (_branches, _state, *_LAUNCH),
    "slot_batched": (_state, *_LAUNCH),
    "side_stream": (_streams, *_LAUNCH),
    "stray_write": _LAUNCH,
    "illegal_access": _LAUNCH,
    "timeout": _LAUNCH,
    "out_of_memory": _LAUNCH,
    "not_deterministic": _LAUNCH,
    "impossible_time": _LAUNCH,
    "forged_time": _LAUNCH,
    **dict.fromkeys(_OF_THE_BUILD, (_compiled,)),
}
"""By rule, and by fault where no rule has a name: what to look for first. Whatever else is about what is returned."""
