"""A GPU that has no memory left: who lacks it gives back, waits, and judges the candidate once more."""

from __future__ import annotations

import contextlib
import random
import re
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify import bench as module
from kbrl_async.kernels.verify.bench import Bench
from kbrl_async.kernels.verify.checks import Checker
from kbrl_async.kernels.verify.cuda.device import CudaDevice
from kbrl_async.kernels.verify.cuda.replay import candidates
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays
from kbrl_async.kernels.verify.cuda.replay.host import ShortOfMemory, Unreplayable
from kbrl_async.kernels.verify.cuda.telling import device_failure
from kbrl_async.kernels.verify.device import Device
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.known import Offloaded
from kbrl_async.kernels.verify.options import bench_options, no_tick
from kbrl_async.kernels.verify.recording import NO_ROOM, Recording
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import OBSERVED, REPLAYED, Candidate, Fault, Problem, Verdict

PROBLEM = Problem("L1/01_add", 1, "add", "")


SHORT = NoMemory("no memory on cuda:0")


class _Shared(Device):
    has_neighbours = is_crowded = True


class _Idle(Device):
    """Others are there, and have nothing of it."""

    has_neighbours = True


class _Alone(Device):
    has_neighbours = False


def bench_on(device: Device) -> tuple[Bench, Mock]:
    """And its references."""
    zygote = cast(Any, SimpleNamespace(start=lambda: None, generation=1))
    bench = Bench(zygote, bench_options(sections.TimingBench(), "cpu"), device=device)
    bench.references = references = Mock()
    return bench, references


def judged_with(both: tuple[bool, bool], device: type[Device] = _Shared) -> int:
    """How often a candidate that is wrong is judged where it, or its reference, was short of memory."""
    bench, references = bench_on(device("a GPU"))
    reference = Mock(reference_s=0.0, sets=[], session=Mock(is_short=both[1]))
    references.get.return_value.cases = [Mock(reference=reference)]
    asked: list[Checker] = []

    def is_wrong(checker: Checker, *given: Any) -> None:
        asked.append(checker)
        checker.session = Mock(is_short=both[0], trust=OBSERVED)
        raise CandidateFault(Fault.INCORRECT, "two of many values are wrong")

    told = patch.object(module, "verdict_of", side_effect=lambda checker: Verdict(checker.fault.kind))
    with patch.object(Checker, "start", is_wrong), told:
        assert bench.evaluate(PROBLEM, Candidate("", "c"), {}).verdict.fault is Fault.INCORRECT
    return len(asked)


def test_what_is_wrong_where_a_library_was_short_of_memory_is_judged_once_more() -> None:
    """Of a transposed convolution two of 272,646,144 values were wrong, of which none was beside fewer verifiers."""
    assert [judged_with(both) for both in ((False, False), (True, False), (False, True))] == [1, 2, 2]
    assert judged_with((True, True), _Alone) == 1
    assert judged_with((True, True), _Idle) == 1, "it can ask for what no GPU has, and be judged twice for that"


def judged(first: list[Exception | Verdict], device: type[Device] = _Shared) -> tuple[Verdict, Mock]:
    """The verdict where these come before a good one, and what was asked of the references."""
    bench, references = bench_on(device("a GPU"))
    references.get.return_value.cases = [Mock()]
    found = [one if isinstance(one, Exception) else (one, None) for one in (*first, Verdict(Fault.OK))]
    with patch.object(module, "settled", side_effect=found):
        return bench.evaluate(PROBLEM, Candidate("", "c"), {}).verdict, references


def test_whoever_lacks_memory_gives_way_and_tries_again() -> None:
    verdict, references = judged([SHORT] * 2)
    assert verdict.fault is Fault.OK
    assert [way.kwargs["is_last"] for way in references.give_way.call_args_list] == [False, True]
    assert references.get.call_count == 3, "the reference is made anew"


def test_a_candidate_beside_others_that_finds_no_memory_is_judged_once_more() -> None:
    out = Verdict(Fault.OUT_OF_MEMORY)
    verdict, references = judged([out])
    assert (verdict.fault, references.give_way.call_count) == (Fault.OK, 1)
    verdict, references = judged([out, out])
    assert (verdict.fault, references.give_way.call_count) == (Fault.OUT_OF_MEMORY, 1)
    assert judged([out], _Alone)[0].fault is Fault.OUT_OF_MEMORY


