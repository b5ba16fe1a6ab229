"""How far an output may be from the reference's: pure functions of tensors, on any device.

The tolerance of an element is the largest of

* what the problem declares for the dtype, else a floor: KernelBench's figures (1e-4 in fp32 and fp64, 1e-2 in half
  precision; there two units in the last place, where they are more) as relative part, and as an absolute part that
  follows the scale of the outputs: tiny outputs get a tighter one (zeros must not pass), large inputs a looser one;
* four times the error of an honest implementation in the same dtype: how far the reference itself is from its fp64 run,
  and how far it moves when its inputs move by one rounding error (a sum in another order does as much).

Where a variation of ours is worse conditioned inside than what the problem draws, sixteen times that: see `eased`.

Where {0, 1} inputs give integers that fp64 confirms, an output must be equal to the last bit: a product that was
rounded to a narrower type on the way shows there.
"""

from __future__ import annotations

import math

import msgspec
import torch

from kbrl_async.kernels.verify import fused
from kbrl_async.kernels.verify.pieces import as_real, countable, pieces

HALF = (torch.float16, torch.bfloat16)
HONEST_FACTOR = 4.0
_WORSE, _EASE = 4.0, 16.0
_INSIDE = 5.0
"""Times what moved inputs make in fp64: 30 large sets of an attention came to 4.5, norms behind a bias of a fifth of a
deviation to 5.6 and more."""
_UNITS = 2.0
"""In the last place of a narrow output: one rounding of the result, one of what it is made of."""
FP8_SUM = 2.0**-12
"""fp8 tensor cores keep about 14 bits while they add up, and cut the rest: what is lost of a sum of magnitudes."""
FP8_MOST = 2.4e-3
"""Of an output's scale: four times that still tells right from wrong."""
ILL_SHARE = {True: 5e-2, False: 1e-2}
"""Of the output's scale: an honest error above it says that the inputs are ill-conditioned, or the output jumps."""
_SAMPLE, _NOISE_SHARE = 1 << 16, 0.1
_SMALLEST_SHARE, _LARGEST_SHARE = 1e-2, 1e6


class Tolerance(msgspec.Struct, frozen=True):
    relative: float
    absolute: float
    honest: float = 0.0
    """Four times the honest error, largest over the output, at most the share of its scale that still tells
    right from wrong."""
    exact: bool = False
    """Every element must be equal."""
    is_declared: bool = False
    """Its figures are the problem's own."""
    ill: bool = False
    """The honest error was cut: these inputs do not tell a right kernel from a wrong one."""
    uncut: float = 0.0
    """The honest error, four times, as it was."""
    spread: float = math.inf
    """What the root mean square of all errors may be: asked where lower precision is declared, or honest ones are large
    (`leave`)."""
    by_band: tuple[float, ...] = ()
    """The same of each of `compare.bands`, of an output of `elements`."""
    elements: int = 0

    def widened(self, factor: float) -> Tolerance:
        wider = {name: getattr(self, name) * factor for name in ("relative", "absolute", "honest", "spread")}
        return msgspec.structs.replace(self, **wider, by_band=tuple(one * factor for one in self.by_band))

    def of_each(self) -> Tolerance:
        """For a part of an output, which may be off by more than the whole."""
        return msgspec.structs.replace(self, spread=math.inf, by_band=())

    def note(self) -> str:
        """For people: what was allowed and why."""
        if self.exact:
            return "equal to the last bit: integers that fp64 confirms"
        if self.relative == 0.0:
            return "equal"
        widest = f", at least 4 × an honest error = {self.honest:.2g}" if self.honest > self.absolute else ""
        whose = ", as the problem declares" if self.is_declared else ""
        if self.spread < math.inf:
            why = (
                "as the declared precision was simulated"
                if self.elements
                else "as the reference itself is off from fp64"
            )
            whose += f"; {self.spread:.2g} on the root mean square, {why}"
            widest = f", at least {self.honest:.2g}"
        return f"{self.absolute:.2g} + {_short(self.relative)}·|expected|{widest}{whose}"


def _short(figure: float) -> str:
    return f"{figure:.1e}".replace(".0e", "e")


def base(dtype: torch.dtype) -> float:
    """KernelBench's figure for a dtype, relative and absolute alike."""
    return 1e-2 if dtype in HALF or dtype.itemsize == 1 else 1e-4


def relative_of(dtype: torch.dtype) -> float:
    """What an element of a floating point dtype may be off by for its own size, where nothing is declared."""
    is_narrow = dtype in HALF or dtype.itemsize == 1
    return max(base(dtype), _UNITS * torch.finfo(dtype).eps if is_narrow else 0.0)


