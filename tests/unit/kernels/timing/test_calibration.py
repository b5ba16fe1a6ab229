"""What our own kernel after each pair tells of the GPU, and which pairs are set aside for it."""

from __future__ import annotations

import pytest

from kbrl_async.errors import HostError, MissingTool
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.timing.cuda.calibration import KERNEL, NAME, WINDOW, KernelRun, Steady, beat_of


def beat(ns: float = 100_000.0, mhz: float = 1980.0, over: float = 30_000.0) -> KernelRun:
    return KernelRun(ns, mhz, ns + over)


def test_cycles_over_nanoseconds_are_the_clock() -> None:
    assert beat_of([(100_000, 150_000), (0, 5)], 1.0).mhz == 1500.0


def test_a_timer_that_stands_still_is_a_fault_of_the_host() -> None:
    with pytest.raises(HostError, match="timer"):
        beat_of([(0, 100)], 1.0)


def test_a_steady_gpu_is_left_alone() -> None:
    steady = Steady(1980)
    assert {steady.fault(beat(100_000 * (1 + wobble))) for wobble in (0, 0.01, -0.01, 0.015)} == {""}


def test_a_pair_after_which_the_gpu_is_over_two_percent_slower_goes() -> None:
    steady = Steady()
    steady.fault(beat())
    assert steady.fault(beat(103_000)) == "drift"


def test_a_gpu_that_settled_at_another_clock_is_believed_again() -> None:
    steady = Steady()
    for _ in range(WINDOW):
        steady.fault(beat())
    found = [steady.fault(beat(110_000)) for _ in range(WINDOW)]
    assert found[0] == "drift"
    assert found[-1] == ""


def test_a_clock_under_three_quarters_of_the_gpus_goes() -> None:
    assert Steady(1980).fault(beat(mhz=1400)) == "slow"
    assert Steady(None).fault(beat(mhz=1400)) == ""


def test_another_process_on_the_gpu_shows_in_the_wait() -> None:
    assert Steady(1980).fault(beat(over=2_000_000.0)) == "shared"


@pytest.mark.skipif(not nvrtc.library_path(), reason="NVRTC is not installed")
def test_the_kernel_compiles_without_a_gpu() -> None:
    try:
        built = nvrtc.compile_source(KERNEL, [NAME], "sm_90")
    except MissingTool as error:
        pytest.skip(str(error))
    assert built.cubin
    assert built.names == {NAME: NAME}