def test_who_was_right_before_it_found_no_memory_waits_for_all_of_it_once() -> None:
    """Its ten sets had passed when its proof wanted 4 GiB more, of which the other verifier had left 3.65."""
    out = Verdict(Fault.OUT_OF_MEMORY, passed=10, total=10)
    verdict, references = judged([out, out])
    assert verdict.fault is Fault.OK
    assert [way.kwargs["is_last"] for way in references.give_way.call_args_list] == [False, True]
    assert judged([out] * 3)[0].fault is Fault.OUT_OF_MEMORY, "it asks for more than there is"
    assert judged([Verdict(Fault.OUT_OF_MEMORY, passed=9, total=10)] * 2)[0].fault is Fault.OUT_OF_MEMORY


def test_what_is_wrong_beside_others_for_want_of_memory_is_judged_once_more() -> None:
    """A transposed convolution that found too little memory was six times its tolerance off."""
    wrong = Verdict(Fault.INCORRECT, trust=OBSERVED, trust_reason="its inputs take too much memory to be held twice")
    assert judged([wrong])[0].fault is Fault.OK
    assert judged([wrong, wrong])[0].fault is Fault.INCORRECT
    assert judged([wrong], _Alone)[0].fault is Fault.INCORRECT
    for other in (Verdict(Fault.INCORRECT, trust=REPLAYED), Verdict(Fault.INCORRECT, trust_reason="it draws numbers")):
        assert judged([other])[0].fault is Fault.INCORRECT, "nobody's memory is to blame"


def test_a_convolution_without_any_way_has_found_no_memory() -> None:
    """A copy of what the library had computed was accepted: without its own kernel the convolution had failed."""
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert device_failure(error).kind == "out_of_memory"
    assert device_failure(RuntimeError("expected a tensor of 3 dimensions")).kind == "runtime_error"


def test_the_last_time_a_verifier_waits_for_the_whole_gpu() -> None:
    """Not for ever: an idle one gives nothing back, and whoever waits keeps all others from planning with more."""
    device, asked = CudaDevice("cuda:0"), list[tuple[int, float]]()

    def wait(size: int, tick: object, limit_s: float) -> None:
        asked.append((size, limit_s))
        raise InfraError("the others still hold too much", "End them")

    known = SimpleNamespace(total=80 << 30, others=[Mock()], hold=lambda size: None, wait_for=wait)
    device.reservations = cast(Any, known)
    with patch.object(device, "give_back"):
        device.give_way(no_tick)
        device.give_way(no_tick, is_last=True)
    assert asked == [(75 << 30, 10.0), (80 << 30, 60.0)]


