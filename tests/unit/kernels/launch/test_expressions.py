"""Size expressions: arithmetic that is ours, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kbrl_async.kernels.backends.launch.expressions import ExpressionError, parse

NAMES = {"n": 1000, "x": torch.zeros(3, 5), "f": 0.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-n + 1", -999),
        ("n // 3 % 10", 3),
        ("n / 8", 125.0),
        ("cdiv(n, 256)", 4),
        ("next_pow2(n) * 2", 2048),
        ("next_pow2(1)", 1),
        ("max(x.shape[0], x.shape[-1], 4)", 5),
        ("min(2, x.numel)", 2),
        ("sqrt(4) * f", 1.0),
    ],
)
def test_sizes_are_computed(text: str, value: float) -> None:
    assert parse(text)(NAMES) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n +",
        "__import__('os')",
        "n.__class__",
        "x.data_ptr",
        "x.shape",
        "x.shape[n]",
        "x.shape[7]",
        "open(n)",
        "max(n, key=n)",
        "[n][0]",
        "n ** n",
        "n << 90",
        "n if n else 1",
        "lambda: 1",
        "'a' * n",
        "True",
        "unknown",
        "n // 0",
        "1e300 * n",
        "x * 2",
        "sqrt(-1)",
        "cdiv(1)",
        "1 + " * 60 + "1",
    ],
)
def test_whatever_is_no_arithmetic_over_sizes_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)(NAMES)


def test_a_number_can_not_grow_without_bound() -> None:
    with pytest.raises(ExpressionError, match=r"no value|reasonable"):
        parse("*".join(["n"] * 40))(NAMES)
