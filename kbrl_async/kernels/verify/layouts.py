"""Whether one tensor is another in other order: the same values, reshaped or with its dimensions exchanged.

Its functions are bound at import: it is asked inside of children, too, after their candidate was loaded. Large tensors
are compared by parts, because what is asked beside a candidate is to fit where its own calls did.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from kbrl_async.kernels.verify.pieces import as_real, countable, slices

_SAME = 1e-4
"""Relative to the scale of the answer: a copy through an own kernel that adds a little noise is still a copy."""
_MOST_DIMENSIONS = 5
_MOST_BEGINS = 64
_FEW = 8
"""Elements that may be alike by chance."""
_PART = 1 << 22
"""Elements."""
_NEARLY_ALL = 0.9
_equal, _aminmax, _isfinite = torch.equal, torch.aminmax, torch.isfinite
TensorCheck = Callable[[torch.Tensor], bool]


def never(_item: torch.Tensor) -> bool:
    return False


def is_moved(item: torch.Tensor, wanted: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a copy that the library made is the answer as it is: where nothing is to be done but to bring elements
    into another order, that was all of it. Not where an input lies so already, nor where the copy does not.
    """
    if item.numel() < 2 or not item.is_contiguous() or not is_answer(item, wanted, in_any_order=False):
        return False
    return not any(is_answer(given, wanted, in_any_order=False) for given in inputs)


def is_answer(item: torch.Tensor, wanted: torch.Tensor, in_any_order: bool = True) -> bool:
    """Whether `item` holds all that `wanted` does, so that whoever has it need only copy.

    A single number of floating point counts, as a loss is one; a single integer may be the same by chance, and so may
    equal values, as all places of a largest element. A cast is no work: what rounds to a narrower answer holds it, and
    integers of another width do, or floats and truths that are equal to them; so does what has its bits in another
    type.
    """
    if item.numel() != wanted.numel() or item.numel() == 0 or wanted.is_complex() != item.is_complex():
        return False
    if wanted.is_complex():
        return is_answer(as_real(item), as_real(wanted), in_any_order)
    others = [item.view(wanted.dtype)] if _may_be_its_bits(item, wanted) else []
    return any(_is_held(one, wanted, in_any_order) for one in (item, *others))


def _may_be_its_bits(item: torch.Tensor, wanted: torch.Tensor) -> bool:
    if item.dtype == wanted.dtype or torch.bool in (item.dtype, wanted.dtype):
        return False
    return item.dtype.itemsize == wanted.dtype.itemsize and item.is_contiguous() and not item.is_neg()


def _is_held(item: torch.Tensor, wanted: torch.Tensor, in_any_order: bool) -> bool:
    if item.numel() == 1 and not (item.is_floating_point() and wanted.is_floating_point()):
        return False
    if not wanted.is_floating_point():
        is_narrowed = item.dtype != wanted.dtype and not item.is_floating_point()
        may_be = torch.bool in (item.dtype, wanted.dtype) or is_narrowed or _ends(item) == _ends(wanted)
        return may_be and _tells(wanted) and _is_same(item, wanted, _are_equal, in_any_order)
    low, high = _ends(wanted)
    if low == high and not _tells(wanted):
        return False
    near = _SAME * max(abs(low), abs(high)) + 1e-30
    least, most = _ends(item, wanted.dtype)
    if not (abs(least - low) <= 2 * near and abs(most - high) <= 2 * near):
        return False

    def are_near(a: torch.Tensor, b: torch.Tensor) -> bool:
        a, b = (a.to(b.dtype) if a.is_floating_point() else a).double(), b.double()
        return bool((((a - b).abs() <= near + _SAME * b.abs()) & _isfinite(b) | _is_alike(a, b)).all())

    return _is_same(item, wanted, are_near, in_any_order)


