"""What the Python half of a candidate may contain, checked on its syntax tree.

`forward` may allocate, view and launch; the computing is the kernel's. Modules like `nn.Linear` may hold
parameters, so that their names match the reference's, but calling one is a library call.
"""

from __future__ import annotations

import ast

import msgspec

from protocols.records import BuildReport, Fault

_IMPORTS = frozenset({"torch", "torch.nn", "math", "kbrl_async.launch", "__future__", "typing"})
_FORBIDDEN_NAMES = frozenset(
    [
        "eval",
        "exec",
        "compile",
        "open",
        "__import__",
        "getattr",
        "setattr",
        "delattr",
        "globals",
        "locals",
        "vars",
        "input",
        "breakpoint",
        "ctypes",
        "os",
        "sys",
        "subprocess",
        "socket",
        "threading",
        "multiprocessing",
        "importlib",
        "builtins",
        "inspect",
        "gc",
        "signal",
        "__builtins__",
        "__loader__",
    ]
)
_FORBIDDEN_ATTRIBUTES = frozenset(
    [
        "__class__",
        "__bases__",
        "__subclasses__",
        "__globals__",
        "__builtins__",
        "__dict__",
        "__code__",
        "__mro__",
        "__reduce__",
        "__getattribute__",
        "compile",
        "jit",
        "ops",
        "_C",
        "utils",
        "load",
        "save",
        "hub",
        "multiprocessing",
        "set_num_threads",
        "overrides",
        "library",
    ]
)
_TORCH_CALLS = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "tensor",
        "no_grad",
        "Size",
        "is_tensor",
        "device",
        "as_strided",
        "manual_seed",
        "Tensor",
        "Generator",
    ]
)
_COMPUTE_METHODS = frozenset(
    [
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "sum",
        "mean",
        "max",
        "min",
        "argmax",
        "argmin",
        "softmax",
        "log_softmax",
        "sigmoid",
        "tanh",
        "relu",
        "gelu",
        "abs",
        "neg",
        "clamp",
        "cumsum",
        "cumprod",
        "prod",
        "var",
        "std",
        "norm",
        "sort",
        "topk",
        "einsum",
        "dot",
        "mv",
        "conv2d",
        "conv1d",
        "masked_fill",
        "where",
        "scatter",
        "gather",
        "index_select",
        "square",
        "reciprocal",
        "sin",
        "cos",
        "erf",
        "floor",
        "ceil",
        "round",
        "logsumexp",
        "baddbmm",
        "addcmul",
        "lerp",
        "add_",
        "mul_",
        "sub_",
        "div_",
        "exp_",
        "relu_",
        "sigmoid_",
        "tanh_",
        "clamp_",
        "apply_",
        "map_",
    ]
)
_LIBRARY_MODULES = frozenset({"nn", "F", "functional"})


class Program(msgspec.Struct, frozen=True):
    """The parsed Python half."""

    tree: ast.Module
    model: ast.ClassDef
    kernels: list[tuple[str, str]]
    """(C source, function name) of every `c_kernel` call."""


class _Violation(Exception):  # noqa: N818 - control flow inside this module only
    def __init__(self, rule: str, message: str, hint: str, node: ast.AST | None = None) -> None:
        line = getattr(node, "lineno", None)
        self.rule, self.hint = rule, hint
        self.message = f"line {line}: {message}" if line else message
        super().__init__(message)


def parse(source: str) -> Program | BuildReport:
    """The program, or the report that says what is wrong with it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
        hint = "The candidate must be one valid Python file."
        return BuildReport(
            Fault.FORMAT_ERROR, message=f"Python syntax error: {message}"[:800], hint=hint, rule="syntax"
        )
    try:
        return _check(tree)
    except _Violation as violation:
        fault = Fault.FORMAT_ERROR if violation.rule in ("no_model", "no_forward") else Fault.STATIC_VIOLATION
        return BuildReport(fault, message=violation.message[:800], hint=violation.hint, rule=violation.rule)


def _check(tree: ast.Module) -> Program:
    model = _model(tree)
    _imports(tree)
    _names(tree)
    kernels = _kernels(tree)
    for method in model.body:
        if isinstance(method, ast.FunctionDef) and method.name != "__init__":
            _no_library_calls(method, _held_modules(model))
    return Program(tree, model, kernels)


def _model(tree: ast.Module) -> ast.ClassDef:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelNew"]
    if not classes:
        raise _Violation("no_model", "the file defines no class ModelNew", "Define `class ModelNew(nn.Module)`.")
    model = classes[-1]
    if not any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in model.body):
        raise _Violation("no_forward", "ModelNew has no forward", "Define `def forward(self, …)` in ModelNew.", model)
    return model


def _imports(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            # `from torch import nn` names a module of the list; `from torch import compile` does not get far
            # (names, calls).
            names = [module] if node.level == 0 else ["." + module]
        else:
            continue
        for name in names:
            if name not in _IMPORTS:
                allowed = "torch, torch.nn, math and kbrl_async.launch"
                raise _Violation(
                    "import", f"import of {name!r} is not allowed", f"Only {allowed} may be imported.", node
                )


def _names(tree: ast.Module) -> None:
    hint = "Use only torch allocation and views, and c_kernel."
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
            raise _Violation("forbidden_name", f"{node.id!r} is not allowed", hint, node)
        if isinstance(node, ast.Attribute) and node.attr in _FORBIDDEN_ATTRIBUTES:
            raise _Violation("forbidden_name", f"attribute {node.attr!r} is not allowed", hint, node)


def _kernels(tree: ast.Module) -> list[tuple[str, str]]:
    literals = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "c_kernel"]
    found = [_kernel(node, literals) for node in calls]
    if not found:
        hint = 'Launch a C function: `self.kernel = c_kernel(SOURCE, "name")` in __init__, `self.kernel(…)` in forward.'
        raise _Violation("no_kernel", "the candidate has no c_kernel(source, name)", hint)
    return found


def _kernel(node: ast.Call, literals: dict[str, str]) -> tuple[str, str]:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    texts = [
        item.value if isinstance(item, ast.Constant) else literals.get(item.id) if isinstance(item, ast.Name) else None
        for item in given
    ]
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        hint = 'Write c_kernel(SOURCE, "name"), where SOURCE is a string literal at the top of the file.'
        raise _Violation("kernel_source", "c_kernel needs a literal source and a literal name", hint, node)
    return str(texts[0]), str(texts[1])


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _held_modules(model: ast.ClassDef) -> set[str]:
    """Attributes of self that hold library modules: `self.linear = nn.Linear(…)`."""
    held = set()
    for node in ast.walk(model):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            is_module = isinstance(function, ast.Attribute) and _root(function) in ("nn", "torch")
            if is_module and _called(node.value)[:1].isupper() and _called(node.value) != "Parameter":
                held |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    return held


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _no_library_calls(method: ast.FunctionDef, held: set[str]) -> None:
    hint = "Outside __init__, torch may only allocate and view; compute in the C kernel, reading weights as tensors."
    for node in ast.walk(method):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            raise _Violation("library_call", "`@` computes a product in torch", hint, node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        root = _root(node.func)
        is_held = root == "self" and isinstance(owner, ast.Name) and name in held
        is_library = root in _LIBRARY_MODULES or (root == "torch" and name not in _TORCH_CALLS)
        is_method = root not in ("torch", "math") and name in _COMPUTE_METHODS
        if is_held or is_library or is_method:
            raise _Violation("library_call", f"{ast.unparse(node.func)}(…) computes in torch", hint, node)
