"""What can't be faster: floors, impossible times, and the counting behind them."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import pytest
import torch

from kbrl_async.errors import ConfigError, UserError
from kbrl_async.kernels.timing import device
from kbrl_async.kernels.timing.baselines import wrapper
from kbrl_async.kernels.timing.cpu.device import TimedCpu
from kbrl_async.kernels.timing.cpu.host import llc_bytes
from kbrl_async.kernels.timing.device import TimedDevice, hardware_of, timed_device
from kbrl_async.kernels.timing.methods import Method
from kbrl_async.kernels.timing.peaks import peaks, peaks_of
from kbrl_async.kernels.timing.roofline import (
    Peaks,
    ReferenceWork,
    better,
    count,
    count_source,
    evidence,
    floor_ms,
    fraction,
    is_impossible,
    size_of,
)

CHIP = Peaks("chip", memory_gbs=100.0, cache_gbs=1000.0, cache_bytes=1_000_000, fp32_gflops=1000.0, half_gflops=8000.0)
COPY = ReferenceWork(50_000_000, 51_000_000)
MATMUL = ReferenceWork(1000, 1000, flops=2_000_000_000)
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(n, 10)

    def forward(self, x):
        return CODE

def get_inputs():
    return [torch.rand(40, 20)]

def get_init_inputs():
    return [20]
"""


def test_what_does_not_fit_the_cache_moves_at_memory_speed() -> None:
    assert floor_ms(COPY, CHIP) == pytest.approx(1.0 + 0.001)
    assert floor_ms(ReferenceWork(500_000, 500_000), CHIP) == pytest.approx(0.001)


def test_flops_bound_what_bytes_do_not() -> None:
    assert floor_ms(MATMUL, CHIP) == pytest.approx(2.0)
    assert floor_ms(ReferenceWork(1000, 1000, flops=2_000_000_000, half=True), CHIP) == pytest.approx(0.25)


def test_the_fraction_of_the_roofline_is_floor_over_time() -> None:
    assert fraction(MATMUL, CHIP, 4.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("work", "ms", "impossible"), [(COPY, 0.7, True), (COPY, 0.8, False), (MATMUL, 0.5, False)])
def test_faster_than_bytes_can_move_is_impossible_and_fewer_flops_are_not(
    work: ReferenceWork, ms: float, impossible: bool
) -> None:
    assert is_impossible(work, CHIP, ms) is impossible


def test_a_floor_that_no_clock_resolves_proves_nothing() -> None:
    assert not is_impossible(ReferenceWork(400, 400), CHIP, 0.0)


def test_one_impossible_time_is_no_evidence_and_two_are() -> None:
    assert evidence(COPY, CHIP, [0.1]) == ""
    assert evidence(COPY, CHIP, [0.1, 0.9]) == ""
    assert "at least 0.75" in evidence(COPY, CHIP, [0.1, 0.2])


def test_work_is_counted_from_a_running_model() -> None:
    work = count(torch.nn.Linear(20, 10), [torch.rand(40, 20)])
    assert work == ReferenceWork(40 * 20 * 4, 40 * 10 * 4, (20 * 10 + 10) * 4, 2 * 40 * 20 * 10)


def test_work_is_counted_by_shapes_alone() -> None:
    source = PROBLEM.replace("CODE", "self.linear(x)")
    assert count_source(source) == ReferenceWork(40 * 20 * 4, 40 * 10 * 4, (20 * 10 + 10) * 4, 2 * 40 * 20 * 10)


def test_a_reference_that_looks_at_values_has_no_count() -> None:
    assert count_source(PROBLEM.replace("CODE", "x if x.sum().item() > 0 else -x")) is None


def test_a_broadcast_moves_what_is_there_once() -> None:
    row = torch.rand(1, 8)
    assert size_of([row.expand(100, 8), row]) == 32


def test_peaks_are_measured_once_and_kept(tmp_path: Path) -> None:
    calls: list[str] = []

    def probe(hardware: str) -> Peaks:
        calls.append(hardware)
        return CHIP

    assert peaks(tmp_path / "cache", "chip", probe) == peaks(tmp_path / "cache", "chip", probe) == CHIP
    assert calls == ["chip"]


def test_before_an_accusation_they_are_measured_again_and_the_better_counts(tmp_path: Path) -> None:
    busy = Peaks("chip", 10.0, 2000.0, 1_000_000, 500.0)
    peaks(tmp_path, "chip", lambda _: busy)
    found = peaks(tmp_path, "chip", lambda _: CHIP, again=True)
    assert (found.memory_gbs, found.cache_gbs, found.fp32_gflops) == (100.0, 2000.0, 1000.0)
    assert better(CHIP, None) is CHIP


def test_a_cache_is_never_slower_than_memory() -> None:
    """A GPU that somebody else used gave 45 GB/s for its L2, and 3,465 for its memory: fast kernels were accused."""
    disturbed = Peaks("H200", memory_gbs=3465.0, cache_gbs=45.0, cache_bytes=60 << 20, fp32_gflops=5e4)
    softmax = ReferenceWork(128 << 20, 128 << 20)
    assert not is_impossible(softmax, disturbed, 0.0802)
    assert is_impossible(softmax, disturbed, 0.04)


def test_measured_peaks_are_kept_with_those_from_before(tmp_path: Path) -> None:
    peaks(tmp_path, "chip", lambda _: Peaks("chip", 1e9, 0.0, 1, 0.0))
    found = peaks_of("cpu", tmp_path, "chip", again=True)
    assert found is not None
    assert (found.memory_gbs, found.fp32_gflops > 0) == (1e9, True)
    assert peaks(tmp_path, "chip", lambda _: CHIP) == found


def test_a_device_without_room_has_no_peaks_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(TimedDevice, "copy_gbs", full)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    assert peaks_of("cuda:1", tmp_path, "chip", again=True) is None


def test_this_core_has_peaks() -> None:
    assert llc_bytes() >= 1 << 16
    found = TimedCpu("cpu").peaks("here", cache_bytes=1 << 20, budget_s=0.01)
    assert min(found.memory_gbs, found.cache_gbs, found.fp32_gflops) > 0.1


class Abacus(TimedDevice):
    """A third kind of device: a module in a folder of its own, and a line in the table."""

    def hardware(self) -> str:
        return f"abacus of {self.name.partition(':')[2]} rods"

    def peaks(self, hardware: str, budget_s: float = 0.0) -> Peaks:
        return Peaks(hardware, 1e-9, 1e-9, 1, 1e-9)

    def methods(self) -> dict[str, Method]:
        return {"by hand": lambda function, budget_s: 1e6}

    def library_runner(self, library: str) -> str:
        return f"Rods({library!r})"


def test_a_third_kind_of_device_is_a_third_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "KINDS", {"abacus": f"{__name__}:Abacus"})
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(Abacus=Abacus))
    found = peaks_of("abacus:13", tmp_path, hardware_of("abacus:13"))
    assert found is not None
    assert (found.hardware, found.memory_gbs) == ("abacus of 13 rods", 1e-9)
    assert "_aoti.Rods('p.so')" in wrapper("", "p.so", device="abacus:13")
    with pytest.raises(ConfigError, match="clocks=lock"):
        timed_device("abacus:13").held_clocks("lock", tmp_path)
    with pytest.raises(UserError, match="is no device"):
        timed_device("cuda:0")
