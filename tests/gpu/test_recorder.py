"""Recordings of candidates as a recorder in its sandbox writes them on a real GPU."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options, recording
from kbrl_async.kernels.verify.bench import zygote_for
from kbrl_async.kernels.verify.cuda.record.session import Recorders, spares_for
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.cuda.replay.stretches import place_inputs
from kbrl_async.kernels.verify.device import device_of
from kbrl_async.kernels.verify.references import References
from kbrl_async.kernels.verify.session import Submission
from protocols.records import Candidate, Fault, Problem
from tests.gpu.recorded_candidates import KINDS, Kind

pytestmark = pytest.mark.gpu
SLOTS = 3
ARENA = 1 << 30
Record = Callable[[Kind], recording.Recording]


@pytest.fixture(scope="module")
def recorders() -> Iterator[tuple[References, Recorders]]:
    device = device_of("cuda:0")
    options = device.fitted(bench_options(TimingBench(), device="cuda:0"))
    with zygote_for("cuda:0") as zygote:
        device.open(options.memory_share)
        device.enter()
        references = References(zygote, options, random.Random(1), device)
        spares = spares_for(zygote, options.limits, "cuda:0", 1)
        made = Recorders(spares, "cuda:0", ARENA)
        with contextlib.closing(references), contextlib.closing(spares), contextlib.closing(made):
            yield references, made


@pytest.fixture(scope="module")
def record(recorders: tuple[References, Recorders], gpu_builder: Builder) -> Record:
    references, made = recorders

    def run(kind: Kind) -> recording.Recording:
        problem, candidate = Problem("L1/01_test", 1, "test", kind.problem), Candidate(kind.source, kind.backend)
        built = gpu_builder.build(candidate, problem)
        assert built.fault is Fault.OK, built.message
        paths = {key: str(gpu_builder.store.path(address)) for key, address in built.artifacts.items()}
        reference = references.get(problem).cases[0].reference
        assert isinstance(reference, CudaReference)
        slots, start = place_inputs(reference.examples, SLOTS, random.Random(2))
        content = reference.record(made, Submission(kind.source, kind.backend, paths), slots, start, 20.0)
        found: recording.Recording = recording.decode(content)
        return found

    return run


def names(forward: recording.Forward) -> tuple[str, ...]:
    return tuple(node.name if isinstance(node, recording.Operator) else type(node).__name__ for node in forward.nodes)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_candidate_is_recorded_or_refused_in_words(record: Record, name: str) -> None:
    kind, found = KINDS[name], record(KINDS[name])
    if kind.refused:
        assert kind.refused in found.refused
        assert found.forwards == []
        return
    assert found.refused == ""
    assert [names(forward) for forward in found.forwards] == [kind.nodes] * SLOTS


def test_each_slot_has_inputs_and_outputs_of_its_own(record: Record) -> None:
    found = record(KINDS["triton"])
    arguments = [forward.nodes[0].arguments[:2] for forward in found.forwards]  # type: ignore[union-attr]
    assert len({bytes(one) for pair in arguments for one in pair}) == 2 * SLOTS
    assert len({forward.outputs[0].place for forward in found.forwards}) == SLOTS


def test_branches_of_two_streams_are_no_sequence(record: Record) -> None:
    first, second = record(KINDS["triton, two streams"]).forwards[0].nodes
    assert isinstance(first, recording.Kernel)
    assert isinstance(second, recording.Kernel)
    assert first.after == second.after == []


def test_how_a_kernel_is_launched_is_kept(record: Record) -> None:
    (cluster,) = record(KINDS["triton, cluster"]).forwards[0].nodes
    assert isinstance(cluster, recording.Kernel)
    assert cluster.cluster == (2, 1, 1)
    (cooperative,) = record(KINDS["triton, cooperative"]).forwards[0].nodes
    assert isinstance(cooperative, recording.Kernel)
    assert cooperative.is_cooperative
    _, second = record(KINDS["triton, overlapping launches"]).forwards[0].nodes
    assert isinstance(second, recording.Kernel)
    assert second.is_serialized


def test_of_a_tuned_kernel_only_the_configuration_that_won_is_in_a_forward(record: Record) -> None:
    """What is replayed and timed is what is recorded: nothing is tuned in it, and no other configuration launched."""
    nodes = [node for forward in record(KINDS["triton, tuned"]).forwards for node in forward.nodes]
    kernels = [node for node in nodes if isinstance(node, recording.Kernel)]
    assert len(nodes) == len(kernels) == SLOTS
    assert len({(kernel.artifact, kernel.grid, kernel.block) for kernel in kernels}) == 1


def test_weights_are_in_the_image_and_inputs_and_outputs_are_not(record: Record) -> None:
    found = record(KINDS["triton behind a product"])
    product = found.forwards[0].nodes[0]
    assert isinstance(product, recording.Operator)
    bias, x, weight = (meta.place for meta in product.tensors)

    def lasts(place: int) -> bool:
        return any(begin <= place < end for begin, end in found.image)

    assert lasts(bias)
    assert lasts(weight)
    assert not lasts(x)
    assert not lasts(found.forwards[0].outputs[0].place)


def test_one_process_serves_many_and_takes_milliseconds_for_each(
    record: Record, recorders: tuple[References, Recorders]
) -> None:
    _, made = recorders
    record(KINDS["nvrtc"])
    record(KINDS["triton"])
    begin = time.perf_counter()
    for _ in range(5):
        assert record(KINDS["nvrtc"]).refused == ""
    assert time.perf_counter() - begin < 1.0
    assert not made.is_fresh
