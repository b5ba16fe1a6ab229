"""Secret input sets, made from what the problem's own `get_inputs` draws: pure functions of tensors, on any device.

A set keeps what its problem may rely on: integers and 0/1 masks stay as they are, inputs that are never negative stay
so, as do those that are never positive, zeros stay zeros (triangular stays triangular), symmetric stays symmetric, rows
that sum to 1, and logarithms of such, are left alone. So no honest candidate that uses what the problem promises is
refused.
Timed calls get fresh values, see `fresh`; one of the checked sets does too, so that those do not look special.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
import torch

from kbrl_async.kernels.problems.declared import Domain
from kbrl_async.kernels.verify.pieces import CHUNK, ends, first_rows, in_order, pieces, row_sums

_SAMPLE = 1 << 16
_NEAR_ZERO = 1e-2
_ROWS = 64
"""That are looked at for what all have in common."""
_COARSE = 2.0**-9
"""Half a unit in the last place of bfloat16."""


class Kind(msgspec.Struct, frozen=True):
    """One variation of the nominal inputs."""

    name: str
    scale: float = 1.0
    flip: bool = False
    shape: str = ""
    """`"mixed"`, `"spikes"`, `"graded"`, `"binary"`; empty: the values of the draw."""
    scale_to: float = 0.0
    """> 0: the scale is secret, between `scale` and this."""

    @property
    def has_ties(self) -> bool:
        """Many equal values: which of them an argmax or a sort names first is nobody's duty."""
        return self.shape in ("spikes", "binary")

    @property
    def repeats(self) -> bool:
        """The very inputs of the first set once more: a right answer first and a wrong one later is carried state."""
        return self.shape == "again"


NOMINAL = Kind("nominal")
# Large is 8 to 10 times, not 64: what a secret factor decides must not change from one draw to the next, and beyond 20
# times normal values leave the range of expf, where honest kernels differ in what they promise.
KINDS = (
    NOMINAL,
    Kind("nominal"),
    Kind("mixed", shape="mixed"),
    Kind("small", 1e-2),
    Kind("large", 8.0, scale_to=10.0),
    Kind("negated", flip=True),
    Kind("spikes", 4.0, shape="spikes"),
    Kind("graded", shape="graded"),
    Kind("binary", shape="binary"),
    Kind("repeated", shape="again"),
)
STRATA = (("nominal",), ("small", "large", "graded"), ("negated", "spikes", "binary"))
"""As drawn, of other sizes, of other signs or mostly zero: a kernel that need not see all sets sees one of each."""
_LESS = {"large": Kind("large", 8.0)}


AS_DRAWN = ("nominal", "mixed")
"""Where inputs are small, mostly zero or of few values, a step on the way may happen to be the answer."""

MANY_BYTES = 256 << 20
_FEW = 3
_LESS_NEEDED = ("small", "graded")


def kinds_for(tensors: list[torch.Tensor]) -> tuple[Kind, ...]:
    """All kinds; fewer for inputs so large that each set costs seconds and gigabytes."""
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= MANY_BYTES:
        return KINDS
    return tuple(kind for kind in KINDS if kind.name not in _LESS_NEEDED and kind is not KINDS[1])


def few_of(kinds: tuple[Kind, ...], rng: random.Random) -> tuple[Kind, ...]:
    """The nominal one and a secret few of the others, in their order: for a workload beside others."""
    others = sorted(rng.sample(range(1, len(kinds)), _FEW))
    return (kinds[0], *(kinds[number] for number in others))


def in_secret_order(names: Sequence[str], rng: random.Random) -> list[int]:
    """Places of sets by their kinds' names: a secret one of each of `STRATA` that there is, then all others.

    >>> names = [kind.name for kind in KINDS]
    >>> first = {names[place] for place in in_secret_order(names, random.Random(1))[: len(STRATA)]}
    >>> [len(first & set(stratum)) for stratum in STRATA]
    [1, 1, 1]
    """
    places = rng.sample(range(len(names)), len(names))
    first = [next((place for place in places if names[place] in stratum), None) for stratum in STRATA]
    chosen = [place for place in first if place is not None]
    rng.shuffle(chosen)
    return [*chosen, *(place for place in places if place not in chosen)]


