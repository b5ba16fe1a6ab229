"""Who is asked again about a verdict that an earlier candidate may have made."""

from __future__ import annotations

from collections.abc import Callable

from kbrl_async.kernels.stages import span
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.device import Device
from protocols.records import Fault, Timing, Verdict


def settled(
    judged: Callable[[bool], tuple[Checker, Verdict, Timing | None]],
    is_repeated: Callable[[bool, bool], bool],
    device: Device,
    alone_share: float,
    draw: Callable[[], float],
) -> tuple[Verdict, Timing | None]:
    """What may be the work of an earlier candidate is found out once more: by a second process, which writes down the
    same or comes to the same verdict, or does not; and by one that has served nobody else where it does not, and in
    its place for `alone_share`.

    `judged(is_alone)` judges by a process that has served others or none; `is_repeated(is_right, is_alone)` says
    whether another one writes down the same.
    """
    checker, verdict, timed = judged(False)
    is_right = verdict.fault is Fault.OK
    is_in_doubt = checker.is_in_doubt(verdict.fault)
    is_sampled = draw() < alone_share
    if not is_in_doubt and not (checker.is_shared and is_sampled):
        return verdict, timed
    if alone_share < 1 or not is_in_doubt:
        with span("repeated"):
            if is_repeated(is_right, is_sampled):
                return verdict, timed
        if is_in_doubt and not is_sampled:
            with span("judged by a second"), device.elsewhere():
                _, again, timed_again = judged(False)
            if again.fault is verdict.fault:
                return again, timed_again
    with span("judged alone"):
        _, alone, timed = judged(True)
    if (alone.fault is Fault.OK) != is_right or not is_in_doubt:
        device.contradict(is_right and alone.fault is Fault.OK)
    return alone, timed
