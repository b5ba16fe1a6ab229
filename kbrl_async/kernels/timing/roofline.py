"""How fast could it be at all: bytes and flops of a reference, the host's peaks, and times that are impossible.

::

    count(model, inputs) ─▶ Work ─┐
    peaks(cache file) ─▶ Peaks ───┴─▶ floor_ms = max(bytes / bandwidth, flops / rate) ─▶ floor / time = fraction
                                  least_ms = the same, errors to the low side      ─▶ time < least: impossible

Invariants
* `least_ms` is never above what an honest kernel can do: bytes count once, at cache speed where they may be cached;
  flops count a quarter, as Winograd and causal masks save that much; peaks are measured again before an accusation,
  while nobody else uses the hardware. Where a trusted reference seems impossible too, the peaks are wrong.
* It holds where the output depends on all inputs: a problem that an audit found degenerate is not judged by it.
* One impossible time is a reason to measure again in a fresh process; two are evidence.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

SLACK = 0.25
"""A time is impossible below 75 % of the floor: peaks are measured too, and clocks may rise."""
SAVED = 4.0
"""Flops that an honest algorithm may save: Winograd's convolutions 2.25–4×, masks 2×."""
RULE = "impossible_time"


class ReferenceWork(msgspec.Struct, frozen=True):
    """Of one call of a reference. `flops` are those that torch counts: matrix products, convolutions, attention."""

    input_bytes: int
    output_bytes: int
    parameter_bytes: int = 0
    flops: int = 0
    half: bool = False
    """Whether the flops are of 16-bit types, which have a peak of their own."""

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.output_bytes + self.parameter_bytes


class Peaks(msgspec.Struct, frozen=True):
    """Of one core (CPU) or one GPU."""

    hardware: str
    memory_gbs: float
    """Bytes read and written, from and to memory."""
    cache_gbs: float
    """The same from and to the last-level cache."""
    cache_bytes: int
    """What may lie in it."""
    fp32_gflops: float
    half_gflops: float = 0.0
    made_at: float = 0.0


# ── pure ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def floor_ms(work: ReferenceWork, peaks: Peaks) -> float:
    """Shortest time in which the work can be done.

    Only what does not fit the last-level cache must come from memory: the outputs of one call may stay there, and
    inputs that were flushed must be read from memory but a bench can't always flush them. So it errs to the low side.
    """
    from_memory = max(0, work.bytes - peaks.cache_bytes)
    cache_gbs = max(peaks.cache_gbs, peaks.memory_gbs)
    moving = (from_memory / peaks.memory_gbs + (work.bytes - from_memory) / cache_gbs) / 1e6
    rate = peaks.half_gflops if work.half and peaks.half_gflops > 0 else peaks.fp32_gflops
    return max(moving, work.flops / rate / 1e6)


def fraction(work: ReferenceWork, peaks: Peaks, ms: float) -> float:
    """Floor over time: 1 is as fast as this hardware can be. Not cut at 1, as a value above tells of a wrong peak."""
    return floor_ms(work, peaks) / ms if ms > 0 else float("inf")


def least_ms(work: ReferenceWork, peaks: Peaks, slack: float = SLACK) -> float:
    """What no honest kernel beats."""
    return (1 - slack) * floor_ms(msgspec.structs.replace(work, flops=int(work.flops / SAVED)), peaks)


def is_impossible(work: ReferenceWork, peaks: Peaks, ms: float, *, call_ms: float = 0.005) -> bool:
    """`call_ms`: what the bench may have subtracted too much; a floor below that proves nothing."""
    return ms + call_ms < least_ms(work, peaks)


def evidence(work: ReferenceWork, peaks: Peaks, times_ms: Sequence[float]) -> str:
    """The sentence for a verdict, if at least two independent measurements are impossible; else empty."""
    if len(times_ms) < 2 or not all(is_impossible(work, peaks, ms) for ms in times_ms):
        return ""
    least = least_ms(work, peaks)
    times = " and ".join(f"{ms:.4f}" for ms in times_ms)
    return (
        f"measured {times} ms, but moving {work.bytes / 1e6:.2f} MB and computing {work.flops / 1e9:.3f} GFLOP takes "
        f"at least {least:.4f} ms here"
    )


def better(a: Peaks, b: Peaks | None) -> Peaks:
    """The higher of each."""
    if b is None:
        return a
    rates = ("memory_gbs", "cache_gbs", "cache_bytes", "fp32_gflops", "half_gflops", "made_at")
    return Peaks(a.hardware, *(max(getattr(a, name), getattr(b, name)) for name in rates))


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages, each once: a broadcast or a view moves no more than what is there."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride != 0 else 1
        key = tensor.data_ptr() if tensor.device.type != "meta" else id(tensor)
        seen[key] = max(seen.get(key, 0), elements * tensor.element_size())
    return sum(seen.values())


def count(model: torch.nn.Module, inputs: Sequence[Any]) -> ReferenceWork:
    """Work of `model(*inputs)`. Runs it once, so only for a trusted reference, in its child or on fake tensors.

    Parameters count once each as they must be read; inputs too, though a reference may ignore some: see `used`.
    """
    from torch.utils.flop_counter import FlopCounterMode

    given = tensors_in(list(inputs))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = tensors_in(model(*inputs))
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in given)
    return ReferenceWork(
        size_of(given), size_of(outputs), size_of(model.parameters()), int(counter.get_total_flops()), half
    )


def count_source(source: str, entry: str = "Model") -> ReferenceWork | None:
    """Work of a problem's reference by shapes alone, without memory or time: fake tensors stand for all.

    Runs the problem's source in this process, so call it where that is trusted or confined. None where its forward
    looks at values, which fake tensors have none of.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    namespace: dict[str, Any] = {"__name__": "problem"}
    exec(compile(source, "problem.py", "exec"), namespace)  # noqa: S102 - a problem is run wherever it is used
    try:
        with FakeTensorMode():
            arguments = list(namespace["get_init_inputs"]())
            named: dict[str, Any] = {}
            if len(arguments) == 2 and isinstance(arguments[0], list | tuple) and isinstance(arguments[1], dict):
                arguments, named = list(arguments[0]), arguments[1]
            model = namespace[entry](*arguments, **named)
            return _count_fake(model, list(namespace["get_inputs"]()))
    except (DataDependentOutputException, NotImplementedError, RuntimeError):
        return None


def count_child(channel: socket.socket, payload: bytes, fds: list[int], isolation: Any) -> None:
    """Entry of a confined child: the work of the source that it is sent; see `verify.floor.counted`."""
    channel.send(msgspec.msgpack.encode(count_source(payload.decode())))


def _count_fake(model: torch.nn.Module, inputs: list[Any]) -> ReferenceWork:
    from torch.utils.flop_counter import FlopCounterMode

    def size(tensors: Iterable[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())

    given = tensors_in(inputs)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = tensors_in(model(*inputs))
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in given)
    return ReferenceWork(size(given), size(outputs), size(model.parameters()), int(counter.get_total_flops()), half)
