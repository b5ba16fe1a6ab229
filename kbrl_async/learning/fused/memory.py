"""How much of a forward pass can be kept for the backward pass, by estimate: the less is computed again the better.

Bytes a token and layer::

    all      x, q, k, v, attention's output, x', gate, up
    lean     all but gate and up, which cost two of seven matrix products to compute again
    none     x alone: the whole layer again
"""

from __future__ import annotations

from typing import NamedTuple

SLACK = 3e8
"""Bytes for what no estimate knows: cuBLAS workspaces, plans of attention, small tensors."""


class Shape(NamedTuple):
    """Of a decoder, in elements."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Heads times their dimension."""
    key_value: int
    """k and v heads together, times their dimension."""
    itemsize: int

    @property
    def lean(self) -> int:
        return (2 * self.hidden + 2 * self.query + self.key_value) * self.itemsize

    @property
    def full(self) -> int:
        return self.lean + 2 * self.intermediate * self.itemsize

    @property
    def bare(self) -> int:
        return self.hidden * self.itemsize

    @property
    def workspace(self) -> int:
        """Of one layer's backward pass, a token: the gradient of silu(gate) · up, and of what is as wide as x."""
        return (self.intermediate + 6 * self.hidden + 2 * self.query) * self.itemsize


class Plan(NamedTuple):
    kept: int
    """Layers that keep everything."""
    whole: int
    """Layers that keep all but gate and up, those of `kept` among them; the others keep their input only."""


def plan(shape: Shape, tokens: int, room: float) -> Plan:
    """The most that fits into `room` bytes; `Plan(0, 0)` where not even that does: it is the least there is."""
    room -= SLACK + tokens * shape.workspace
    whole = _most(shape.layers, room - shape.layers * tokens * shape.bare, tokens * (shape.lean - shape.bare))
    if whole < shape.layers:
        # A layer that is computed again holds all of its activations while its backward pass runs.
        room -= tokens * shape.full
        return Plan(
            0, _most(shape.layers, room - shape.layers * tokens * shape.bare, tokens * (shape.lean - shape.bare))
        )
    kept = _most(shape.layers, room - shape.layers * tokens * shape.lean, tokens * (shape.full - shape.lean))
    return Plan(kept, whole)


def _most(layers: int, room: float, price: float) -> int:
    return max(0, int(min(layers, room / price)))
