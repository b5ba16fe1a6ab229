"""A recording is bytes from whoever may lie: it stays within its bounds, or is none."""

from __future__ import annotations

import random

import msgspec
import pytest

from kbrl_async.kernels.verify import allowed, recording, validation
from kbrl_async.kernels.verify.recording import Forward, Kernel, Memcpy, Memset, Operator, Recording
from kbrl_async.kernels.verify.replies import Malformed
from kbrl_async.kernels.verify.wire import TensorMeta

IMAGE = "a" * 64
BOUNDS = validation.Bounds(4096, frozenset({IMAGE}), 1)
OUT = TensorMeta("float32", (4, 8), (8, 1), 1024)
KERNEL = Kernel(IMAGE, "run", (1, 1, 1), (32, 1, 1), 0, [b"12345678"])
MM = Operator("aten::mm", ["L", [["L", [["T", 0], ["T", 1]]], ["D", {}]]], [OUT, OUT], [OUT], [(1024, 128)])


def made(*nodes: recording.Node, **more: object) -> bytes:
    whole = Recording([Forward(list(nodes), ["T", 0], [OUT])], [(0, 512)], 2048)
    return recording.encode(msgspec.structs.replace(whole, **more))


def test_what_a_recorder_sends_is_read_as_it_was_written() -> None:
    nodes = KERNEL, MM, Memset(0, 0, 4, 8, 1, 0, [1]), Memcpy(0, 512, 64, [0, 2])
    found = validation.read(made(*nodes), BOUNDS)
    assert tuple(found.forwards[0].nodes) == nodes


def test_a_refusal_is_read_as_one() -> None:
    assert validation.read(recording.encode(Recording(refused="it waits")), BOUNDS).refused == "it waits"


REPLACED = msgspec.structs.replace
WRONG: dict[str, bytes] = {
    "an output of a type that torch dies of": recording.encode(
        Recording([Forward([KERNEL], ["T", 0], [REPLACED(OUT, dtype="qint8")])], [(0, 512)], 2048)
    ),
    "nothing": b"",
    "another struct": b"\x81\xa1a\x01",
    "more is used than there is": made(KERNEL, used=8192),
    "no forward": made(forwards=[]),
    "the image reaches beyond": made(KERNEL, image=[(0, 4096)]),
    "the image is not in order": made(KERNEL, image=[(512, 600), (0, 8)]),
    "refused and recorded": made(KERNEL, refused="no"),
    "a long reason": recording.encode(Recording(refused="x" * 500)),
    "code that was not built": made(REPLACED(KERNEL, artifact="b" * 64)),
    "an empty grid": made(REPLACED(KERNEL, grid=(0, 1, 1))),
    "a huge block": made(REPLACED(KERNEL, block=(1024, 2, 1))),
    "a huge cluster": made(REPLACED(KERNEL, cluster=(32, 1, 1))),
    "more shared memory than any chip has": made(REPLACED(KERNEL, shared=1 << 30)),
    "too many arguments": made(REPLACED(KERNEL, arguments=[b"x" * 40_000])),
    "a name with an end in it": made(REPLACED(KERNEL, name="run\0")),
    "a name of an operator": made(REPLACED(KERNEL, name="aten::mm")),
    "it waits for itself": made(REPLACED(KERNEL, after=[0])),
    "it waits for one twice": made(KERNEL, REPLACED(KERNEL, after=[0, 0])),
    "a memset beyond": made(Memset(2040, 0, 4, 8, 1, 0)),
    "a memset with a large pitch": made(Memset(0, 0, 4, 1, 1 << 40, 1 << 20)),
    "a memset of three bytes": made(Memset(0, 0, 3, 8, 1, 0)),
    "a value that does not fit": made(Memset(0, 256, 1, 8, 1, 0)),
    "a copy from beyond": made(Memcpy(0, 2000, 64)),
    "a copy to beyond": made(Memcpy(2000, 0, 64)),
    "an operator that is not on the list": made(REPLACED(MM, name="aten::set_.source_Tensor")),
    "random numbers": made(REPLACED(MM, name="aten::rand_like")),
    "no operator at all": made(REPLACED(MM, name="os::system")),
    "an overload that is none": made(REPLACED(MM, name="aten::mm.__init__")),
    "a tensor beyond": made(REPLACED(MM, tensors=[OUT, REPLACED(OUT, place=2000)])),
    "strides that reach beyond": made(REPLACED(MM, results=[REPLACED(OUT, strides=(1000, 1))])),
    "a tensor between two places": made(REPLACED(MM, results=[REPLACED(OUT, place=1025)])),
    "a result of no dtype": made(REPLACED(MM, results=[REPLACED(OUT, dtype="Tensor")])),
    "an allocation beyond": made(REPLACED(MM, allocations=[(2000, 64)])),
    "arguments that are none": made(REPLACED(MM, arguments=["V", 1])),
    "a tensor that is not there": made(REPLACED(MM, tensors=[OUT])),
    "an output beyond": made(KERNEL, forwards=[Forward([KERNEL], ["T", 0], [REPLACED(OUT, place=2044)])]),
    "an output too many": made(KERNEL, forwards=[Forward([KERNEL], ["T", 0], [OUT, OUT])]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_reaches_beyond_its_bounds_is_no_recording(name: str) -> None:
    with pytest.raises(Malformed):
        validation.read(WRONG[name], BOUNDS)


def test_whatever_the_bytes_are_they_are_a_recording_or_malformed() -> None:
    rng, honest = random.Random(5), bytearray(made(KERNEL, MM))
    for _ in range(3000):
        data = bytearray(honest)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            validation.check(validation.read(bytes(data), BOUNDS), BOUNDS)
        except Malformed:
            continue


def test_every_name_on_the_list_is_an_operator_of_torch() -> None:
    import torch

    known = [name for name in allowed.ALLOWED if hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, name + "_")]
    assert sorted(known) == sorted(allowed.ALLOWED)


@pytest.mark.parametrize(
    "name", ["normal_", "bernoulli_", "uniform_", "nonzero", "item", "from_file", "resize_", "unique"]
)
def test_chance_waiting_and_files_are_not_on_the_list(name: str) -> None:
    assert not allowed.is_allowed(f"aten::{name}")
