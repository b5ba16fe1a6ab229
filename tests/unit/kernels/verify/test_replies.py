"""Reading a child's words is total; and what follows from findings follows in one place."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError
from kbrl_async.kernels.cuda_driver import CudaError
from kbrl_async.kernels.verify import compare, replies, values, wire
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.hoarding import held_by_it, is_hoarder, is_out_of_memory
from kbrl_async.kernels.verify.outputs import same_structure
from kbrl_async.kernels.verify.report import verdict_of
from kbrl_async.kernels.verify.session import CandidateFault
from kbrl_async.kernels.verify.similarity import copied_reference
from protocols.records import INFRASTRUCTURE_FAULTS, Fault

META = wire.TensorMeta("float32", (2, 3), (3, 1), 4096)
TRUE: list[wire.Reply] = [
    wire.Confined("reduced", ("seccomp",)),
    wire.Ready(),
    wire.Ready(["L", [["T", 0], ["V", 1.5]]], [META], [("weight", META)]),
    wire.Drawn(["L", [["T", 0], ["D", {"a": ["T", 1]}], ["Y", "int64"]]], [META, META]),
    wire.Done(7, ["V", None], []),
    wire.Done(2**64 - 1, ["U", [["T", 0]]], [META], wire.Trace({"f": (1, 10)})),
    wire.Captured(7, {"f": 2}, ""),
    wire.Timed(7, 10.0, 1.0),
    wire.Failed("illegal_access", "at 0x0"),
]


@pytest.mark.parametrize("reply", TRUE)
def test_what_a_runner_says_is_understood(reply: wire.Reply) -> None:
    assert replies.read(wire.encode(reply)) == reply


@pytest.mark.parametrize("seed", range(8))
def test_any_bytes_are_a_reply_or_malformed(seed: int) -> None:
    rng = random.Random(seed)
    encoded = [wire.encode(reply) for reply in TRUE]
    for _ in range(2000):
        data = bytearray(rng.choice(encoded))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data) + 1)
            data[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        try:
            replies.read(bytes(data))
        except replies.Malformed:
            continue


@pytest.mark.parametrize(
    "told",
    [
        {"type": "timed", "nonce": 1, "elapsed_ns": float("inf")},
        {"type": "timed", "nonce": 1, "elapsed_ns": 1.0, "empty_ns": float("nan")},
        {"type": "timed", "nonce": 1, "elapsed_ns": 1.0, "stream_ns": -1.0},
        {"type": "captured", "nonce": 1, "kernels": {"f": -1}},
        {"type": "captured", "nonce": 1, "kernels": {f"kernel{i}": 1 for i in range(5000)}},
        {"type": "captured", "nonce": 1, "kernels": {"f" * 100_000: 1}},
        {"type": "confined", "level": "perfect", "missing": []},
        {"type": "done", "nonce": 1, "tree": ["V", 0], "tensors": [], "trace": {"launches": {"f": [-1, 1]}}},
        {"type": "done", "nonce": 1, "tree": ["V", 0], "tensors": [], "trace": {"launches": {"f": [1, -1]}}},
        {"type": "ready", "weights": [["w", ["float32", [1], [], 0]]]},
        {"type": "ready", "init": ["L", []], "init_tensors": [["float32", [1], [1], 0]]},
    ],
)
def test_times_and_counts_and_levels_are_of_closed_sets(told: dict[str, object]) -> None:
    with pytest.raises(replies.Malformed):
        replies.read(msgspec.msgpack.encode(told))


def test_an_honest_process_can_not_say_what_would_be_forged() -> None:
    deep: list[object] = []
    for _ in range(values.MAX_DEPTH):
        deep = [deep]
    with pytest.raises(TypeError, match="deep"):
        values.flatten([deep], [])
    with pytest.raises(TypeError, match="read the same"):
        values.flatten({1: torch.ones(1), "1": torch.ones(1)}, [])
    tree = values.flatten(deep, [])
    assert replies.read(wire.encode(wire.Done(1, tree, []))) == wire.Done(1, tree, [])


def test_a_name_of_thousands_of_digits_is_a_name() -> None:
    """Python makes no number of more than 4,300 digits."""
    assert cuda_proof.own_kernels(["_Z" + "1" * 4400 + "add"], "__global__ void add(float *x) {}") == []


def test_scalars_that_are_no_numbers_are_compared() -> None:
    nan = torch.tensor(float("nan"))
    assert compare.same_values(nan, nan.clone())
    assert not compare.same_values(nan, torch.tensor(1.0))


@pytest.mark.parametrize("got", ["1.5", None, True, float("nan"), 2**64 - 1, "9" * 4400])
def test_plain_values_of_any_type_are_compared(got: object) -> None:
    assert not same_structure(["V", got], ["V", 7.25])
    assert not same_structure(["V", got], ["V", None]) or got is None
    assert same_structure(["V", 7.2500001], ["V", 7.25])


def test_bases_that_double_are_read_in_no_time() -> None:
    doubled = "".join(f"class C{i + 1}(C{i}, C{i}): pass\n" for i in range(200))
    source = f"class C0:\n  def forward(self, x): return x\n{doubled}class ModelNew(C200): pass\n"
    assert copied_reference(source.replace("ModelNew", "Model"), source) == ""


class Found:
    def __init__(self, passed: int, total: int, fault: CandidateFault | None = None) -> None:
        self.passed, self.total, self.fault = passed, total, fault
        self.failed: list[tuple[str, compare.Difference]] = []
        self.worst = None
        self.isolation = ("full", ())
        self.kernelbench = None
        self.carries_state = False
        self.near, self.own_share = 0, None
        self.evidence = self.tolerance_note = self.trust = self.trust_reason = ""


@pytest.mark.parametrize(("passed", "total"), [(0, 10), (9, 10), (0, 0), (11, 10), (-1, -1)])
def test_ok_is_all_of_them_and_nothing_failed(passed: int, total: int) -> None:
    with pytest.raises(InfraError):
        verdict_of(Found(passed, total))
    assert verdict_of(Found(10, 10)).fault is Fault.OK
    assert verdict_of(Found(10, 10, CandidateFault(Fault.TIMEOUT, ""))).fault is Fault.TIMEOUT


@pytest.mark.parametrize("kind", [Fault.OK, *sorted(INFRASTRUCTURE_FAULTS)])
def test_a_candidate_has_no_fault_of_ours_and_no_ok(kind: Fault) -> None:
    with pytest.raises(ValueError, match="no fault of a candidate"):
        CandidateFault(kind, "")


GIB = 1 << 30


def test_who_holds_more_than_its_work_needs_is_to_blame() -> None:
    assert is_hoarder(held=70 * GIB, needed=2 * GIB)
    assert not is_hoarder(held=4 * GIB, needed=2 * GIB), "its weights, its outputs and a context"
    assert not is_hoarder(held=0, needed=0), "others have the memory"
    assert not is_hoarder(held=-8 * GIB, needed=0), "somebody else came meanwhile"


def test_memory_that_others_gave_back_meanwhile_accuses_nobody() -> None:
    """Seven verifiers beside one candidate gave 40 GiB back while it was ended: it was called a hoarder."""
    assert held_by_it(None, 40 * GIB, has_neighbours=True) == 0
    assert held_by_it(2 * GIB, 40 * GIB, has_neighbours=True) == 2 * GIB, "the driver knows whose it was"
    assert held_by_it(None, 40 * GIB, has_neighbours=False) == 40 * GIB


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"), True),
        (CudaError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE"), False),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (CandidateFault(Fault.OUT_OF_MEMORY, "the reference's own child"), True),
        (CandidateFault(Fault.TIMEOUT, "out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so