def _ends(tensor: torch.Tensor, rounded_to: torch.dtype | None = None) -> tuple[float, float]:
    """The least and the largest of its numbers: what is infinite or NaN is none, and 0 where nothing else is there."""
    dtype = rounded_to if rounded_to is not None and tensor.is_floating_point() else tensor.dtype
    low, high = (float(end.to(dtype)) for end in _aminmax(countable(tensor)))
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    parts = (countable(part.to(dtype)) for part in slices(tensor, _PART))
    finite = (part[_isfinite(part)] for part in parts)
    ends = [float(end) for part in finite if part.numel() for end in _aminmax(part)]
    return min(ends, default=0.0), max(ends, default=0.0)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where neither is a number that could be near another: both NaN, or the same infinity."""
    return (a == b) | ((a != a) & (b != b))


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of whole numbers `b`: what is cast to truths was more than that."""
    is_cast = a.is_floating_point() or torch.bool in (a.dtype, b.dtype)
    return _equal(a.double(), b.double()) if is_cast else _equal(a.to(b.dtype), b)


def _is_same(
    item: torch.Tensor,
    wanted: torch.Tensor,
    are_same: Callable[[torch.Tensor, torch.Tensor], bool],
    in_any_order: bool,
) -> bool:
    for one in _orders(item) if in_any_order else [item]:
        parts = zip(slices(one, _PART), slices(wanted.reshape(one.shape), _PART), strict=True)
        if all(are_same(*both) for both in parts):
            return True
    return False


def runs_of(sizes: Sequence[int], total: int) -> list[slice]:
    """Where several that follow each other come to so much together.

    >>> runs_of([1, 2, 3, 3, 6], 6)
    [slice(0, 3, None), slice(2, 4, None)]
    """
    found = []
    for begin in range(min(len(sizes), _MOST_BEGINS)):
        end, left = begin, total
        while end < len(sizes) and left > 0:
            left -= sizes[end]
            end += 1
        if left == 0 and end - begin > 1:
            found.append(slice(begin, end))
    return found


