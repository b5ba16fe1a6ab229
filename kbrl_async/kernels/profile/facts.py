"""What is known of a kernel's speed, and as a text for a prompt: the time, what bounds it, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kbrl_async.kernels.profile import counters
from kbrl_async.kernels.timing.roofline import Peaks, ReferenceWork, floor_ms
from protocols.records import Timing

CHARACTERS = 1200
"""Of `Profile.text`, so that a prompt has room for it."""
_LOOPS, _KERNELS, _STALLS = 8, 5, 3
_NEAR = 0.7
"""Of the roofline: a kernel that reaches it has little left to win."""


class KernelFacts(msgspec.Struct, frozen=True):
    """One kernel on a GPU, as a profiler saw it. Shares are 0 … 1; None: it did not say."""

    name: str
    us: float
    calls: int = 1
    memory: float | None = None
    """Share of the memory's peak that was reached."""
    compute: float | None = None
    """The same of the multiprocessors'."""
    occupancy: float | None = None
    """Warps that were active, of those that fit."""
    registers: int | None = None
    """For each thread."""
    dram_bytes: float | None = None
    stalls: dict[str, float] = msgspec.field(default_factory=dict)
    """Cycles that a warp waits for each instruction, by reason, longest first."""

    def text(self) -> str:
        shares = (("memory", self.memory), ("arithmetic", self.compute), ("occupancy", self.occupancy))
        parts = [f"{name} {share:.0%}" for name, share in shares if share is not None]
        parts += [f"{self.dram_bytes / 1e6:.3g} MB of device memory"] if self.dram_bytes is not None else []
        parts += [f"{self.registers} registers a thread"] if self.registers is not None else []
        waits = [f"{name} {cycles:.1f}" for name, cycles in list(self.stalls.items())[:_STALLS]]
        parts += [f"waits (cycles an instruction): {', '.join(waits)}"] if waits else []
        times = f" ×{self.calls}" if self.calls > 1 else ""
        return f"{self.name}{times}: {self.us:.1f} µs" + (f"; {'; '.join(parts)}" if parts else "")


class Roofline(msgspec.Struct, frozen=True):
    """The work of one call of the reference, and what this device does of it at most."""

    bytes: int
    """Inputs, outputs and weights, each once."""
    flops: int
    """Of products, convolutions and attention; other arithmetic is not counted."""
    floor_ms: float
    bound: str
    """`"memory"` or `"arithmetic"`: which of both takes longer at its peak."""
    peak_gbs: float
    """Of memory, or of the cache where all fits into it."""
    peak_gflops: float

    @classmethod
    def of(cls, work: ReferenceWork, peaks: Peaks) -> Roofline:
        rate = peaks.half_gflops if work.half and peaks.half_gflops else peaks.fp32_gflops
        floor = floor_ms(work, peaks)
        bound = "arithmetic" if work.flops / rate / 1e6 >= floor else "memory"
        fits = work.bytes <= peaks.cache_bytes
        peak_gbs = max(peaks.cache_gbs, peaks.memory_gbs) if fits else peaks.memory_gbs
        return cls(work.bytes, work.flops, floor, bound, peak_gbs, rate)

    def text(self, ms: float) -> str:
        moved = f"{self.bytes / 1e6:.3g} MB at {self.bytes / ms / 1e6:.3g} of {self.peak_gbs:.3g} GB/s"
        done = f", {self.flops / 1e9:.3g} GFLOP at {self.flops / ms / 1e6:.3g} of {self.peak_gflops:.3g} GFLOP/s"
        return f"{moved}{done if self.flops else ''}; bound by {self.bound}, at best {self.floor_ms:.3g} ms here"


class Profile(msgspec.Struct, frozen=True):
    """What limits one correct kernel. Advice: a reward rests on none of it."""

    timing: Timing
    device: str = "cpu"
    roofline: Roofline | None = None
    where: str = ""
    """Own kernels and library operators with their times, in one line."""
    counts: dict[str, float] = msgspec.field(default_factory=dict)
    """Of one call, see `counters`."""
    remarks: tuple[str, ...] = ()
    """The compiler's, a loop each."""
    kernels: tuple[KernelFacts, ...] = ()
    missing: tuple[str, ...] = ()
    """What could not be had here, and why."""

    @property
    def share(self) -> float | None:
        """Of the roofline: 1 is as fast as this hardware can be."""
        return self.timing.roofline if self.roofline is None else self.roofline.floor_ms / self.timing.candidate_ms

    def text(self) -> str:
        """At most `CHARACTERS`, the most telling first; whole lines only."""
        lines: list[str] = []
        room = CHARACTERS
        for line in self._lines():
            if len(line) + 1 <= room:
                lines.append(line)
                room -= len(line) + 1
        return "\n".join(lines)

    def _lines(self) -> Iterator[str]:
        timing, share = self.timing, self.share
        roof = "" if share is None else f", {share:.0%} of the roofline"
        yield f"time: {timing.candidate_ms:.4g} ms, PyTorch {timing.reference_ms:.4g} ms{roof}"
        if self.roofline is not None:
            yield f"roofline: {self.roofline.text(timing.candidate_ms)}"
        if share is not None and share >= _NEAR:
            yield "near the roofline: little is left to win"
        for kernel in self.kernels[:_KERNELS]:
            yield f"kernel {kernel.text()}"
        if self.where:
            yield f"where (with warm caches): {self.where}"
        if counted := counters.text(self.counts):
            yield f"one call: {counted}"
        for remark in self.remarks[:_LOOPS]:
            yield f"loop in {remark}"
        for why in self.missing:
            yield f"not known: {why}"
