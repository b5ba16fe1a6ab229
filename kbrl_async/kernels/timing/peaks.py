"""The peaks of this host's devices, each measured once and kept in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kbrl_async.kernels.timing.device import timed_device
from kbrl_async.kernels.timing.roofline import Peaks, better

FILE = "peaks.json"


def peaks(folder: Path, hardware: str, probe: Callable[[str], Peaks | None], *, again: bool = False) -> Peaks | None:
    """The peaks kept in `folder`, or those that `probe` measures now and leaves there; None where it measures none.

    `again`: measure once more and keep the better of both: before an accusation, as the host may have been busy.
    """
    path = folder / FILE
    known = _known(path)
    if hardware in known and not again:
        return known[hardware]
    measured = probe(hardware)
    if measured is None:
        return None
    found = known[hardware] = better(measured, known.get(hardware))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1))
    part.replace(path)
    return found


def peaks_of(device: str, folder: Path, hardware: str, *, again: bool = False) -> Peaks | None:
    """`peaks` of a device by its own probe; None where it has no room for it.

    To be measured while nobody else uses the device: a GPU that several processes computed on gave a hundredth of some.
    """

    def probe(hardware: str) -> Peaks | None:
        found = timed_device(device).peaks(hardware)
        return None if found is None else msgspec.structs.replace(found, made_at=time.time())

    return peaks(folder, hardware, probe, again=again)


def _known(path: Path) -> dict[str, Peaks]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Peaks])
    except (OSError, msgspec.MsgspecError):
        return {}
