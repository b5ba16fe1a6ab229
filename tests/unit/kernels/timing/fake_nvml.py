"""A GPU in a file: what one process locks another one sees, also after the first was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kbrl_async.errors import HostError

FACTORY = "tests.unit.kernels.timing.fake_nvml:FileGpu"


def state() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return found


class FileGpu:
    """`sustained`: what it holds under load; `right`: whether we may lock; `calls`: every change that was asked for."""

    def __init__(self, index: int) -> None:
        self._path = Path(os.environ["FAKE_NVML"])
        self.index = index

    def _change(self, call: str, locked: int | None) -> None:
        now = state()
        if not now["right"]:
            raise HostError("this user may not lock the GPU's clocks: Insufficient Permissions", "Set observe")
        now.update(locked=locked, calls=[*now["calls"], call])
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(now))
        part.replace(self._path)

    def name(self) -> str:
        return "Fake GPU"

    def uuid(self) -> str:
        return "GPU-0"

    def sm_mhz(self) -> int:
        now = state()
        return min(now["sustained"], now["locked"] or now["boost"]) if now["locked"] else int(now["free_runs"])

    def max_sm_mhz(self) -> int:
        return int(state()["boost"])

    def supported_sm_mhz(self) -> list[int]:
        return [1980, 1965, 1755, 1500, 1200, 345]

    def throttle_bits(self) -> int:
        return int(state()["bits"])

    def other_pids(self) -> list[int]:
        return []

    def memory_of(self, pid: int) -> int | None:
        return None

    def lock(self, mhz: int) -> None:
        self._change(f"lock {mhz}", mhz)

    def unlock(self) -> None:
        self._change("unlock", None)