def attempts(kind: Kind) -> tuple[Kind, ...]:
    """What to try for a set, in order, where the reference does not take some values or has no finite answer."""
    milder = _LESS.get(kind.name)
    return (kind, milder, NOMINAL) if milder else (kind,) if kind.name == "nominal" else (kind, NOMINAL)


def is_continuous(tensor: torch.Tensor) -> bool:
    """Floating point, and not a mask, class label or count in disguise."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.numel() == 0:
        return False
    few = tensor.view(-1)[:_SAMPLE] if tensor.is_contiguous() else tensor  # that they are no integers shows in few
    return not _are_integers(few) or not (few is tensor or _are_integers(tensor))


def _are_integers(tensor: torch.Tensor) -> bool:
    return all(bool((part == part.round()).all()) for (part,) in pieces(tensor))


def vary(
    tensors: list[torch.Tensor],
    kind: Kind,
    rng: random.Random,
    domains: Mapping[int, Domain] | None = None,
    fixed: Collection[int] = (),
    *,
    is_ours: bool = False,
) -> list[torch.Tensor]:
    """The inputs of a set, from one nominal draw: what stays as it is shares its memory. Tensors have the
    problem's shapes, or are flat blocks where only their values are known. `domains` and `fixed` go by their numbers:
    the ends that they stay between, and which stay as they were drawn. `is_ours`: nobody needs the draw any more, all
    is done in its memory.
    """
    factor = kind.scale if kind.scale_to <= kind.scale else rng.uniform(kind.scale, kind.scale_to)
    seed = rng.getrandbits(63)
    varied = []
    for number, tensor in enumerate(tensors):
        is_kept = (
            number in fixed or not is_continuous(tensor) or kind in (NOMINAL, KINDS[-1]) or is_distribution(tensor)
        )
        if is_kept:
            varied.append(tensor)
        else:
            made = _shaped(tensor, kind, seed, tensor if is_ours else torch.empty_like(tensor)).mul_(factor)
            varied.append(made.clamp_(*domains[number]) if domains and number in domains else made)
    return varied


def _shaped(tensor: torch.Tensor, kind: Kind, seed: int, out: torch.Tensor) -> torch.Tensor:
    """Element-wise functions of the values, or symmetric ones of the position: they keep structure, and strides. What
    never comes near zero does not become zero, it may be a divisor, nor all one value: rows without variance are, for
    a normalisation, rounding errors and nothing else. `out` may be the tensor itself.
    """
    if kind.shape == "graded":
        return _grade(out if out is tensor else out.copy_(tensor))
    least, most = ends(tensor)
    change = _changer(tensor, kind, seed)
    for part, to in _parts(tensor, out, kind):
        changed = change(part)
        if least > _NEAR_ZERO * most:
            nearer = part.abs().add_(least).mul_(0.5).copysign_(part)
            torch.where(changed == 0, nearer, changed, out=changed)
        to.copy_(changed)
    return out


def _parts(tensor: torch.Tensor, out: torch.Tensor, kind: Kind) -> Iterator[tuple[torch.Tensor, ...]]:
    """Numbers are drawn for elements in their order, which may be another than that of the memory."""
    return zip(in_order(tensor), in_order(out), strict=True) if kind.flip else pieces(tensor, out)


def _changer(tensor: torch.Tensor, kind: Kind, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes new values of a part, by what is known of the whole."""
    if kind.shape == "spikes":
        least = _quantile(tensor, 0.9, are_magnitudes=True)
        return lambda part: part * (part.abs() >= least)
    if kind.shape == "binary":
        middle, sign = _quantile(tensor, 0.5), 1 if _is_any(tensor, torch.gt) else -1
        return lambda part: ((part > middle) & (part != 0)).to(part.dtype).mul_(sign)
    if kind.flip and _is_any(tensor, torch.lt) and _is_any(tensor, torch.gt):
        return torch.neg  # what has one side keeps it: decays, probabilities, variances
    if kind.flip:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        return lambda part: part * (torch.rand(part.shape, generator=generator, device=part.device) < 0.25)
    return torch.clone


