"""What a second process writes down of a candidate, against the first's: with recorders that are stand-ins."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.sandbox import Limits
from kbrl_async.kernels.verify import recording
from kbrl_async.kernels.verify.cuda.replay import candidates
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays, _Written
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
        found._last = None
    assert (found._recorders, found._seconds, found._last) == (first, second, last)


def test_without_memory_for_a_second_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replays(monkeypatch, written(KERNEL), Recorders())

    class Full:
        def record(self, *_: Any) -> bytes:
            raise CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    assert not found.is_repeated(cast(Any, Full()), *GIVEN, False, False)
    assert found._recorders is found._seconds is None