class Holding:
    """How much of an answer of several tensors the library's results hold: a small one may be its honest step, and so
    may be one that only brings elements into another order. An output that is the same everywhere tells nothing; one of
    several that is an input as it came is nobody's work, and counts nowhere.
    """

    def __init__(self, answer: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> None:
        made = [one for one in answer if len(answer) == 1 or not _is_given(one, inputs)]
        self._answer = [one for one in made if _tells(one)]
        self._total = sum(tensor.numel() for tensor in made)
        self._held: set[int] = set()
        self._moved: set[int] = set()

    def adds(self, is_it: TensorCheck) -> bool:
        """Asked of each tensor that is not held yet; whether those that are make more than half of all elements now, or
        whether, with those that were moved, nothing is left that tells, and that is at least half.
        """
        self._held |= self._found(self._held, is_it)
        return self._total < 2 * sum(self._answer[number].numel() for number in self._held) or self._is_whole

    def moves(self, is_it: TensorCheck) -> bool:
        """The same of a copy; whether all are held or moved now."""
        self._moved |= self._found(self._held | self._moved, is_it)
        return self._is_whole

    def _found(self, known: Collection[int], is_it: TensorCheck) -> set[int]:
        return {n for n, wanted in enumerate(self._answer) if n not in known and is_it(wanted)}

    @property
    def _is_whole(self) -> bool:
        is_enough = 0 < self._total <= 2 * sum(tensor.numel() for tensor in self._answer)
        return is_enough and len(self._held | self._moved) == len(self._answer)


def _is_given(wanted: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    alike = (one for one in inputs if one.dtype == wanted.dtype and one.numel() == wanted.numel())
    return any(_equal(one.flatten(), wanted.flatten()) for one in alike)


def _tells(wanted: torch.Tensor) -> bool:
    """Whether it is no mere chance that another tensor holds it, as `is_answer` has it."""
    if wanted.is_complex():
        return _tells(as_real(wanted))
    if wanted.numel() < 2:
        return wanted.numel() == 1 and wanted.is_floating_point()
    first = countable(wanted[(0,) * wanted.dim()])
    return not all(bool(_is_alike(countable(part), first).all()) for part in slices(wanted, _PART))


def are_answer(parts: Sequence[torch.Tensor], wanted: torch.Tensor) -> bool:
    """Whether these are the answer in parts: joined along one of their dimensions, as `is_answer` says."""
    return any(is_answer(one, wanted) for one in _joined(parts))


def have_nearly_all(parts: Iterable[torch.Tensor], wanted: torch.Tensor) -> bool:
    """Whether it lies among these, in parts or within a larger one."""
    return share_within(parts, wanted) >= _NEARLY_ALL


def share_within(parts: Iterable[torch.Tensor], wanted: torch.Tensor) -> float:
    """The largest share of `wanted` that parts along one of its dimensions make up, in whatever order; 1 where one of
    the parts has all of it within. A part that is the same everywhere is none.
    """
    covered = [torch.zeros(size, dtype=torch.bool) for size in wanted.shape]
    for part in parts:
        if _is_within(wanted, part):
            return 1.0
        for along, places in enumerate(covered):
            for begin in _places(part, wanted, along) if _tells(part) else ():
                places[begin : begin + part.shape[along]] = True
    return max((float(places.float().mean()) for places in covered if len(places) > 1), default=0.0)


def _is_within(wanted: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether `part` is larger along one dimension, or has one more, and `wanted` lies there."""
    if part.dim() == wanted.dim() + 1:
        return any(_places(wanted.unsqueeze(new), part, new) for new in range(part.dim()))
    longer = (along for along, size in enumerate(wanted.shape) if 1 < size < part.shape[along])
    return part.dim() == wanted.dim() and any(_places(wanted, part, along) for along in longer)


def _places(part: torch.Tensor, whole: torch.Tensor, along: int) -> list[int]:
    """Where `part` lies in `whole` along this dimension; not asked of one that is as large."""
    if part.shape == whole.shape or _rest(part, along) != _rest(whole, along) or part.numel() < _FEW:
        return []
    count, size = whole.shape[along] - part.shape[along] + 1, part.shape[along]
    if count < 1 or whole.is_complex():
        return []
    are_floats = whole.is_floating_point() and part.is_floating_point()
    near = _SAME * min(max(map(abs, _ends(one))) for one in (part, whole)) if are_floats else 0.0

    def are_near(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.double(), b.double()
        return ((a - b).abs() <= near) | _is_alike(a, b)

    begins = are_near(_some(whole.narrow(along, 0, count), along), _some(part.narrow(along, 0, 1), along))
    places = torch.nonzero(begins.movedim(along, 0).reshape(count, -1).all(1)).flatten().tolist()
    return [place for place in places[:_MOST_BEGINS] if bool(are_near(whole.narrow(along, place, size), part).all())]


def _rest(tensor: torch.Tensor, along: int) -> tuple[object, ...]:
    return tensor.is_complex(), tensor.dim(), *tensor.shape[:along], *tensor.shape[along + 1 :]


def _some(tensor: torch.Tensor, along: int) -> torch.Tensor:
    """Of its other dimensions a few places, which tell most parts from others."""
    steps = (1 if one == along else max(1, size // _FEW) for one, size in enumerate(tensor.shape))
    return tensor[tuple(slice(None, None, step) for step in steps)]


def _joined(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Along each dimension that allows it."""
    for along in range(parts[0].dim()):
        rests = {(one.dtype, one.shape[:along], one.shape[along + 1 :], one.dim()) for one in parts}
        if len(rests) == 1:
            yield torch.cat(list(parts), along)


def _orders(item: torch.Tensor) -> Iterator[torch.Tensor]:
    """It with its dimensions in each order; where that takes little memory, with one of them or all reversed, too."""
    squeezed = item.squeeze()
    squeezed = squeezed if 1 < squeezed.dim() <= _MOST_DIMENSIONS else item.flatten()
    along = tuple(range(squeezed.dim()))
    turned = {*((one,) for one in along), along} if item.numel() <= _PART else ()
    for order in itertools.permutations(along):
        yield squeezed.permute(order)
        yield from (countable(squeezed.permute(order)).flip(each) for each in turned)


def are_parts(results: list[torch.Tensor], size: int, is_answer: TensorCheck) -> bool:
    """Whether some of an operator's results that follow each other hold the answer together, in whatever order."""
    for run in runs_of([result.numel() for result in results], size):
        parts = results[run]
        if len({part.dtype for part in parts}) == 1 and is_answer(torch.cat([part.flatten() for part in parts])):
            return True
    return False