def _is_any(tensor: torch.Tensor, than: Callable[[torch.Tensor, int], torch.Tensor]) -> bool:
    """Whether any value is less or more than zero."""
    return any(bool(than(part, 0).any()) for (part,) in pieces(tensor))


def _quantile(tensor: torch.Tensor, share: float, are_magnitudes: bool = False) -> torch.Tensor:
    """Of a sample that is enough to tell many values from few; stays on the device."""
    step = max(1, tensor.numel() // _SAMPLE)
    if tensor.is_contiguous():
        sample = tensor.view(-1)[::step].float()
    else:  # flattened, it would be copied
        places = torch.arange(0, tensor.numel(), step, device=tensor.device)
        sample = tensor[torch.unravel_index(places, tensor.shape)].float()
    sample = sample.abs() if are_magnitudes else sample
    return sample.sort().values[int(share * (sample.numel() - 1))]


def _grade(tensor: torch.Tensor) -> torch.Tensor:
    """Magnitudes that rise along the rows, from a tenth to four times; along both sides of a square matrix."""
    if tensor.dim() == 0:
        return tensor
    ramp = torch.linspace(0.1, 4.0, tensor.shape[-1], device=tensor.device).to(tensor.dtype)
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return tensor.mul_(ramp)
    rows = max(1, CHUNK // tensor.shape[-1])
    for begin in range(0, tensor.shape[-2], rows):  # one factor an element: symmetric stays symmetric to the last bit
        part = slice(begin, begin + rows)
        tensor[..., part, :].mul_(ramp[part].unsqueeze(-1) * ramp)
    return tensor


def is_distribution(tensor: torch.Tensor) -> bool:
    """Rows that are probabilities, or their logarithms: no scale and no shape of ours keeps that."""
    return sums_to_one(tensor) or (_are_no_more(tensor) and sums_to_one(tensor, lambda part: part.exp().float()))


def _are_no_more(tensor: torch.Tensor) -> bool:
    """Than zero."""
    return all(bool((part <= 0).all()) for (part,) in pieces(tensor))


def sums_to_one(tensor: torch.Tensor, widened: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float) -> bool:
    """Rows that are distributions: only mixtures keep that."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return False
    sums = row_sums(first_rows(tensor, _ROWS), widened)
    return bool(((sums - 1).abs() < 1e-2).all())


def moved(tensors: list[torch.Tensor], rng: random.Random, coarse: bool = False) -> list[torch.Tensor]:
    """As `move` makes them, in memory of their own."""
    changed = [tensor.clone() for tensor in tensors]
    move(changed, rng, coarse)
    return changed


def move(tensors: list[torch.Tensor], rng: random.Random, coarse: bool = False) -> None:
    """Each value of a wide dtype moves by at most one rounding error; half precision stays, because its rounding error
    is larger than what an honest kernel does with it. `coarse`: half precision moves, too, and wide values by what half
    precision would round them by.
    """
    for tensor in tensors:
        is_wide = tensor.dtype.itemsize >= 4
        if is_continuous(tensor) and (is_wide or coarse):
            generator = torch.Generator(tensor.device).manual_seed(rng.getrandbits(63))
            value = _COARSE if coarse and is_wide else torch.finfo(tensor.dtype).eps
            for part in in_order(tensor):
                steps = torch.randint(-1, 2, part.shape, generator=generator, device=part.device, dtype=torch.int8)
                part.addcmul_(part, steps.to(part.dtype), value=value)


def host_bytes(tensors: list[torch.Tensor]) -> int:
    """Of those that are not on a device; memory that several share counts once."""
    held = {tensor.data_ptr(): tensor for tensor in tensors if tensor.device.type == "cpu"}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())
