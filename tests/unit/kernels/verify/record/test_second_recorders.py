"""What a second process writes down of a candidate, against the first's: with recorders that are stand-ins."""

from __future__ import annotations

import random
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify import recording, wire
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.cuda.replay import candidates
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays, _Written
from kbrl_async.kernels.verify.cuda.replay.host import ShortOfMemory, Unreplayable
from kbrl_async.kernels.verify.cuda.starting import NoRoom
from kbrl_async.kernels.verify.known import Offloaded
from kbrl_async.kernels.verify.session import Submission

KERNEL = recording.Kernel("a" * 64, "run", (1, 1, 1), (1, 1, 1), 0, [b"12345678"])
GIVEN = Submission("source", "cuda-nvrtc"), 1.0


class Arena:
    def __init__(self, fill: int) -> None:
        self.raw, self.size = torch.full((64,), fill, dtype=torch.uint8), 64


class Recorders:
    """What lasts of a candidate is bytes of `fill`."""

    def __init__(self, fill: int = 1) -> None:
        self.arena, self.forgot, self.is_closed = Arena(fill), 0, False

    def forget(self) -> None:
        self.forgot += 1

    def refill(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        self.is_closed = True


class Reference:
    """Is written down as `content`."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def record(self, *_: Any) -> bytes:
        return self.content


def written(*nodes: Any) -> recording.Recording:
    return recording.Recording([recording.Forward(list(nodes), ["V", None], [])], [(0, 32)], 64)


def replays(monkeypatch: pytest.MonkeyPatch, of: recording.Recording, second: Recorders) -> Replays:
    monkeypatch.setattr(candidates, "Recorders", lambda *_: second)
    made = Replays(cast(Any, None), Limits(), "cuda:0", 1.0)
    made._recorders, made._spares = cast(Any, Recorders()), cast(Any, Mock())
    made._last = _Written(recording.encode(of), [], 0, of, [Arena(1).raw[:32]])
    return made


def is_repeated(found: Replays, of: recording.Recording, is_right: bool = False, is_alone: bool = False) -> bool:
    return found.is_repeated(cast(Any, Reference(recording.encode(of))), *GIVEN, is_right, is_alone)


def test_the_same_work_with_the_same_weights_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_repeated(replays(monkeypatch, written(KERNEL), Recorders()), written(KERNEL))


def test_other_arguments_or_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    other = written(recording.Kernel("a" * 64, "run", (2, 1, 1), (1, 1, 1), 0, [b"12345678"]))
    assert not is_repeated(replays(monkeypatch, written(KERNEL), Recorders()), other)
    assert not is_repeated(replays(monkeypatch, written(KERNEL), Recorders(fill=2)), written(KERNEL))


def test_of_what_is_right_only_the_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = written(recording.Kernel("a" * 64, "run", (2, 1, 1), (1, 1, 1), 0, [b"12345678"]))
    assert is_repeated(replays(monkeypatch, written(KERNEL), Recorders(fill=2)), tuned, is_right=True)
    assert not is_repeated(replays(monkeypatch, written(*[KERNEL] * 8), Recorders()), written(KERNEL), is_right=True)


@pytest.mark.parametrize(("of_first", "of_second", "is_spoilt"), [(8, 1, True), (1, 1, False)])
def test_who_was_contradicted_serves_one_candidate_a_process(
    monkeypatch: pytest.MonkeyPatch, of_first: int, of_second: int, is_spoilt: bool
) -> None:
    found = replays(monkeypatch, written(*[KERNEL] * of_first), Recorders())
    recorders = cast(Any, found._recorders)
    found._first, alone = found._last, written(*[KERNEL] * of_second)
    found._last = _Written(recording.encode(alone), [], 0, alone)
    found.contradict(is_right=True)
    assert recorders.is_closed == is_spoilt
    assert (found._most_served == 1) == is_spoilt


def test_what_was_recorded_in_brief_is_no_sign_of_a_spoilt_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that does less than forward says otherwise where nobody has compared the two."""
    found = replays(monkeypatch, written(KERNEL), Recorders())
    recorders, refused = cast(Any, found._recorders), recording.Recording(refused="it acts by phase")
    assert found._last is not None
    found._first = msgspec.structs.replace(found._last, is_brief=True)
    found._last = _Written(recording.encode(refused), [], 0, refused)
    found.contradict(is_right=False)
    assert recorders.is_closed
    assert found._most_served > 1


@pytest.mark.parametrize(
    ("is_alone", "is_brief", "is_so"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_who_was_recorded_in_brief_is_asked_again_though_nobody_was_there_before(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool, is_brief: bool, is_so: bool
) -> None:
    """Else the first candidate of a process would be wrong for what its recording left out."""
    found = replays(monkeypatch, written(KERNEL), Recorders())
    cast(Any, found._recorders).is_fresh = True
    refused = recording.Recording(refused="it reads from the device")
    reference = Mock(
        offloaded=Offloaded(), examples=[], slot_bytes=0, weights_bytes=0, inside_bytes=0, plan=Mock(slots=1)
    )
    reference.capture_refused.return_value = ""
    reference.record.return_value = recording.encode(refused)
    monkeypatch.setattr(found, "_recorders_for", lambda *_: found._recorders)
    monkeypatch.setattr(found, "_host", Mock())
    code = Submission("source", "cuda-nvrtc")
    with pytest.raises(Unreplayable, match="reads from the device"):
        found.open(reference, code, 1.0, random.Random(1), is_alone, is_brief=is_brief)
    assert (reference.record.call_args.args[-1], found.is_shared) == (is_so, is_so)


@pytest.mark.parametrize("is_recorder", [True, False])
def test_a_process_without_memory_for_its_context_is_memory_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_recorder: bool
) -> None:
    """And what holds memory is given back, before anybody asks for a process to watch the candidate in."""
    found = replays(monkeypatch, written(KERNEL), Recorders())
    recorders, short = cast(Any, found._recorders), NoRoom("the GPU has no memory")
    recorders.is_fresh = True
    reference = Mock(
        offloaded=Offloaded(), examples=[], slot_bytes=0, weights_bytes=0, inside_bytes=0, plan=Mock(slots=1)
    )
    reference.capture_refused.return_value = ""
    reference.record.side_effect = [short] if is_recorder else [recording.encode(written())]
    monkeypatch.setattr(found, "_recorders_for", lambda *_: found._recorders)
    monkeypatch.setattr(candidates, "ReplaySession", Mock(side_effect=short))
    with pytest.raises(ShortOfMemory):
        found.open(reference, Submission("source", "cuda-nvrtc"), 1.0, random.Random(1), is_alone=False)
    assert recorders.is_closed


@pytest.mark.parametrize(("backend", "is_brief"), [("cuda-nvrtc", True), ("triton", False)])
def test_kernels_that_may_be_tuned_are_recorded_in_full(backend: str, is_brief: bool) -> None:
    reference = cast(Any, CudaReference.__new__(CudaReference))
    reference._weights, reference.tree, asked = None, ["V", None], Mock()
    reference.setup = lambda code: wire.Setup("", "ModelNew", 1)
    reference.record(asked, Submission("source", backend), [], 0, 1.0, True)
    assert asked.record.call_args.args[0].is_brief == is_brief


@pytest.mark.parametrize(("kept", "is_same"), [(1, True), (2, False)])
def test_a_fresh_process_says_the_same_or_does_not(monkeypatch: pytest.MonkeyPatch, kept: int, is_same: bool) -> None:
    fresh = Recorders(fill=kept)
    found = replays(monkeypatch, written(KERNEL), fresh)
    assert is_repeated(found, written(KERNEL), is_alone=True) == is_same
    assert fresh.forgot == 1, "who has served others is not asked"
    assert cast(Any, found._recorders).forgot == 0, "the first goes on: each process that ends costs all others time"
    assert is_repeated(found, written(KERNEL)) == is_same
    assert fresh.forgot == 1, "who was alone is the second for those that follow"


def test_whoever_judges_by_the_second_process_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replays(monkeypatch, written(KERNEL), Recorders())
    first, last = found._recorders, found._last
    found._seconds = second = cast(Any, Recorders())
    with found.by_the_second():
        assert (found._recorders, found._seconds) == (second, first)
        assert not found._is_brief, "who is in doubt is looked at in full"
        found._last = None
    assert found._is_brief
    assert (found._recorders, found._seconds, found._last) == (first, second, last)


@pytest.mark.parametrize(
    "error", [CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"), NoRoom("the GPU has no memory for a recorder")]
)
def test_without_memory_for_a_second_nothing_is_repeated(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replays(monkeypatch, written(KERNEL), Recorders())

    class Full:
        def record(self, *_: Any) -> bytes:
            raise error

    assert not found.is_repeated(cast(Any, Full()), *GIVEN, False, False)
    assert found._recorders is found._seconds is None
