"""Nsight Compute over one run of a model: its command line, and what its table says of each kernel."""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kbrl_async.kernels.profile.facts import KernelFacts

_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_BEHIND = "/opt/nvidia/nsight-compute"
"""The toolkit's `ncu` is a script that looks here for the program."""
FORBIDDEN = "ERR_NVGPUCTRPERM"
"""What it says where users may not read the GPU's counters."""
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "device memory",
    "short_scoreboard": "shared memory",
    "barrier": "a barrier",
    "lg_throttle": "its queue to memory",
    "mio_throttle": "its queue to shared memory",
    "math_pipe_throttle": "an arithmetic unit",
    "wait": "the instruction before",
    "not_selected": "its turn",
}
"""Reasons by Nsight's name."""
_TIME, _BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
_MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
_COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_REGISTERS = "launch__registers_per_thread"
METRICS = (_TIME, _BYTES, _MEMORY, _COMPUTE, _OCCUPANCY, _REGISTERS, *(_STALL.format(name) for name in STALLS))
_UNITS = {"": 1.0, "ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
"""Of times and bytes; older versions write nsecond and so on. Others are what their numbers are."""
_LAUNCHES = 64
"""Kernels looked at: each is run again some ten times."""


Row = Mapping[str | None, str | list[str] | None]


def program() -> str:
    """The path of `ncu`; empty where the host has none."""
    found = shutil.which("ncu")
    return found or next((path for path in _PLACES if os.access(path, os.X_OK)), "")


def folders(path: str) -> list[str]:
    """What the program at `path` reads of itself."""
    own = Path(path).resolve().parent
    return [str(place) for place in (own, *own.parent.glob("nsight-compute*"), Path(_BEHIND)) if place.is_dir()]


def command(path: str, module: str, task_file: str) -> list[str]:
    """Profile what `module` launches after it called `cudaProfilerStart`: one forward of the candidate.

    Clocks stay as they are: Nsight would lock them, also for a bench that times on the same GPU.
    """
    shown = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)]
    what = ["--profile-from-start", "off", "--launch-count", str(_LAUNCHES), "--target-processes", "all"]
    return [path, *shown, *what, "--clock-control", "none", sys.executable, "-m", module, task_file]


def read(output: str) -> tuple[KernelFacts, ...]:
    """Kernels by name, longest first; of several launches the first one's counters. Words around the table are skipped.

    The candidate's process writes to the same output, so numbers that are none are left out, never believed.
    """
    lines = output.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return ()
    found: dict[str, list[KernelFacts]] = {}
    units: Row = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[begin:]))):
        kernel = _kernel(row, units)
        if kernel is None:  # the first line of the table holds units
            units = units or row
        else:
            found.setdefault(kernel.name, []).append(kernel)
    return tuple(sorted(map(_together, found.values()), key=lambda kernel: -kernel.us))


def _kernel(row: Row, units: Row) -> KernelFacts | None:
    name = str(row.get("Kernel Name") or "").removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.split("(")[0][:80]
    ns = _in_base(row, units, _TIME)
    if not name or ns is None:
        return None
    waits = {words: _number(row.get(_STALL.format(key))) for key, words in STALLS.items()}
    ordered = sorted(((words, w) for words, w in waits.items() if w), key=lambda item: -item[1])
    registers = _number(row.get(_REGISTERS))
    return KernelFacts(
        name,
        ns / 1000,
        memory=_share(row.get(_MEMORY)),
        compute=_share(row.get(_COMPUTE)),
        occupancy=_share(row.get(_OCCUPANCY)),
        registers=None if registers is None else int(registers),
        dram_bytes=_in_base(row, units, _BYTES),
        stalls=dict(ordered),
    )


def _together(launches: Sequence[KernelFacts]) -> KernelFacts:
    from msgspec.structs import replace

    return replace(launches[0], us=sum(one.us for one in launches), calls=len(launches))


def _in_base(row: Row, units: Row, metric: str) -> float | None:
    """Nanoseconds or bytes, whatever the table's unit is."""
    number, unit = _number(row.get(metric)), str(units.get(metric) or "").replace("second", "s")
    return None if number is None else number * _UNITS.get(unit, 1.0)


def _share(value: object) -> float | None:
    number = _number(value)
    return None if number is None else number / 100


def _number(value: object) -> float | None:
    try:
        number = float(str(value).replace(",", ""))
    except ValueError:
        return None
    return number if 0 <= number < 1e18 else None
