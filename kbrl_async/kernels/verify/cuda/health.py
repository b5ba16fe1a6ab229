"""Is the GPU still good after a candidate has died on it: its process must be gone, and a small kernel right."""

from __future__ import annotations

import contextlib
import time

import torch

from kbrl_async.errors import HostError, InfraError, MissingTool
from kbrl_async.kernels.timing.cuda.calibration import Calibration
from kbrl_async.kernels.timing.cuda.nvml import DRIVER, Nvml, opened

_BACK_S = 30.0
"""Until a killed process has given its memory back: beside nine others on one GPU it took one more than five."""
_CURE = "Take it out of service: look for Xid errors in `dmesg`, reset it, then restart the bench"


class GpuHealth:
    """`enter` before a candidate, `check` after a fault of it. Once bad it stays so: nothing more is judged here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bad = ""
        self.nvml = _nvml(device)
        self.calibration = _calibration(device)
        self._numbers = torch.arange(1 << 16, device=device, dtype=torch.int64)

    def enter(self) -> None:
        """The calling thread uses this GPU from now on. Raises `InfraError` in quarantine."""
        torch.cuda.set_device(self._device)
        if self._bad:
            raise InfraError(f"GPU {self._name} is in quarantine: {self._bad}", _CURE)

    def free(self) -> int:
        """Bytes of the GPU that nobody holds; we keep nothing for later."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def check(self, pid: int) -> None:
        """After candidate `pid` was killed. Raises `InfraError`, and puts the GPU in quarantine, where it does not
        recover.
        """
        try:
            gone = self._wait_for_end(pid)
            if not self.canary():
                self._bad = "a canary kernel gave a wrong result"
            elif not gone:
                self._bad = f"a dead process still holds its memory after {_BACK_S:.0f} s"
        except RuntimeError as error:
            self._bad = f"{error}".splitlines()[0][:200]
        if self._bad:
            raise InfraError(f"GPU {self._name} is in quarantine: {self._bad}", _CURE)

    def _wait_for_end(self, pid: int) -> bool:
        """Until NVML lists the process no more; True at once where there is no NVML to ask."""
        end = time.monotonic() + _BACK_S
        while self.nvml is not None and pid in self.nvml.other_pids():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def canary(self) -> bool:
        count = self._numbers.numel()
        return int((self._numbers * 3 + 1).sum()) == 3 * count * (count - 1) // 2 + count

    @property
    def _name(self) -> str:
        return f"{self._device} ({torch.cuda.get_device_name(self._device)})"


def _calibration(device: torch.device) -> Calibration | None:
    with contextlib.suppress(MissingTool):
        return Calibration(device)
    return None


def _nvml(device: torch.device) -> Nvml | None:
    """None where NVML, or the GPU under the driver's own number, can't be found."""
    wanted = str(torch.cuda.get_device_properties(device).uuid)
    try:
        for index in range(64):
            found = opened(DRIVER, index)
            if wanted in found.uuid():
                return found
    except HostError:
        return None
    return None
