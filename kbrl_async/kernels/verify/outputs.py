"""What a call gave back as tensors of ours, after its structure, types, shapes and layout were found right."""

from __future__ import annotations

import torch

from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome, Judged
from protocols.records import Fault


def of_call(outcome: ForwardOutcome, session: Judged, reference: Reference) -> list[torch.Tensor]:
    """:raises CandidateFault: they are not what the reference returns, but for their values."""
    expected = reference.wanted
    if len(outcome.tensors) != len(expected):
        text = f"forward returned {len(outcome.tensors)} tensors, the reference returns {len(expected)}"
        raise CandidateFault(Fault.INCORRECT, text, "structure")
    if outcome.tree != reference.out_tree and not same_structure(outcome.tree, reference.out_tree):
        raise CandidateFault(Fault.INCORRECT, "forward returns another structure than the reference", "structure")
    known = zip(outcome.tensors, expected, reference.kinds, reference.strides, strict=True)
    for meta, wanted, kind, strides in known:
        check_meta(meta, wanted, kind)
        check_layout(meta, strides)
    return [session.read(meta) for meta in outcome.tensors]


def same_structure(got: wire.Tree, expected: wire.Tree) -> bool:
    """Plain values are compared as values; a list may stand for a tuple."""
    if got[0] == "V" and expected[0] == "V":
        return _same_plain(got[1], expected[1])
    if {got[0], expected[0]} <= {"L", "U"}:
        return len(got[1]) == len(expected[1]) and all(map(same_structure, got[1], expected[1]))
    if got[0] == expected[0] == "D":
        return got[1].keys() == expected[1].keys() and all(same_structure(got[1][k], expected[1][k]) for k in got[1])
    return bool(got == expected)


def _same_plain(got: object, expected: object) -> bool:
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)):
        return got == expected or abs(float(got) - float(expected)) <= 1e-4 * (1 + abs(float(expected)))
    return got == expected


def check_meta(meta: wire.TensorMeta, wanted: torch.Tensor, kind: str) -> None:
    if meta.kind not in ("Tensor", kind):
        raise CandidateFault(
            Fault.CHEATING, f"the output is a {meta.kind}, not a plain torch.Tensor", "tensor_subclass"
        )
    if tuple(meta.shape) != tuple(wanted.shape):
        text = f"the output has shape {tuple(meta.shape)}, the reference {tuple(wanted.shape)}"
        raise CandidateFault(Fault.INCORRECT, text, "shape")
    dtype = str(wanted.dtype).removeprefix("torch.")
    if meta.dtype != dtype:
        raise CandidateFault(Fault.INCORRECT, f"the output is {meta.dtype}, the reference {dtype}", "dtype")


def check_layout(meta: wire.TensorMeta, wanted: tuple[int, ...]) -> None:
    """Elements that share memory were never computed one by one, unless the reference does the same."""
    if any(size > 1 and stride == 0 for size, stride in zip(meta.shape, meta.strides, strict=True)) and 0 not in wanted:
        raise CandidateFault(Fault.INCORRECT, f"the output is an expanded view (strides {meta.strides})", "layout")
