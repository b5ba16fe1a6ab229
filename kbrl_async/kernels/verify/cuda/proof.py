"""Whose kernels ran on the GPU: pure functions of kernel names, sources and times.

A kernel is the candidate's own where its name is one that its source defines; a library's kernel has none of those.
That a name is claimed is no proof that its kernel matters: `CudaStopwatch.prove` leaves own kernels out and looks at
the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.proof import Finding, of_muted
from protocols.records import Fault

_DEFINITIONS = re.compile(r"__global__[^;{}]*?\b(\w+)\s*\(|^\s*def\s+(\w+)\s*\(", re.MULTILINE)
_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|__launch_bounds__\s*\([^()]*\)|__cluster_dims__\s*\([^()]*\)", re.DOTALL)
_LIBRARY = re.compile(
    r"ampere_|volta_|turing_|hopper_|sm\d\d+_|cutlass|cublas|cudnn|cufft|nvjet|magma|gemmk?1?_|gemv2|splitK|"
    r"void at::|_ZN2at|_ZN3c10|Memcpy|Memset|triton_(poi|red|per|tem|for)_"
)
_LENGTH = re.compile(r"\d{1,9}")
"""Of a name in a linker name. Who writes thousands of digits there gets no number for them."""
MIN_SHARE = 0.01
MIN_NS = 20_000.0
"""A share of less time than this says nothing."""


def identifiers(mangled: str) -> set[str]:
    """The plain names inside a kernel's linker name.

    >>> sorted(identifiers("_ZN3foo8add_vecsIfEEvPKT_i"))
    ['add_vecs', 'foo']
    """
    if not mangled.startswith("_Z"):
        plain = re.split(r"[<(]", mangled.replace("(anonymous namespace)::", ""))[0]
        return {plain.rpartition("::")[2].split(" ")[-1]}
    found, place = set(), 2
    while place < len(mangled):
        match = _LENGTH.match(mangled, place)
        if match is None:
            place += 1
            continue
        start, size = match.end(), int(match[0])
        if 0 < size <= len(mangled) - start and re.fullmatch(r"[A-Za-z_]\w*", mangled[start : start + size]):
            found.add(mangled[start : start + size])
            place = start + size
        else:
            place = start
    return found


def defined(source: str) -> set[str]:
    """Names of the functions that a candidate's source defines, as kernels or as Python functions."""
    return {first or second for first, second in _DEFINITIONS.findall(_NOISE.sub(" ", source))}


def own_kernels(names: list[str], source: str) -> list[str]:
    """Those of the kernels that ran which are the candidate's."""
    known = defined(source)
    return [name for name in names if identifiers(name) & known and not _is_library(name)]


def _is_library(name: str) -> bool:
    return any(_LIBRARY.match(part) for part in (name, *identifiers(name)))


def of_share(names: dict[str, int], own: list[str], whole_ns: float, left_ns: float) -> Finding | None:
    """`left_ns`: of a forward without the own kernels. That it is hardly less is one fact, and no accusation."""
    share = own_share(whole_ns, left_ns)
    if whole_ns < MIN_NS or share >= MIN_SHARE:
        return None
    text = f"own kernels take {100 * share:.1f} % of the GPU time: nothing shows that they do the work"
    return Finding("decoy_kernel", text, evidence(names, own, share), Fault.UNPROVEN)


class LeavesOut(Protocol):
    """What is replayed, as far as its own kernels can be left out."""

    def is_whole_without_own(self, slot: int, deadline_s: float) -> bool: ...


def of_other_slots(
    session: LeavesOut,
    slots: Iterable[int],
    deadline_s: float,
    drawn: Callable[[int], list[torch.Tensor]],
    found_without: Callable[[list[torch.Tensor], int], tuple[bool, str]],
) -> Finding | None:
    """Whether own kernels are needed over these slots, too. `drawn` puts new inputs there and says what is expected of
    them; `found_without` whether that came about without own kernels, or in which operator's result it lies.
    """
    for slot in slots:
        expected = drawn(slot)
        if not session.is_whole_without_own(slot, deadline_s):
            return None  # it would be so over each of them, and every time it costs a process
        is_right, answered = found_without(expected, slot)
        if (found := of_muted(wire.Trace(answered=answered), is_right)) is not None:
            return found
    return None


def own_share(whole_ns: float, left_ns: float) -> float:
    return max(0.0, whole_ns - left_ns) / max(whole_ns, 1.0)


def told_share(names: dict[str, int], own: list[str], whole_ns: float, left_ns: float) -> float | None:
    """What a verdict says of it; None where a forward is too short for its parts to be told apart."""
    if len(own) == len(names):
        return 1.0
    return own_share(whole_ns, left_ns) if whole_ns >= MIN_NS else None


def evidence(names: dict[str, int], own: list[str], share: float | None = None) -> str:
    """One line for the verdict."""
    mine = ", ".join(f"{_short(name)} ×{names[name]}" for name in own) or "none"
    others = ", ".join(f"{_short(name)} ×{count}" for name, count in names.items() if name not in own) or "none"
    part = "" if share is None else f", {100 * share:.0f} % of the GPU time"
    return f"own kernels on the GPU: {mine}{part}; library kernels: {others}"


def _short(name: str) -> str:
    words = identifiers(name)
    return max(words, key=len)[:60] if words else name[:60]
