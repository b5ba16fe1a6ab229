"""Element by element: functions of one value, of two, casts and quantities of fewer bits."""

from __future__ import annotations

from kbrl_async.kernels.generator.draft import ProblemDraft, Unfit
from kbrl_async.kernels.generator.operators.table import ANY, FULL, TABLES, operator

ONE = {
    "relu": "torch.relu(x)",
    "relu6": "F.relu6(x)",
    "leaky_relu": "F.leaky_relu(x, {slope})",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "silu": "F.silu(x)",
    "gelu": "F.gelu(x)",
    "gelu_tanh": 'F.gelu(x, approximate="tanh")',
    "softplus": "F.softplus(x)",
    "elu": "F.elu(x, {slope})",
    "selu": "F.selu(x)",
    "celu": "F.celu(x, {factor})",
    "mish": "F.mish(x)",
    "log_sigmoid": "F.logsigmoid(x)",
    "hardtanh": "F.hardtanh(x)",
    "hardswish": "F.hardswish(x)",
    "hardsigmoid": "F.hardsigmoid(x)",
    "softsign": "F.softsign(x)",
    "tanhshrink": "F.tanhshrink(x)",
    "softshrink": "F.softshrink(x, {slope})",
    "abs": "torch.abs(x)",
    "square": "x * x",
    "exp_neg": "torch.exp(-torch.abs(x))",
    "log1p": "torch.log1p(torch.abs(x))",
    "sqrt": "torch.sqrt(torch.abs(x) + {slope})",
    "rsqrt": "torch.rsqrt(x * x + {factor})",
    "reciprocal": "1.0 / (x * x + {factor})",
    "sin": "torch.sin(x)",
    "cos": "torch.cos(x)",
    "atan": "torch.atan(x)",
    "erf": "torch.erf(x)",
    "scale": "x * {factor}",
    "shift": "x + {factor}",
    "clamp": "torch.clamp(x, -{factor}, {factor})",
    "quick_gelu": "x * torch.sigmoid(1.702 * x)",
    "squared_relu": "torch.relu(x) * torch.relu(x)",
    "soft_cap": "{factor} * torch.tanh(x / {factor})",
}
"""Expressions of `x`; `{slope}` is a small constant, `{factor}` one about 1."""
TWO = {
    "add_input": "x + {y}",
    "mul_input": "x * {y}",
    "sub_input": "x - {y}",
    "maximum": "torch.maximum(x, {y})",
    "minimum": "torch.minimum(x, {y})",
    "lerp": "torch.lerp(x, {y}, {slope})",
    "gated_silu": "F.silu(x) * {y}",
    "gated_gelu": "F.gelu(x) * {y}",
    "safe_div": "x / (1.0 + torch.abs({y}))",
    "hypot": "torch.sqrt(x * x + {y} * {y} + 1e-6)",
    "squared_difference": "(x - {y}) * (x - {y})",
}


def _expression(text: str, draft: ProblemDraft, **names: str) -> str:
    slope, factor = draft.rng.choice(("0.1", "0.2", "0.25", "0.05")), draft.rng.choice(("0.5", "1.5", "2.0", "0.75"))
    return "x = " + text.format(slope=slope, factor=factor, **names)


def _enter_one(name: str, text: str) -> None:
    @operator("element-wise", name=name)
    def write(draft: ProblemDraft) -> None:
        draft.do(_expression(text, draft))


def _enter_two(name: str, text: str) -> None:
    @operator("element-wise with a second input", FULL, name=name)
    def write(draft: ProblemDraft) -> None:
        draft.do(_expression(text, draft, y=draft.given("y", f"torch.randn({draft.shape()})")))


for _name, _text in ONE.items():
    _enter_one(_name, _text)
for _name, _text in TWO.items():
    _enter_two(_name, _text)


@operator("element-wise with a second input", TABLES)
def bias(draft: ProblemDraft) -> None:
    own = draft.member("bias", f"nn.Parameter(torch.randn({draft.last.text}))")
    draft.do(f"x = x + {own}")


@operator("element-wise with a second input", TABLES)
def feature_scale(draft: ProblemDraft) -> None:
    own = draft.member("scale", f"nn.Parameter(torch.rand({draft.last.text}) + 0.5)")
    draft.do(f"x = x * {own}")


@operator("element-wise with a second input", FULL)
def where_mask(draft: ProblemDraft) -> None:
    mask = draft.given("mask", f"torch.rand({draft.shape()}) > 0.3")
    draft.do(f"x = torch.where({mask}, x, {draft.rng.choice(('0.0', '0.1 * x', '-x'))})")


@operator("element-wise with a second input", FULL)
def dropout_mask(draft: ProblemDraft) -> None:
    keep = draft.given("keep", f"torch.rand({draft.shape()}) > 0.1")
    draft.do(f"x = x * {keep} / 0.9")


@operator("skip", FULL, starts=False)
def residual(draft: ProblemDraft) -> None:
    """Adds what the value was some steps ago, where it had the same shape."""
    if "skip" in draft.kept or len(draft.steps) < 2:
        raise Unfit
    start = next((n for n in range(len(draft.steps)) if all(step.keeps_shape for step in draft.steps[n:])), None)
    if start is None or len(draft.steps) - start < 2:
        raise Unfit
    first = draft.steps[start]
    draft.steps[start] = type(first)(first.operator, ("skip = x", *first.lines), keeps_shape=False)
    draft.kept["skip"] = draft.dims
    draft.do(draft.rng.choice(("x = x + skip", "x = x * skip", "x = torch.maximum(x, skip)")))


@operator("quantise", ANY, cost=2.0)
def quantise(draft: ProblemDraft) -> None:
    """A power of two as scale, and inputs as they came: rounding falls alike in any implementation."""
    if draft.steps:
        raise Unfit
    bits, top = draft.rng.choice((("16.0", 127), ("4.0", 7), ("8.0", 31)))
    draft.do(f"x = torch.clamp(torch.round(x * {bits}), -{top}, {top}) / {bits}")


@operator("quantise", TABLES, cost=2.0, starts=False)
def dequantise_int8(draft: ProblemDraft) -> None:
    codes = draft.given("codes", f"torch.randint(-127, 128, ({draft.shape()}), dtype=torch.int8)")
    scales = draft.given("scales", f"torch.rand({draft.shape(draft.dims[:-1])}, 1) / 64.0")
    draft.do(f"x = x + {codes}.float() * {scales}")


@operator("quantise", TABLES, cost=3.0, starts=False)
def unpack_int4(draft: ProblemDraft) -> None:
    if len(draft.dims) != 2:
        raise Unfit
    half = draft.last.over(2)
    packed = draft.given(
        "packed", f"torch.randint(0, 256, ({draft.shape([*draft.dims[:-1], half])}), dtype=torch.uint8)"
    )
    draft.do(
        f"low, high = {packed} % 16, {packed} // 16",
        "x = x * (torch.cat([low, high], dim=-1).float() - 8.0) / 8.0",
    )


@operator("cast", FULL, cost=1.5)
def through_bfloat16(draft: ProblemDraft) -> None:
    if draft.steps:
        raise Unfit
    draft.do("x = x.to(torch.bfloat16).float()")
