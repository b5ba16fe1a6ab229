"""Runs built candidates against their references on this host: JSON orders on stdin, what is wrong on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from kbrl_async.kernels.backends.inline import launch as inline

_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1e-2}


def main() -> None:
    orders = json.load(sys.stdin)
    inline.install({key: path for order in orders for key, path in order["artifacts"].items()})
    wrong = {order["name"]: words for order in orders if (words := _wrong(order))}
    print(json.dumps(wrong))


def _wrong(order: dict[str, Any]) -> str:
    """Empty where it is right."""
    try:
        message = _compared(order)
    except Exception as error:  # whatever it is, it is the answer
        message = f"{type(error).__name__}: {error}"
    if order["raises"]:
        return "" if order["raises"] in message else f"should raise {order['raises']!r}: {message}"[:300]
    return message[:300]


def _compared(order: dict[str, Any]) -> str:
    device = "cuda" if "cuda_sources" in order["source"] else "cpu"
    problem: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    exec(compile(order["problem"], "problem.py", "exec"), problem)
    exec(compile(order["source"], "candidate.py", "exec"), candidate)
    torch.manual_seed(0)
    inputs = [tensor.to(device) for tensor in problem["get_inputs"]()]
    expected = problem["Model"]()(*inputs)
    found = candidate["ModelNew"]()(*inputs)
    tolerance = _TOLERANCES.get(expected.dtype, 1e-4)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    return ""


if __name__ == "__main__":
    main()
