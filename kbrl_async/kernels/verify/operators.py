"""Which ATen operators compute, and which only allocate, view, fill or copy."""

from __future__ import annotations

MOVES = frozenset(
    [
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like"),
        *("new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "fill_", "zero_"),
        *("scalar_tensor", "arange", "lift", "lift_fresh", "lift_fresh_copy", "detach", "detach_", "alias"),
        *("view", "_unsafe_view", "_reshape_alias", "reshape", "as_strided", "permute", "transpose", "t"),
        *("expand", "select", "slice", "squeeze", "unsqueeze", "split", "split_with_sizes", "unsafe_split"),
        *("chunk", "unbind", "narrow", "diagonal", "view_as_real", "view_as_complex", "movedim", "unfold"),
        *("clone", "copy_", "_to_copy", "contiguous", "_local_scalar_dense", "item", "set_", "resize_"),
        "is_same_size",
    ]
)
"""By base name, whatever the overload."""


COPIES = frozenset(["clone", "copy_", "_to_copy", "contiguous"])
"""Those that put what they are given into memory of its own, maybe in another order."""


def computes(name: str) -> bool:
    """For `"aten::mm"`: whether the library does arithmetic there (sorting and joining count as such)."""
    return name.rpartition("::")[2] not in MOVES


def copies(name: str) -> bool:
    return name.rpartition("::")[2] in COPIES
