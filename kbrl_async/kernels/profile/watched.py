"""One forward of a candidate under a profiler of the GPU, in a confined process: `python -m … TASK.json`.

Under Nsight Compute the forward lies between `cudaProfilerStart` and `cudaProfilerStop`; with `--timeline` torch's own
profiler writes what ran and for how long. What is written here is the candidate's word: it is read as advice only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.kernels.backends.sanitize.parts import SanitizeTask
from kbrl_async.kernels.backends.sanitize.recording import loaded
from kbrl_async.kernels.profile.facts import KernelFacts

TIMELINE_FILE = "timeline.json"
_MOST = 16
_NAME = 80
_INPUTS = "Memcpy HtoD"
"""Inputs and weights on their way to the GPU, which are no part of a forward."""


def main(task_file: str, *, timeline: bool) -> None:
    task = msgspec.json.decode(Path(task_file).read_bytes(), type=SanitizeTask)
    forward = loaded(task)
    forward()  # what is made at the first call is not the kernel's
    if timeline:
        found = _timeline(forward, on_gpu=task.device.startswith("cuda"))
        (Path(task.folder) / TIMELINE_FILE).write_bytes(msgspec.json.encode(found))
    else:
        _between_marks(forward)


def _between_marks(forward: Callable[[], None]) -> None:
    import torch

    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    forward()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _timeline(forward: Callable[[], None], *, on_gpu: bool) -> list[KernelFacts]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        forward()
    events = [event for event in seen.key_averages() if not event.key.startswith(_INPUTS)]
    times = [(e.key[:_NAME], _us(e, on_gpu), e.count) for e in events]
    longest = sorted((item for item in times if item[1] > 0), key=lambda item: -item[1])[:_MOST]
    return [KernelFacts(name, us, count) for name, us, count in longest]


def _us(event: object, on_gpu: bool) -> float:
    return float(getattr(event, "self_device_time_total" if on_gpu else "self_cpu_time_total", 0.0))


if __name__ == "__main__":
    main(sys.argv[1], timeline="--timeline" in sys.argv)
