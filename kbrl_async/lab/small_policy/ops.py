"""Element-wise operations: the PyTorch line, the right C line, and how beginners get it wrong or slow.

To add one: one line in `OPS`. Every C line works on the float `v`.
"""

from __future__ import annotations

import msgspec

from kbrl_async.kernels.problems.writing import indent
from kbrl_async.lab.small_policy.author import Author


class Op(msgspec.Struct, frozen=True):
    """`torch` is an expression of `x` (and `{k}`), `slow`/`fast` are correct C statements, `wrong` are not."""

    torch: str
    fast: str
    wrong: tuple[str, ...]
    slow: str = ""
    constants: tuple[str, ...] = ()

    def torch_line(self, constant: str) -> str:
        return f"x = {self.torch}".replace("{k}", constant)

    def c_line(self, author: Author, constant: str) -> str:
        right = author.style(self.slow or self.fast, self.fast)
        return author.slip("formula", right, *self.wrong).replace("{k}", constant)


OPS: dict[str, Op] = {
    "relu": Op("torch.relu(x)", "v = v > 0.0f ? v : 0.0f;", ("v = v < 0.0f ? v : 0.0f;",)),
    "leaky_relu": Op("F.leaky_relu(x, 0.01)", "v = v > 0.0f ? v : 0.01f * v;", ("v = v > 0.0f ? v : 0.1f * v;",)),
    "sigmoid": Op(
        "torch.sigmoid(x)",
        "v = 0.5f + 0.5f * tanhf(0.5f * v);",
        ("v = 1.0f / (1.0f + expf(v));",),
        "v = 1.0 / (1.0 + exp(-v));",
    ),
    "tanh": Op("torch.tanh(x)", "v = tanhf(v);", ("v = tanf(v);",), "v = tanh(v);"),
    "silu": Op(
        "F.silu(x)",
        "v = 0.5f * v * (1.0f + tanhf(0.5f * v));",
        ("v = v * (1.0f + expf(-v));",),
        "v = v / (1.0 + exp(-v));",
    ),
    "gelu": Op(
        "F.gelu(x)",
        "v = 0.5f * v * (1.0f + erff(v * 0.70710678f));",
        ("v = v * (1.0f + erff(v * 0.70710678f));", "v = 0.5f * v * (1.0f + erff(v));"),
        "v = 0.5 * v * (1.0 + erf(v * 0.7071067811865476));",
    ),
    "softplus": Op(
        "F.softplus(x)",
        "v = v > 20.0f ? v : log1pf(expf(v));",
        ("v = expf(v);",),
        "v = v > 20.0 ? v : log1p(exp(v));",
    ),
    "elu": Op(
        "F.elu(x)", "v = v > 0.0f ? v : expf(v) - 1.0f;", ("v = v > 0.0f ? v : expf(v);",), "v = v > 0 ? v : expm1(v);"
    ),
    "selu": Op(
        "F.selu(x)",
        "v = v > 0.0f ? 1.0507010f * v : 1.7580993f * (expf(v) - 1.0f);",
        ("v = v > 0.0f ? v : 1.7580993f * (expf(v) - 1.0f);",),
        "v = v > 0 ? 1.0507010 * v : 1.7580993 * expm1(v);",
    ),
    "mish": Op(
        "F.mish(x)",
        "v = v * tanhf(log1pf(expf(v)));",
        ("v = tanhf(log1pf(expf(v)));", "v = v * tanhf(expf(v));"),
        "v = v * tanh(log1p(exp(v)));",
    ),
    "log_sigmoid": Op(
        "F.logsigmoid(x)",
        "v = v < 0.0f ? v - log1pf(expf(v)) : -log1pf(expf(-v));",
        ("v = log1pf(expf(-v));",),
        "v = v < 0 ? v - log1p(exp(v)) : -log1p(exp(-v));",
    ),
    "gelu_tanh": Op(
        'F.gelu(x, approximate="tanh")',
        "v = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));",
        ("v = 0.5f * v * (1.0f + tanhf(v + 0.044715f * v * v * v));",),
        "v = 0.5 * v * (1.0 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));",
    ),
    "atan": Op("torch.atan(x)", "v = atanf(v);", ("v = tanf(v);",), "v = atan(v);"),
    "hardtanh": Op(
        "F.hardtanh(x)", "v = v > 1.0f ? 1.0f : v < -1.0f ? -1.0f : v;", ("v = v > 1.0f ? 1.0f : v < 0.0f ? 0.0f : v;",)
    ),
    "hardswish": Op(
        "F.hardswish(x)",
        "v = v <= -3.0f ? 0.0f : v >= 3.0f ? v : v * (v + 3.0f) / 6.0f;",
        ("v = v * (v + 3.0f) / 6.0f;",),
    ),
    "abs": Op("torch.abs(x)", "v = fabsf(v);", ("v = -v;",)),
    "square": Op("x * x", "v = v * v;", ("v = v + v;",), "v = powf(v, 2.0f);"),
    "scale": Op("x * {k}", "v = v * {k}f;", ("v = v / {k}f;",), constants=("0.5", "2.0", "0.25", "1.5")),
    "shift": Op("x + {k}", "v = v + {k}f;", ("v = v - {k}f;",), constants=("0.5", "1.0", "2.0", "0.1")),
    "clamp": Op(
        "torch.clamp(x, min={k})", "v = v < {k}f ? {k}f : v;", ("v = v > {k}f ? {k}f : v;",), constants=("0.1", "0.5")
    ),
    "sin": Op("torch.sin(x)", "v = sinf(v);", ("v = cosf(v);",), "v = sin(v);"),
}


