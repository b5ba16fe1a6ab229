"""A GPU's reference and its child over shared arenas, on pretended device memory: what is mapped, and is it right."""

from __future__ import annotations

import os
import random
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch

from kbrl_async.errors import ProblemError
from kbrl_async.kernels import settings as sections
from kbrl_async.kernels.verify import bench_options, wire
from kbrl_async.kernels.verify.cuda import reference, runner
from kbrl_async.kernels.verify.cuda.arena import DeviceArena
from kbrl_async.kernels.verify.cuda.record import child
from kbrl_async.kernels.verify.cuda.replay.candidates import Replays
from kbrl_async.kernels.verify.cuda.replay.host import Unreplayable
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.hoarding import Crowded
from kbrl_async.kernels.verify.input_set import place
from kbrl_async.kernels.verify.known import Offloaded
from kbrl_async.kernels.verify.session import CandidateFault, Submission
from protocols.records import Fault
from tests.unit.kernels.verify.pretended_gpu import SOURCE, Homes, Memory, far, idle, made


@pytest.mark.usefixtures("pretended")
def test_a_library_that_was_refused_memory_may_fail_in_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN said CUDNN_STATUS_BAD_PARAM, and torch spoke of data that is not allocated yet."""
    fails = "        if x[0, 0] == 7:\n            raise RuntimeError('cuDNN error: CUDNN_STATUS_BAD_PARAM')\n"
    found = made(SOURCE.replace("        return torch.relu", f"{fails}        return torch.relu"))
    refusals = iter((3, 3, 3, 4, 4, 5, 5, 5))  # before and after each call
    used = {"allocated_bytes": {"all": {"current": 1 << 20, "peak": 5 << 20}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: used | {"num_ooms": next(refusals)})

    def told() -> tuple[int, bool]:
        outcome = found.session.call(wire.OP_RUN, 0, 5.0)
        return outcome.inside, outcome.is_short

    assert (told(), found.session.is_short) == ((4 << 20, False), False)
    assert (told(), found.session.is_short) == ((4 << 20, True), True)
    found.session.slots[0][0].fill_(7.0)
    for kind in (Fault.OUT_OF_MEMORY, Fault.RUNTIME_ERROR):
        with pytest.raises(CandidateFault, match="BAD_PARAM") as fault:
            told()
        assert fault.value.kind is kind
    found.close()


@pytest.mark.usefixtures("pretended")
def test_where_memory_is_scarce_no_more_is_poisoned_than_the_next_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, filled = made(), list[tuple[int, ...]]()
    monkeypatch.setattr(runner.values, "fill_bytes", lambda tensor, byte: filled.append(tuple(tensor.shape)))
    for is_lean, expected in ((1, [(16, 8)]), (0, [])):  # what is left after a call is poisoned on a GPU only
        filled.clear()
        found.session.call(wire.OP_POISON_ON, is_lean, 5.0)
        assert filled == []
        found.session.call(wire.OP_RUN, 0, 5.0)
        assert filled == expected
    found.session.call(wire.OP_POISON_OFF, 0, 5.0)
    found.close()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("is_short", "given"), [(False, 1), (True, 0)])
def test_a_process_whose_library_found_too_little_memory_serves_nobody_else(is_short: bool, given: int) -> None:
    """It keeps the way that it took, and is refused nothing any more."""
    homes = Homes()
    found = made(homes=homes)
    found.session.is_short = is_short
    found.retire()
    assert homes.given == given


LARGE = """
import functools
import torch
KEPT = {}
@functools.lru_cache
def frequencies():
    return torch.arange(4.0)
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.hidden = torch.nn.Linear(4, size), torch.zeros(1)
    def forward(self, x, y):
        self.hidden = x.sum()
        KEPT.setdefault("mask", torch.ones(1))
        return self.linear(x + y)
def get_inputs():
    return [torch.rand(ROWS, 4) * frequencies(), torch.rand(ROWS, 4)]
def get_init_inputs():
    return [2]