def test_a_reference_that_finds_no_memory_while_it_is_used_waits_for_that_of_others() -> None:
    short = CandidateFault(Fault.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 6.00 GiB")
    verdict, references = judged([short, short])
    assert (verdict.fault, references.give_way.call_count, references.drop.call_count) == (Fault.OK, 2, 2)
    with pytest.raises(NoMemory, match="the reference of L1/01_add failed while it was used: CUDA out of memory"):
        judged([short] * 3)
    for fault, device in ((short, _Alone), (CandidateFault(Fault.RUNTIME_ERROR, "a shape"), _Shared)):
        with pytest.raises(InfraError) as told:
            judged([fault], device)
        assert not isinstance(told.value, NoMemory), "nobody else has it"


def test_nobody_records_a_hoarder_again_on_a_reference_that_is_gone() -> None:
    """Its inputs lay in memory that was given back when the hoarder was ended."""
    device = Mock(spec=Device, has_neighbours=False, verifiers=1)
    device.free.return_value, device.held.return_value = 0, 80 << 30
    device.fitted.side_effect = lambda options: options
    bench, references = bench_on(device)
    reference = Mock(device_bytes=1 << 29, far_bytes=1 << 29, inside=0, reference_s=0.0, sets=[])
    references.get.return_value.cases = [Mock(reference=reference)]

    def lacks_memory(checker: Checker, *given: Any) -> None:
        checker.session, checker.is_shared = Mock(), True
        raise RuntimeError("CUDA out of memory")

    told = patch.object(module, "verdict_of", side_effect=lambda checker: Verdict(checker.fault.kind))
    with patch.object(Checker, "start", lacks_memory), told:
        verdict = bench.evaluate(PROBLEM, Candidate("", "c"), {}).verdict
        assert verdict.fault is Fault.OUT_OF_MEMORY
        references.drop.assert_called_once_with(reference)
        device.is_repeated.assert_not_called()
        reference.inside = 60 << 30  # an attention of 16,384 rows takes as much in the reference, too
        with pytest.raises(NoMemory):
            bench.evaluate(PROBLEM, Candidate("", "c"), {})


def test_it_is_told_in_the_end() -> None:
    with pytest.raises(NoMemory, match="no memory"):
        judged([SHORT] * 3)


def replays(monkeypatch: pytest.MonkeyPatch, may_grow: bool) -> tuple[Replays, list[int]]:
    """With 8 GiB in all; the sizes of the arenas that are made."""
    sizes: list[int] = []

    def recorders(spares: object, device: str, size: int, most: int) -> Any:
        def grow(size: int) -> None:
            sizes.append(size)
            made.arena.size = size

        made = SimpleNamespace(arena=SimpleNamespace(size=size), resize=grow, shrink=grow)
        sizes.append(size)
        return made

    monkeypatch.setattr(candidates, "Recorders", recorders)
    properties = SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(candidates.torch.cuda, "get_device_properties", lambda _: properties)
    zygote = cast(Any, SimpleNamespace(generation=1))
    return Replays(zygote, Limits(), "cuda:0", 1.0, lambda size: may_grow), sizes


@pytest.mark.parametrize(("may_grow", "gib"), [(True, 2), (False, 1)])
def test_more_than_is_needed_is_taken_only_where_others_leave_it(
    monkeypatch: pytest.MonkeyPatch, may_grow: bool, gib: int
) -> None:
    found, sizes = replays(monkeypatch, may_grow)
    found._recorders_for(256 << 20, 1 << 30, 1 << 30)
    assert sizes == [gib << 30]
    assert found.device_bytes == gib << 30
    found.shrink()
    assert sizes == [gib << 30, 2 << 20], "what is given up for others is memory, and no process"
    assert found.device_bytes == 2 << 20


def test_more_than_is_needed_is_not_taken_beyond_a_verifiers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = replays(monkeypatch, True)
    found._recorders_for(256 << 20, 1 << 30, 8 << 30)
    assert sizes == [1 << 30]


@pytest.mark.parametrize(("may_grow", "gib"), [(True, [1, 2]), (False, [1])])
def test_nor_does_what_is_there_already_become_larger(
    monkeypatch: pytest.MonkeyPatch, may_grow: bool, gib: list[int]
) -> None:
    found, sizes = replays(monkeypatch, may_grow)
    found._recorders_for(256 << 20, 0)
    found._recorders_for(256 << 20, 1 << 30)
    assert sizes == [size << 30 for size in gib]


@pytest.mark.parametrize(
    ("refusals", "may_grow", "records"),
    [
        ([f"{NO_ROOM} (a block of 3.00 GiB): RuntimeError: an invalid storage", "it prints"], True, [1, 2]),
        ([f"{NO_ROOM}: OutOfMemoryError"], False, [1]),
        (["it prints"], True, [1]),
        ([NO_ROOM, f"{NO_ROOM} once more"], True, [1, 2]),
    ],
)
def test_a_forward_that_had_no_room_is_recorded_once_more_with_all_that_there_may_be(
    monkeypatch: pytest.MonkeyPatch, refusals: list[str], may_grow: bool, records: list[int]
) -> None:
    found, _ = replays(monkeypatch, may_grow)
    monkeypatch.setattr(candidates, "place_inputs", lambda *_: ([], 0))
    monkeypatch.setattr(candidates, "images", lambda _: [])
    monkeypatch.setattr(candidates.validation, "read", lambda content, _: Recording(refused=content))
    seen: list[int] = []

    def record(recorders: Any, *_: object) -> str:
        seen.append(recorders.arena.size >> 30)
        return refusals[len(seen) - 1]

    reference = Mock(
        offloaded=Offloaded(), slot_bytes=1 << 20, weights_bytes=0, inside_bytes=0, needed=0, record=record
    )
    reference.capture_refused.return_value, reference.plan.slots = "", 1
    with pytest.raises(Unreplayable, match=re.escape(refusals[-1])):
        found.open(reference, Mock(artifacts={}), 1.0, random.Random(0), is_alone=False)
    assert seen == records


CODE = Mock(source="")


def unhurt(is_short: bool = False) -> Mock:
    """A reference."""
    session = Mock(is_short=is_short)
    return Mock(
        spec_set=["open", "offloaded", "problem", "session"], session=session, offloaded=Offloaded(), problem=PROBLEM
    )


def test_a_reference_that_went_a_slower_way_for_want_of_memory_is_made_again_once_others_gave_way() -> None:
    """A transposed convolution of KernelBench's was 4 % faster than itself beside four other verifiers."""
    device, options = CudaDevice("cuda:0"), bench_options(sections.TimingBench(), "cuda:0")
    device.replays = Mock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbrl_async.kernels.verify.cuda.device.CudaReference", Mock)
        patch.setattr(CudaDevice, "has_neighbours", True)
        short, more = unhurt(is_short=True), cast(Any, (None, CODE, options, None, False))
        with pytest.raises(NoMemory, match="usual way"):
            device.judged(cast(Any, short), *more)
        device.replays.open.return_value.close.assert_called_once()
        device.judged(cast(Any, unhurt()), *more)
        patch.setattr(device, "give_back", lambda: None)
        device.give_way(no_tick)
        with pytest.raises(NoMemory, match="usual way"):
            device.judged(cast(Any, short), *more)
        device.give_way(no_tick, is_last=True)
        device.judged(cast(Any, unhurt()), *more)
        device.judged(cast(Any, short), *more)
        device.rest(0)
        device.judged(cast(Any, short), *more)  # it may need more than there is: once is enough
        patch.setattr(CudaDevice, "has_neighbours", False)
        device.judged(cast(Any, unhurt(is_short=True)), *more)


@pytest.mark.parametrize("who", ["candidate", "reference"])
@pytest.mark.parametrize(("is_short", "is_right", "is_refused"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_who_found_too_little_memory_is_not_timed_so(
    is_short: bool, is_right: bool, is_refused: bool, who: str
) -> None:
    """Beside three verifiers a transposed convolution was twice as fast as itself: its reference was captured anew to
    be timed, and found less than it likes.
    """
    device, session = CudaDevice("cuda:0"), Mock(is_short=bool(is_short) and who == "candidate")
    reference = unhurt(is_short=bool(is_short) and who == "reference")
    checker = Mock(session=session, reference=reference, fault=None if is_right else Mock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbrl_async.kernels.verify.cuda.device.CudaReference", Mock)
        for name in ("has_neighbours", "is_crowded"):
            patch.setattr(CudaDevice, name, True)
        patch.setattr(device, "stopwatch", Mock())
        patch.setattr(device, "give_back", lambda: None)
        for is_first in (True, False):
            again = is_refused and (is_first or who == "reference")  # a candidate can ask for what no GPU has
            with pytest.raises(NoMemory) if again else contextlib.nullcontext():
                device.prove(checker, Mock(), Mock(), Mock(), no_tick)
            with pytest.raises(NoMemory) if again else contextlib.nullcontext():
                device.refuse_short(checker)
            device.give_way(no_tick)
        device.give_way(no_tick, is_last=True)
        device.prove(checker, Mock(), Mock(), Mock(), no_tick)
        device.refuse_short(checker)


def test_a_candidate_is_not_watched_for_want_of_memory_before_it_was_waited_for() -> None:
    device = CudaDevice("cuda:0")
    found = Mock()
    found.open.side_effect = ShortOfMemory("there is no memory to record it in")
    device.replays = found
    reference, options = unhurt(), bench_options(sections.TimingBench(), "cuda:0")
    given = cast(Any, (reference, None, CODE, options, None, False))
    with pytest.MonkeyPatch.context() as given_back:
        given_back.setattr("kbrl_async.kernels.verify.cuda.device.CudaReference", Mock)
        with pytest.raises(NoMemory):
            device.judged(*given)
        given_back.setattr(device, "give_back", lambda: None)
        device.give_way(no_tick)
        assert device.judged(*given).trust_reason == "there is no memory to record it in"
        device.rest(0)
        with pytest.raises(NoMemory):
            device.judged(*given)


@pytest.mark.parametrize(("check_s", "is_brief"), [(0.02, True), (0.0, False)])
def test_only_who_may_be_spared_sets_is_recorded_in_brief(check_s: float, is_brief: bool) -> None:
    device = CudaDevice("cuda:0")
    device.replays = Mock()
    options = bench_options(sections.TimingBench(check_s=check_s), "cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbrl_async.kernels.verify.cuda.device.CudaReference", Mock)
        device.judged(*cast(Any, (unhurt(), None, CODE, options, None, False)))
    assert device.replays.open.call_args.args[-2:] == (False, is_brief)
