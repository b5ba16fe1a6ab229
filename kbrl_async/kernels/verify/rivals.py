"""Where an answer to other inputs is right within the tolerance, too, being right says little.

A vision transformer's answer hardly depends on its input, nor does a loss of random rows: what an honest candidate
makes of poison, without its own kernels, is as right as any. What the library computed of these very inputs is much
nearer to what is expected than an answer to others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kbrl_async.kernels.verify import compare
from kbrl_async.kernels.verify.pieces import slices
from kbrl_async.kernels.verify.tolerance import Tolerance

_MOST = 3 << 19
"""Elements of a tensor that are kept and compared."""


class Rivals:
    """Of one candidate: the answer of the draw before, as far as it is right of the last one."""

    def __init__(self) -> None:
        self._before: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []
        self.is_same = False
        """Both draws have one answer: nothing is told by it."""

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def is_blind(self) -> bool:
        """Whether the answer before is right of the last draw, the same or not."""
        return bool(self) or self.is_same

    def draw(self, expected: Sequence[torch.Tensor], tolerances: Sequence[Tolerance]) -> None:
        """What is expected of the next one."""
        new = [sample_of(one).clone() for one in expected]
        both = list(zip(self._before, new, strict=False))
        self.is_same = bool(both) and all(compare.same_values(*two) for two in both)
        three = zip(self._before, new, tolerances, strict=False)
        is_right = bool(both) and not any(compare.difference(*one).wrong for one in three)
        self._found, self._before = self._before if is_right and not self.is_same else [], new

    def are_beaten(self, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
        """Whether each of these, right by its tolerance, is much nearer to what is expected; by those that differ."""
        numbers = range(len(self._found))
        return all(self.is_beaten(number, outputs[number], expected[number]) for number in numbers)

    def is_beaten(self, number: int, one: torch.Tensor, wanted: torch.Tensor) -> bool:
        """The same of an output by its number, in its sample; `one` may have another shape."""
        if not self._found or compare.same_values(self._found[number], sample_of(wanted)):
            return True
        samples = sample_of(one.reshape(wanted.shape)), sample_of(wanted)
        return compare.is_much_nearer(*samples, self._found[number])


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements; of a large one those at its begin, in its middle and at its end. Flat."""
    if tensor.numel() <= _MOST:
        return tensor.flatten()
    parts = list(slices(tensor, _MOST // 3))
    parts = [part for part in parts if 6 * part.numel() >= _MOST] or parts  # what is left of a row may be one element
    return torch.cat([parts[place].flatten() for place in (0, len(parts) // 2, -1)])