"""


ROWS, VALUES = "ROWS", "torch.rand(ROWS, 4)]"


@pytest.mark.parametrize(
    ("change", "rows", "found"),
    [
        (("", ""), "1 << 28", (2 << 32, 1 << 31)),
        (("", ""), "16", (512, 0)),  # nobody waits for so little
        ((VALUES, "torch.rand(ROWS, 4)[: int(torch.rand(1))]]"), "1 << 28", (0, 0)),
        (("return [2]", "return [int(torch.rand(1))]"), "1 << 28", (2 << 32, 0)),
        (("KEPT = {}", "KEPT = {}\ntorch.set_default_dtype(torch.float32)"), "1 << 28", (0, 0)),
    ],
)
def test_sizes_are_told_without_memory(change: tuple[str, str], rows: str, found: tuple[int, int]) -> None:
    """As far as no value is needed for them."""
    assert runner.outlined(LARGE.replace(*change).replace(ROWS, rows)) == found


@pytest.mark.usefixtures("pretended")
def test_what_a_problem_keeps_is_nothing_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies that its inputs share, a mask of its forward: drawn so, they failed in every call that followed."""
    monkeypatch.setattr(runner, "LARGE_BYTES", 1)
    found = made(LARGE.replace(ROWS, "64"))
    assert len(found.sets) == 10
    found.close()


@pytest.mark.usefixtures("pretended")
def test_what_is_drawn_first_has_its_place_among_plans_already() -> None:
    """Beside a verifier that planned with most of a GPU others drew inputs of 6 GiB, of which nobody knew."""
    asked: list[int] = []

    def refuse(size: int) -> None:
        asked.append(size)
        raise Crowded(size)

    large = SOURCE.replace("randn(16, 8)", "randn(1 << 23, 8)")
    nothing = patch.object(CudaSession, "drawn", Mock(side_effect=AssertionError("nothing is drawn")))
    with nothing, pytest.raises(Crowded):
        made(large, refuse)
    inputs, outputs = 2 << 28, 1 << 28
    assert 2 * inputs + 6 * outputs <= asked[0] <= 4 * inputs + 7 * outputs + (1 << 12)


def test_a_reference_is_made_over_few_arenas(pretended: Memory) -> None:
    found = made()
    assert pretended.made == 4, "weights, the first draw, the others, inputs and outputs of all calls"
    assert len(found.sets) == 10
    draws = cast(Any, found.pool).draws
    assert len(draws) == 4
    assert all(len(draw) == 2 for draw in draws)
    assert len({float(draw[number][0]) for draw in draws for number in (0, 1)}) == 8
    module: dict[str, Any] = {}
    exec(SOURCE, module)
    model = module["Model"](8)
    assert found._weights is not None
    own = [found._weights.view(meta) for _, meta in found.ready.weights]
    model.load_state_dict(dict(zip(model.state_dict(), own, strict=True)))
    for one in found.sets:
        x, y = (block.view(16, 8) for block in one.blocks)
        assert torch.allclose(model(x, y), one.expected[0], atol=1e-5)
    found.close()


