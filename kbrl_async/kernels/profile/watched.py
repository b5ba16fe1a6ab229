"""One forward of a candidate under a profiler of the GPU, in a confined process: `python -m … TASK.json`.

Under Nsight Compute the forward lies between `cudaProfilerStart` and `cudaProfilerStop`; with `--timeline` torch's own
profiler writes what ran and for how long. What is written here is the candidate's word: it is read as advice only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kbrl_async.kernels.backends.sanitize.parts import Task
from kbrl_async.kernels.backends.sanitize.recording import run_once
from kbrl_async.kernels.profile.facts import KernelFacts

TIMELINE_FILE = "timeline.json"
_MOST = 16
_NAME = 80


def main(task_file: str, *, timeline: bool) -> None:
    task = msgspec.json.decode(Path(task_file).read_bytes(), type=Task)
    run_once(task)  # what is made at the first call is not the kernel's
    if timeline:
        (Path(task.folder) / TIMELINE_FILE).write_bytes(msgspec.json.encode(_timeline(task)))
    else:
        _between_marks(task)


def _between_marks(task: Task) -> None:
    import torch

    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    run_once(task)
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _timeline(task: Task) -> list[KernelFacts]:
    from torch.profiler import ProfilerActivity, profile

    on_gpu = task.device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        run_once(task)
    times = [(e.key[:_NAME], _us(e, on_gpu), e.count) for e in seen.key_averages()]
    longest = sorted((item for item in times if item[1] > 0), key=lambda item: -item[1])[:_MOST]
    return [KernelFacts(name, us, count) for name, us, count in longest]


def _us(event: object, on_gpu: bool) -> float:
    return float(getattr(event, "self_device_time_total" if on_gpu else "self_cpu_time_total", 0.0))


if __name__ == "__main__":
    main(sys.argv[1], timeline="--timeline" in sys.argv)