def tolerance(
    expected: torch.Tensor,
    wide: torch.Tensor | None,
    nominal_scale: float,
    binary: bool = False,
    declared: tuple[float, float] | None = None,
    error: float = 0.0,
) -> Tolerance:
    """For one expected output. `wide`: the same in fp64, None where there is none. `nominal_scale`: of the output for
    nominal inputs. `binary`: the inputs were {0, 1}. `declared`: relative and absolute, by the problem's author, in
    place of the floor. `error`: of an honest implementation as far as it is known otherwise: `largest_error` against
    the output of inputs that were moved by a rounding error, or what the inputs' own dtypes imply, as of fp8 sums.
    """
    if not expected.is_floating_point() and not expected.is_complex():
        return Tolerance(0.0, 0.0)
    floor = base(expected.dtype) if declared is None else declared[0]
    scale, nominal = output_scale(expected), max(nominal_scale, 1e-30)
    at_nominal = floor * min(1.0, nominal) if declared is None else declared[1]
    absolute = at_nominal * min(max(scale / nominal, _SMALLEST_SHARE), _LARGEST_SHARE)
    if binary and declared is None and wide is not None and is_confirmed_integer(expected, wide):
        return Tolerance(0.0, 0.0, 0.0, exact=True)
    honest = HONEST_FACTOR * max(largest_error(expected, wide), error)
    limit = max(ILL_SHARE[floor > 1e-3] * scale, absolute)
    relative = relative_of(expected.dtype) if declared is None else floor
    return Tolerance(
        relative, absolute, min(honest, limit), is_declared=declared is not None, ill=honest > limit, uncut=honest
    )


def is_usual(found: Tolerance, expected: torch.Tensor, usual: float) -> bool:
    """Whether inputs that are a variation of ours are about as well conditioned as nominal ones, or nothing is to be
    allowed for it. `usual`: what is four times an honest error of nominal inputs, as a share of the outputs' scale.
    """
    is_whole = not expected.is_floating_point() and not expected.is_complex()
    least = 0.0 if is_whole else HONEST_FACTOR * torch.finfo(expected.dtype).eps
    is_narrow = expected.dtype.itemsize < 4
    return found.exact or is_narrow or found.uncut <= _WORSE * max(usual, least) * output_scale(expected)


def eased(found: Tolerance, expected: torch.Tensor, usual: float, moved: float) -> Tolerance:
    """For inputs that are a variation of ours. `moved`: how far an output moves in fp64 with inputs that move by a
    rounding error.

    A sum in one float loses more than one by blocks, as a reference adds: 15 times as much over 8,000 elements. Where
    inputs are as the problem draws them that stays far below the floor. A hundredth of them behind a bias, and then a
    normalisation, has a mean of sixty deviations: the loop's error is above four times the reference's there, and
    above the floor. So an honest error that is more than four times the usual one is no measure of another kernel's.
    Of what is allowed before, such loops needed in 12 draws each up to 3.7 times over 1,024 elements, 9 over 4,096, 11
    over 7,744 and 17 over 16,384.

    Only where it is made inside. Scores of a softmax that are ten times as large, or the sine of a large number, make
    more of any rounding error, the inputs' own as well: four times what those make is what another order of a sum makes
    too, and sixteen times that let pass what rounds to 16 bits.
    """
    if is_usual(found, expected, usual) or found.uncut <= _INSIDE * HONEST_FACTOR * moved:
        return found
    limit = max(ILL_SHARE[False] * output_scale(expected), found.absolute)
    return msgspec.structs.replace(found, honest=min(_EASE * found.uncut, limit))


def output_scale(tensor: torch.Tensor) -> float:
    """Largest finite magnitude, of complex numbers by their parts; 0 for an empty or integer tensor."""
    tensor = as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    tensor = countable(tensor)
    scale = float(torch.stack(torch.aminmax(tensor)).abs().amax())  # the device is waited for once
    if scale < float("inf"):
        return scale
    finite = (part[torch.isfinite(part)] for (part,) in pieces(tensor))
    return max((float(part.abs().max()) for part in finite if part.numel()), default=0.0)


def is_noise(expected: torch.Tensor, wide: torch.Tensor | None) -> bool:
    """Whether most of an output is rounding errors and nothing else, as of a mean of what was normalised: fp64 says
    something else of it throughout. (Where it says so of a few elements, the output jumps there.)
    """
    if wide is None or wide.shape != expected.shape or not expected.is_floating_point() or expected.numel() == 0:
        return False
    step = max(1, expected.numel() // _SAMPLE)
    one, other = (tensor.reshape(-1)[::step].double() for tensor in (expected, wide))
    return bool((one - other).abs().median() > _NOISE_SHARE * one.abs().median() > 0)


def is_confirmed_integer(expected: torch.Tensor, wide: torch.Tensor) -> bool:
    """All integers that any order of summation gives exactly in this dtype, and fp64 says the same."""
    if not expected.is_floating_point() or expected.numel() == 0 or wide.shape != expected.shape:
        return False
    largest = 2.0 / torch.finfo(expected.dtype).eps
    return all(_are_integers(one, other, largest) for one, other in pieces(expected, wide))


def _are_integers(expected: torch.Tensor, wide: torch.Tensor, largest: float) -> bool:
    wide, expected = countable(wide.to(expected.dtype)), countable(expected)
    same = (wide == expected) & (expected == expected.round()) & (expected.abs() <= largest)
    return bool(same.all())


def largest_error(expected: torch.Tensor, other: torch.Tensor | None) -> float:
    """Largest distance of two outputs, of complex numbers by their parts; 0 where they can't be compared."""
    if other is None or other.shape != expected.shape or other.is_complex() != expected.is_complex():
        return 0.0
    expected, other = as_real(expected), as_real(other)
    if not expected.is_floating_point() or expected.numel() == 0:
        return 0.0
    way = fused.of(expected.device)
    if way is not None and (found := way.furthest(expected, other)) is not None:
        return found
    most = 0.0
    for one, two in pieces(expected, other):
        error = (one.double() - two.double()).abs_()
        most = max(most, float(torch.nan_to_num(error, nan=0.0, posinf=0.0).max()))
    return most
