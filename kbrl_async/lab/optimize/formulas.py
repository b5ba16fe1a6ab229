"""What PyTorch's element-wise functions are in C: `{0}`, `{1}` … stand for operands, each a float expression.

Without branches, so that compilers turn them into vector code. To add one: one line. Names are those of functions
(`torch.`, `F.`) and of methods alike.
"""

from __future__ import annotations

ELEMENTWISE: dict[str, str] = {
    "relu": "fmaxf({0}, 0.0f)",
    "relu_": "fmaxf({0}, 0.0f)",
    "abs": "fabsf({0})",
    "neg": "(-{0})",
    "exp": "expf({0})",
    "expm1": "expm1f({0})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "(1.0f / sqrtf({0}))",
    "reciprocal": "(1.0f / {0})",
    "square": "({0} * {0})",
    "sin": "sinf({0})",
    "cos": "cosf({0})",
    "tanh": "tanhf({0})",
    "erf": "erff({0})",
    "atan": "atanf({0})",
    "sigmoid": "(1.0f / (1.0f + expf(-{0})))",
    "silu": "({0} / (1.0f + expf(-{0})))",
    "gelu": "(0.5f * {0} * (1.0f + erff({0} * 0.70710678f)))",
    "gelu_tanh": "(0.5f * {0} * (1.0f + tanhf(0.79788456f * ({0} + 0.044715f * {0} * {0} * {0}))))",
    "softplus": "(fmaxf({0}, 0.0f) + log1pf(expf(-fabsf({0}))))",
    "logsigmoid": "(fminf({0}, 0.0f) - log1pf(expf(-fabsf({0}))))",
    "elu": "(fmaxf({0}, 0.0f) + expm1f(fminf({0}, 0.0f)))",
    "selu": "(1.05070099f * fmaxf({0}, 0.0f) + 1.75809934f * expm1f(fminf({0}, 0.0f)))",
    "mish": "({0} * tanhf(fmaxf({0}, 0.0f) + log1pf(expf(-fabsf({0})))))",
    "hardtanh": "fminf(fmaxf({0}, -1.0f), 1.0f)",
    "hardsigmoid": "fminf(fmaxf({0} / 6.0f + 0.5f, 0.0f), 1.0f)",
    "hardswish": "({0} * fminf(fmaxf({0} + 3.0f, 0.0f), 6.0f) / 6.0f)",
    "relu6": "fminf(fmaxf({0}, 0.0f), 6.0f)",
    "softsign": "({0} / (1.0f + fabsf({0})))",
    "leaky_relu": "({0} > 0.0f ? {0} : {1} * {0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "maximum": "fmaxf({0}, {1})",
    "minimum": "fminf({0}, {1})",
    "where": "({0} ? {1} : {2})",
    "pow": "powf({0}, {1})",
}
DEFAULTS = {"leaky_relu": ("0.01f",)}
"""Operands that may be left out."""

OPERATORS = {
    "Add": "({0} + {1})",
    "Sub": "({0} - {1})",
    "Mult": "({0} * {1})",
    "Div": "({0} / {1})",
    "Pow": "powf({0}, {1})",
    "Lt": "({0} < {1})",
    "LtE": "({0} <= {1})",
    "Gt": "({0} > {1})",
    "GtE": "({0} >= {1})",
    "USub": "(-{0})",
}
"""Of Python's syntax tree."""

MODULES = {
    "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus",
    "ELU": "elu", "SELU": "selu", "Mish": "mish", "Hardswish": "hardswish", "Hardtanh": "hardtanh", "ReLU6": "relu6",
    "LeakyReLU": "leaky_relu", "LogSigmoid": "logsigmoid", "Softsign": "softsign", "Hardsigmoid": "hardsigmoid",
}  # fmt: skip
"""Modules without weights, made without arguments."""