class Recorders:
    """A recorder that builds its candidate on what lies in its arena."""

    def __init__(self, size: int) -> None:
        self.arena, self.weights = DeviceArena.new(size, torch.device("cpu")), list[torch.Tensor]()
        self.descriptors: list[int] = []

    def record(self, order: wire.RecordForward, fds: tuple[int, ...], deadline_s: float, fill: Any) -> bytes:
        fill(self.arena)
        given = self.arena.raw[order.weights :] if order.weights else None
        candidate = child._Candidate(cast(Any, None), order.setup, list(map(os.dup, fds)), torch.device("cpu"), given)
        self.weights, self.descriptors = [tensor.clone() for tensor in candidate.model.parameters()], list(fds)
        self.arena.raw[order.weights :].fill_(0)
        assert all(map(torch.equal, self.weights, candidate.model.parameters())), "they are copies"
        return b""


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("most", [256 << 20, 0])
def test_a_recorder_finds_the_weights_in_its_arena_or_beside_it(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(reference, "MOST_INSIDE", most)
    found, recorders = made(), Recorders(8 << 20)
    assert found._weights is not None
    code = Submission(SOURCE.replace("class Model", "class ModelNew"), "cuda-nvrtc")
    no_statistics = Mock(side_effect=RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "memory_stats_as_nested_dict", no_statistics)  # of a recorder's allocator
        found.record(cast(Any, recorders), code, [], 0, 1.0)
    wanted = [found._weights.view(meta) for _, meta in found.ready.weights]
    assert all(map(torch.equal, recorders.weights, wanted))
    assert len(wanted) == 2
    assert len(recorders.descriptors) == (not most)
    assert found.inside_bytes == (found.weights_bytes if most else 0)
    found.close()


def test_an_arena_that_is_too_small_is_followed_by_another(pretended: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "ARENA_BYTES", 4096)
    found = made()
    assert pretended.made > 4
    assert len(found.sets) == 10
    found.close()


# ── what lies on the host ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    "at", [Offloaded(), Offloaded(weights=True), Offloaded(inputs=True), Offloaded(inputs=True, weights=True)]
)
def test_what_does_not_fit_beside_the_rest_lies_on_the_host(monkeypatch: pytest.MonkeyPatch, at: Offloaded) -> None:
    found = far(monkeypatch, at)
    session = cast(Any, found.session)
    assert found.offloaded == at
    assert found._weights is not None
    assert (session.shared.is_on_host, found._weights.is_on_host) == at
    assert not found.keeps_sets
    assert len(found.sets) == 10
    assert found.needed <= reference.memory_of(cast(Any, None))
    on_host = session.shared.size * at[0] + found._weights.size * at[1]
    assert found.host_bytes >= on_host
    assert found.device_bytes == session.shared.size + found._weights.size - on_host
    found.close()


@pytest.mark.usefixtures("pretended")
def test_a_candidate_has_its_arena_on_the_gpu_and_weights_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = far(monkeypatch, Offloaded(inputs=True, weights=True))
    found.spares = idle()
    ours = cast(Any, found.session)
    ours.move(to_host=False)  # as a timed call of the candidate before left it
    session = cast(Any, found.open(cast(Any, None), Submission(SOURCE.replace("Model", "ModelNew"), "torch"), 5.0))
    found.attach(session)
    assert (ours.shared.is_on_host, session.shared.is_on_host) == (True, False)
    for one in found.sets:
        place(session, 0, one)
        outcome = session.call(wire.OP_RUN, 0, 5.0)
        assert torch.allclose(session.read(outcome.tensors[0]), one.expected[0], atol=1e-5), one.name
        session.move(to_host=True)
        session.move(to_host=False)
    session.close()
    found.close()


@pytest.mark.usefixtures("pretended")
def test_with_more_memory_new_secrets_lie_on_the_gpu_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = far(monkeypatch, Offloaded(inputs=True, weights=True))
    monkeypatch.setattr(reference, "memory_of", lambda options: 8 << 30)
    found.refresh()
    weights = found._weights
    assert weights is not None
    assert found.offloaded == Offloaded()
    assert not cast(Any, found.session).shared.is_on_host
    assert not weights.is_on_host
    assert weights.host_bytes == 0, "nothing of theirs is pinned any more"
    found.close()


@pytest.mark.usefixtures("pretended")
def test_a_host_without_memory_holds_nothing_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "psutil", Mock(virtual_memory=lambda: Mock(available=1000)))
    with pytest.raises(ProblemError, match="does not fit"):
        far(monkeypatch, Offloaded(inputs=True))


@pytest.mark.usefixtures("pretended")
def test_who_lies_on_the_host_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A player can't move, and a reference that is timed from the host seems slow."""
    found = far(monkeypatch, Offloaded(inputs=True))
    replays = Replays(cast(Any, None), bench_options(sections.TimingBench(), "cpu").limits, "cpu", 1.0)
    with pytest.raises(Unreplayable, match="too much memory"):
        replays.open(found, Submission(SOURCE, "torch"), 1.0, random.Random(1), False)
    found.close()
