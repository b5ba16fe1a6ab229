"""What is asked of the driver, and how often."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kbrl_async.kernels.timing.cuda.nvml import NvmlDriver


def test_what_never_changes_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes the driver milliseconds, and two are wanted for every candidate."""
    asked: list[tuple[object, int]] = []

    def clock(gpu: object, kind: int) -> int:
        asked.append((gpu, kind))
        return 1980

    fake = SimpleNamespace(
        NVMLError=ValueError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMaxClockInfo=clock,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    driver = NvmlDriver(3)
    assert [driver.max_sm_mhz() for _ in range(3)] == [1980] * 3
    assert asked == [(3, 1)]
