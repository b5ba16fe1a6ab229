"""Both sides of a timing on a GPU find their memory alike, also where there is little of it. No GPU is asked here."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.verify import wire
from kbrl_async.kernels.verify.cuda.runner import CudaRunner
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.cuda.sides import Sides
from kbrl_async.kernels.verify.cuda.stopwatch import CudaStopwatch
from kbrl_async.kernels.verify.hoarding import NoMemory

SHORT = "OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB."


class Reference(CudaSession):
    """One that draws into its slot, and no process."""

    def __init__(self) -> None:
        self.sent: list[wire.Order] = []
        self.shared, self._metas, self.uses = Mock(), [[]], 0
        self._child = Mock()

    def thaw(self) -> None:
        pass

    def _send(self, data: bytes, *fds: int) -> None:
        self.sent.append(wire.decode_order(data))

    def _expect(self, kind: Any, deadline_s: float) -> Any:
        return wire.Drawn(["L", []], [], 0) if kind is wire.Drawn else wire.Ready()


def stopwatch(refused: str, reference: Reference) -> Any:
    made = cast(Any, CudaStopwatch.__new__(CudaStopwatch))
    made._sides = cast(Any, Sides.__new__(Sides))
    made._sides.reference, made._sides.candidate, made._sides.refused = reference, Mock(), refused
    made._sides.candidate.event.return_value.empty_ns = made._sides.candidate.replay.return_value.empty_ns = 1.0
    made._sides.candidate.is_trusted = False
    made._sides.plan, made._sides.batch, made._sides.limit_s = Mock(slots=1), 1, 1.0
    made._sides.fill = lambda slots: None
    for timed in ("event", "replay"):
        setattr(reference, timed, lambda *given: Mock(empty_ns=1.0))
    made._ballast = []
    return made


@pytest.mark.parametrize(("refused", "is_kept"), [("it can't be captured", True), ("", False)])
def test_a_reference_that_draws_between_timed_calls_keeps_the_memory_of_its_outputs(
    monkeypatch: pytest.MonkeyPatch, refused: str, is_kept: bool
) -> None:
    """Else it asks the driver for 6 GiB while its clock runs, and whoever draws nothing seems 1.6 times as fast."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    reference = Reference()
    timing = stopwatch(refused, reference)
    timing._warm_up()
    reference.lent(1, 1.0)
    timing.close()
    reference.lent(1, 1.0)
    kept = [order.keeps_freed for order in reference.sent if isinstance(order, wire.Export)]
    assert kept == [is_kept, False], "what is not timed leaves its memory to others"


@pytest.mark.parametrize("keeps_freed", [True, False])
def test_a_process_keeps_what_it_freed_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, keeps_freed: bool) -> None:
    given_back = Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", given_back)
    runner = cast(Any, CudaRunner.__new__(CudaRunner))
    runner._shared, runner._pending, runner._driver, runner.channel = Mock(), [], Mock(), Mock()
    runner._order(wire.Export(0, keeps_freed), [])
    assert given_back.called is not keeps_freed


class Side:
    is_proven = is_trusted = False

    def __init__(self, *refused: str) -> None:
        self._refused, self.asked = list(refused), list[int]()

    def capture(self, count: int, deadline_s: float) -> wire.Captured:
        return wire.Captured(0, refused=self._refused.pop(0) if len(self._refused) > 1 else self._refused[0])

    def call(self, op: int, slot: int, deadline_s: float) -> None:
        self.asked.append(op)


@pytest.mark.parametrize("is_reference", [True, False])
def test_a_graph_that_found_no_memory_is_made_once_more_without_what_is_kept(is_reference: bool) -> None:
    sides = cast(Any, Sides.__new__(Sides))
    first, second = Side(SHORT, ""), Side("")
    sides.reference, sides.candidate = (first, second) if is_reference else (second, first)
    sides.batch, sides.limit_s, sides._replays_rightly = 1, 1.0, lambda: True
    assert sides.capture().refused == sides.refused == ""
    assert first.asked == second.asked == [wire.OP_FREE]


def test_what_can_t_be_captured_is_not_tried_twice() -> None:
    sides = cast(Any, Sides.__new__(Sides))
    sides.reference, sides.candidate = Side(""), Side("operation not permitted when stream is capturing")
    sides.batch, sides.limit_s = 1, 1.0
    assert sides.capture().refused
    assert sides.reference.asked == []


@pytest.mark.parametrize(("refused", "kind"), [(SHORT, NoMemory), ("it draws random numbers", InfraError)])
def test_what_is_replayed_is_never_timed_by_events(refused: str, kind: type[Exception]) -> None:
    """A player can't, and a bench ended by that where others had taken the memory of its reference's graph."""
    sides = cast(Any, Sides.__new__(Sides))
    sides.reference, sides.candidate = Side(refused), Side("")
    sides.candidate.is_trusted, sides.batch, sides.limit_s = True, 1, 1.0
    with pytest.raises(kind) as raised:
        sides.capture()
    assert raised.type is kind


def test_another_graph_that_finds_no_memory_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to act by phase."""
    timing = stopwatch("", Reference())
    timing._rng, timing._options, timing._checker = Mock(randint=lambda *given: 0), Mock(device="cpu"), Mock()
    timing._moved, timing._kernels = timing._sides.reference, {"own": 1}
    timing._sides.candidate.capture.return_value = wire.Captured(0, refused=SHORT)
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.stopwatch.DeviceArena", Mock())
    with pytest.raises(NoMemory):
        timing._move()