class ChainStep(msgspec.Struct, frozen=True):
    """One operation of a chain with its constant, written `"scale:0.5"`; `"relu"` has none."""

    op: str
    constant: str = ""

    @classmethod
    def parse(cls, text: str) -> ChainStep:
        op, _, constant = text.partition(":")
        if op not in OPS:
            raise ValueError(f"no operation named {op!r}")
        return cls(op, constant)


def chain(text: str) -> tuple[ChainStep, ...]:
    """`"relu scale:0.5"` → steps."""
    return tuple(ChainStep.parse(word) for word in text.split())


def torch_lines(steps: tuple[ChainStep, ...]) -> list[str]:
    return [OPS[step.op].torch_line(step.constant) for step in steps]


def commented(steps: tuple[ChainStep, ...], author: Author) -> list[str]:
    """Each C line below what it stands for in PyTorch: to find the operation and to write it are two decisions then."""
    said = [line.removeprefix("x = ") for line in torch_lines(steps)]
    return [line for pair in zip(said, c_lines(steps, author), strict=True) for line in (f"// {pair[0]}", pair[1])]


def c_lines(steps: tuple[ChainStep, ...], author: Author) -> list[str]:
    return [OPS[step.op].c_line(author, step.constant) for step in steps]


def chain_function(
    name: str, steps: tuple[ChainStep, ...], author: Author, *, linkage: str = "static inline", join: str = ""
) -> list[str]:
    """The chain as a C function `name(v)`, or `name(v, w)` where `join` says how a second value comes in first.

    A line of it stands at the same depth whatever the kernel around it is, so it is one token of the small policy: what
    was learnt of an operation in one family holds in all.
    """
    parameters = "float v, float w" if join else "float v"
    body = [*([join] if join else []), *commented(steps, author)]
    return [f"{linkage} float {name}({parameters}) {{", *indent(body, 1), "    return v;", "}"]


class Chains:
    """The chains of one kernel as functions, and the lines that call them; an empty chain has neither."""

    def __init__(self, author: Author) -> None:
        self._author, self.functions = author, list[str]()

    def call(self, name: str, steps: tuple[ChainStep, ...]) -> list[str]:
        if not steps:
            return []
        self.functions += chain_function(name, steps, self._author)
        return [f"v = {name}(v);"]
