"""What of the GPU bench needs no GPU: batches, names of kernels, places of outputs."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import types
import weakref
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch

from kbrl_async.kernels.cuda_driver import CudaError, Driver
from kbrl_async.kernels.settings import TimingBench
from kbrl_async.kernels.verify import bench_options
from kbrl_async.kernels.verify.compare import difference
from kbrl_async.kernels.verify.cpu.trace import BEFORE
from kbrl_async.kernels.verify.cuda import arena, capture, device
from kbrl_async.kernels.verify.cuda import proof as cuda_proof
from kbrl_async.kernels.verify.cuda.capture import CapturedForwards, tensors_kept_by
from kbrl_async.kernels.verify.cuda.own_kernels import CapturedKernels, without_chance
from kbrl_async.kernels.verify.cuda.reference import MAX_BATCH, ReferencePlan, plan
from kbrl_async.kernels.verify.cuda.replay.session import ReplaySession
from kbrl_async.kernels.verify.cuda.replay.stretches import stretches_of
from kbrl_async.kernels.verify.cuda.session import CudaSession, place_outputs
from kbrl_async.kernels.verify.cuda.sides import Sides, batch_for
from kbrl_async.kernels.verify.cuda.telling import begin_gradients
from kbrl_async.kernels.verify.input_set import InputSet
from kbrl_async.kernels.verify.known import Held
from kbrl_async.kernels.verify.proof import IN_PLACE, Finding
from kbrl_async.kernels.verify.tolerance import Tolerance
from kbrl_async.kernels.verify.wire import Captured, TensorMeta, Trace
from protocols.records import Candidate, Fault

GB = 1 << 30


def test_a_short_kernel_is_timed_in_a_batch_and_a_long_one_alone() -> None:
    assert plan(4_000, 1 << 20, 80 * GB, 3).batch == MAX_BATCH
    assert plan(100_000, 1 << 20, 80 * GB, 3).batch == 6
    assert plan(5_000_000, 1 << 20, 80 * GB, 3).batch == 1


def test_a_batch_ends_where_memory_does() -> None:
    assert plan(4_000, GB, 80 * GB, 3).batch == 4


def test_a_batch_of_training_holds_a_gigabyte_and_as_many_slots_as_sets_are_checked_in() -> None:
    assert plan(60_000, GB // 4, 80 * GB, 3) == ReferencePlan(10, 10)
    assert plan(60_000, GB // 4, 80 * GB, 3, is_brief=True) == ReferencePlan(4, 4)
    assert plan(60_000, GB, 80 * GB, 3, is_brief=True) == ReferencePlan(3, 3), "a race between forwards would show"
    assert plan(4_000, 1 << 20, 80 * GB, 3, is_brief=True) == plan(4_000, 1 << 20, 80 * GB, 3)


def test_a_kernel_that_is_clearly_slower_is_timed_in_few_forwards_and_any_other_in_all() -> None:
    sixteen, reference_ns = ReferencePlan(16, 16), 40_000.0
    slower = {299_000.0: 16, 310_000.0: 8, 1e6: 4, 2e6: 2, 3e6: 1}
    assert {ns: batch_for(sixteen, reference_ns, ns) for ns in slower} == slower
    assert batch_for(sixteen, reference_ns, math.inf) == 16
    assert batch_for(sixteen, 2e6, 3e6) == 16


def test_large_inputs_get_fewer_slots_but_never_the_same_twice_in_a_row() -> None:
    assert plan(5_000_000, 12 * GB, 80 * GB, 3).slots == 2


@pytest.mark.parametrize(
    ("kernel", "source"),
    [
        ("add_kernel", "@triton.jit\ndef add_kernel(x): pass"),
        ("_Z3addPKfS0_Pfi", "__global__ void add(const float*a) {}"),
        ("_ZN2my5scaleIfEEvPKT_", "template <typename T>\n__global__ void scale(const T *x) {}"),
        ("void my::scale<float>(float const*)", "template <typename T> __global__ void scale(const T *x) {}"),
        ("bounded", "__global__ void __launch_bounds__(256) bounded(float *x) {}"),
    ],
)
def test_a_kernel_that_the_source_defines_is_its_own(kernel: str, source: str) -> None:
    assert cuda_proof.own_kernels([kernel], source) == [kernel]


@pytest.mark.parametrize(
    "kernel",
    [
        "_ZN2at6native29vectorized_elementwise_kernelILi4EE",
        "ampere_sgemm_128x64_nn",
        "_ZN7cutlass7Kernel2I43cutlass_80_simt_sgemm_256x128_8x4_nn_align1EEvNT_6ParamsE",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
        "somebody_elses",
    ],
)
def test_a_librarys_kernel_is_not_its_own_even_where_the_source_defines_its_name(kernel: str) -> None:
    source = "def ampere_sgemm_128x64_nn(): pass\ndef cutlass(): pass\ndef Kernel2(): pass\n# somebody_elses\n"
    assert cuda_proof.own_kernels([kernel], source) == []


def test_a_kernel_named_in_a_comment_only_is_not_defined() -> None:
    assert cuda_proof.defined("/* __global__ void add(float *x) {} */") == set()


def test_a_share_is_told_where_time_tells_it_or_there_is_nothing_else() -> None:
    mixed, own = {"mine": 1, "aten::mm": 1}, ["mine"]
    assert cuda_proof.told_share(mixed, own, 100_000.0, 75_000.0) == 0.25
    assert cuda_proof.told_share(mixed, own, 10_000.0, 7_500.0) is None
    assert cuda_proof.told_share({"mine": 1}, own, 10_000.0, 9_000.0) == 1.0


def test_own_kernels_next_to_nothing_prove_nothing_where_time_says_something() -> None:
    """An activation between a convolution and a norm was called cheating for its .4 %: that is one fact, not two."""
    names = {"mine": 1, "ampere_sgemm": 1}
    assert cuda_proof.of_share(names, ["mine"], 100_000, 90_000) is None
    assert cuda_proof.of_share(names, ["mine"], 5_000, 5_000) is None
    found = cuda_proof.of_share(names, ["mine"], 100_000, 99_900)
    assert found is not None
    assert (found.rule, found.fault) == ("decoy_kernel", Fault.UNPROVEN)


@pytest.mark.parametrize(
    ("alone_ns", "fault"),
    [
        (7_000.0, None),  # what comes next only waits longer without it
        (9e9, None),  # who spins there alone is told no larger share
        (200.0, Fault.UNPROVEN),
        (0.0, Fault.UNPROVEN),  # it faults there
    ],
)
def test_a_small_share_is_looked_at_once_more_by_itself(alone_ns: float, fault: Fault | None) -> None:
    sides, drawn = Mock(nominal=Mock(mutated=False, degenerate=False), limit_s=1.0, batch=1), list[int]()
    sides.nominal.tolerances, sides.reference.slots = [Tolerance(0.0, 0.0)], [[torch.full((4,), -7.0)]]
    sides.reference.call.return_value.tensors = [None]
    sides.fill = lambda slots: drawn.append(slots[0])
    sides.reference.read = lambda meta: torch.arange(40) * (10.0 + len(drawn)) + 5
    sides.differ = lambda got, wanted: difference(got[0], wanted[0], Tolerance(0.0, 0.0))
    poison = torch.full((1, 40), 1e9)
    sides.candidate = candidate = Mock(spec=cast(Any, ReplaySession), bare_trace=None, outputs=lambda *slots: [poison])
    candidate.own_kernels.return_value, candidate.secret_slots.return_value = ["own"], [0]
    candidate.muted.return_value, candidate.own_alone.return_value = (100_000.0, 99_600.0), alone_ns
    candidate.answered.return_value = ""
    checker = Mock()
    checker.reference.declared.backward = ""
    found = CapturedKernels(checker, sides).finding(Captured(0, {"own": 1, "library": 1}), Candidate("", "cuda"))
    assert (found and found.fault) == fault
    assert checker.own_share == pytest.approx(0.004)


def test_what_is_loaded_before_a_fork_never_asks_for_a_gpu() -> None:
    code = "import torch, sys; torch.cuda.is_available = lambda: 1 / 0; torch.cuda.device_count = lambda: 2 / 0; "
    code += "asked = torch.cuda.is_available; code = asked.__code__; "
    code += "import kbrl_async.kernels.verify.cuda.runner; assert 'torch.utils.cpp_extension' in sys.modules; "
    code += "assert torch.cuda.is_available is asked, 'torch keeps what it is, to know it again'; "
    code += "assert asked.__code__ is code"
    environment = {"CUDA_HOME": "/nowhere", "PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_references_process_imports_nothing_to_know_how_large_a_problem_is() -> None:
    source = "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "        self.conv = torch.nn.Conv2d(3, 8, 3)\n"
    source += "    def forward(self, x): return self.conv(x).softmax(1).sum()\n"
    source += "def get_inputs(): return [torch.randn(1000, 3, 300, 300)]\ndef get_init_inputs(): return []"
    code = "import sys; from kbrl_async.kernels.verify.cuda.runner import outlined; before = set(sys.modules); "
    code += f"assert outlined({source!r}) == (1_080_000_000, 4); print(sorted(set(sys.modules) - before))"
    run = [sys.executable, "-c", code]
    said = subprocess.run(run, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}).stdout
    assert said.strip() == "[]"


def test_outputs_of_slots_do_not_overlap_and_a_wide_version_of_one_slot_fits() -> None:
    outs = [TensorMeta("float32", (3, 5), (5, 1), 0), TensorMeta("float16", (7,), (1,), 0)]
    placed, end = place_outputs(outs, 1, 1024, True)
    assert [(meta.place, step) for meta, step in placed] == [(1024, 512), (1536, 512)]
    assert end == 2048
    big = [TensorMeta("float32", (4096,), (1,), 0)]
    assert place_outputs(big, 1, 0, True)[1] == 4096 * 8
    assert place_outputs(big, 1, 0, False)[1] == 4096 * 4, "of a candidate nobody asks for fp64"


def test_a_bench_takes_no_more_of_its_gpu_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: taken.append(given))
    monkeypatch.setattr(device, "GpuHealth", lambda where: None)
    monkeypatch.setattr(device, "Passes", lambda where: None)
    monkeypatch.setattr(device, "reservations_on", lambda where: None)
    monkeypatch.setattr("kbrl_async.kernels.verify.fused.use", lambda where, way: None)
    device.CudaDevice("cuda:1").open(0.25)
    assert taken == [(0.25, torch.device("cuda", 1))]


def test_a_gpu_without_a_number_is_the_first_one() -> None:
    """Torch takes no device without an index where one is set, or given a share of its memory."""
    bare = device.CudaDevice("cuda")
    assert bare.name == "cuda:0"
    assert bare.fitted(bench_options(TimingBench(), "cuda")).device == "cuda:0", "children are told so, too"


def test_what_own_kernels_wrote_before_is_of_other_inputs_when_they_are_left_out() -> None:
    """A whole forward over the same inputs would leave them what they are to make."""
    ran: list[str] = []
    batch = cast(Any, CapturedForwards.__new__(CapturedForwards))
    batch._driver, batch.kernels, batch.outputs = Mock(), {"own": [1], "library": [2]}, [[torch.ones(2)]]
    batch._captured, enabled = [Mock()], {1: True, 2: True}
    batch._driver.call = lambda name, *given: enabled.update({given[1]: bool(given[2])}) if "Enabled" in name else None

    def alone(graph: object) -> float:
        ran.append("+".join(str(node) for node in enabled if enabled[node]))
        return 1.0

    batch._alone = alone
    batch.without(["own"], lambda outputs: ran.append("kept"))
    assert ran == ["", "2", "kept", "1+2"]


def judged_by_share(lefts: list[float], wholes: list[float] | None = None) -> Finding | None:
    """Of a kernel whose forward takes 100 µs whole, and this without own kernels, each time that it is looked at."""
    wholes = wholes or [100_000.0] * len(lefts)
    sides = Mock()
    sides.candidate.own_kernels.return_value = ["own"]
    kernels = CapturedKernels(Mock(), sides)
    with patch.object(kernels, "without", lambda own, slot: (wholes.pop(0), lefts.pop(0), False, "")):
        return kernels.finding(Captured(0, {"own": 1, "library": 1}), Candidate("", "triton"))


def test_times_that_others_made_longer_accuse_nobody() -> None:
    assert judged_by_share([100_000.0, 120_000.0, 60_000.0]) is None
    assert judged_by_share([100_000.0] * 9) is not None


def test_a_decoy_is_not_acquitted_by_what_others_add_to_one_of_many_looks() -> None:
    assert judged_by_share([99_900.0] * 9, [100_000.0, 103_000.0, 100_000.0, 130_000.0, *[101_500.0] * 5]) is not None


def proven_backward(behind: tuple[int, ...] | None, is_right: bool) -> tuple[Finding | None, list[str]]:
    """Of a replay whose gradients are right, or not, without these kernels, and what was done for it."""
    sides, checker, done = Mock(nominal=Mock(degenerate=False), limit_s=1.0), Mock(), list[str]()
    session = cast(Any, ReplaySession.__new__(ReplaySession))
    session.secret_slots = lambda count, most: [5]
    session.own_behind = lambda inputs, slot: behind if (list(inputs), slot) == ([1], 5) else None
    session.without = lambda nodes, slot, deadline_s: done.append(f"without {nodes} of {slot}")
    session.outputs = lambda *given: []
    sides.candidate, sides.fill = session, lambda slots: done.append(f"drawn {slots}")
    sides.nominal.mutated, sides.nominal.tolerances = False, []
    sides.reference.call.return_value.tensors = []
    sides.differ.return_value.wrong = 0 if is_right else 3
    checker.reference = Mock(tree=["L", [["T", 0], ["L", [["T", 1]]]]])
    checker.reference.declared.backward = "all"
    return CapturedKernels(checker, sides).of_backward(), done


def test_gradients_that_are_right_without_own_kernels_of_the_backward_are_the_librarys() -> None:
    found, done = proven_backward((2, 3), True)
    assert done == ["drawn [5]", "without (2, 3) of 5"] * 3
    assert found is not None
    assert (found.rule, found.fault) == ("decoy_kernel", Fault.CHEATING)
    assert proven_backward((2, 3), False)[0] is None


def test_a_backward_without_own_kernels_proves_nothing_and_accuses_nobody() -> None:
    found, done = proven_backward((), True)
    assert found is not None
    assert (found.rule, found.fault, done) == ("no_own_kernel", Fault.UNPROVEN, [])
    assert proven_backward(None, True) == (None, []), "what nobody is seen to read may go by a table of pointers"


def test_gradients_of_who_is_only_watched_are_not_proven() -> None:
    """A decoy for gradients was accepted on a GPU where its kernel had not been compiled ahead."""
    sides, checker = Mock(nominal=Mock(degenerate=False)), Mock(trust_reason="own was compiled when it was called")
    checker.reference.declared.backward = "inputs"
    found = CapturedKernels(checker, sides).of_backward()
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
    assert "compiled when it was called" in found.text
    checker.reference.declared.backward = ""
    assert CapturedKernels(checker, sides).of_backward() is None


def test_what_an_earlier_call_left_is_no_answer_where_all_calls_have_the_same() -> None:
    stale, operator = Trace(answered=BEFORE), Trace(answered="aten::mm")
    assert [getattr(without_chance(one), "answered", None) for one in (stale, operator, None)] == [
        "",
        "aten::mm",
        None,
    ]


def test_a_host_without_threads_for_gradients_refuses_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "backward", Mock(side_effect=RuntimeError("Resource temporarily unavailable")))
    begin_gradients()


def test_parts_of_an_answer_that_lie_side_by_side_are_found_as_one() -> None:
    assert stretches_of([(0, 512), (512, 1024), (2048, 2560)], 1024) == [0]
    assert stretches_of([(0, 1024)], 1024) == [], "that one was looked at by itself"
    assert stretches_of([(0, 512), (1024, 1536)], 1024) == [], "nobody wrote what lies between"


def test_inputs_that_a_forward_changes_are_drawn_again_before_it_runs_without_own_kernels() -> None:
    """Timed forwards have changed them; the answer then is another than the one that is expected."""
    sides = Mock(nominal=Mock(mutated=True, degenerate=False, tolerances=[]), limit_s=1.0)
    sides.reference.slots, drawn = [[], [], []], list[str]()
    session = cast(Any, ReplaySession.__new__(ReplaySession))
    session._host, session.poison = Mock(), lambda: None
    session._least = lambda slot, is_muted, deadline_s: drawn.append("timed") or 9.0
    session.run = lambda *given, **named: drawn.append("run")
    session.outputs, session.answered = lambda *given: [], lambda *given: ""
    session._host.timed.return_value = 1.0
    sides.candidate, sides.fill = session, lambda slots: drawn.append("drawn")
    sides.reference.call.return_value.tensors = []
    CapturedKernels(Mock(), sides).without(["own"], 2)
    assert drawn == ["drawn", "timed", "timed", "drawn", "run"]


class Chain:
    """A side whose forward doubles, or, from the second one of a timed run on, does so up to a limit."""

    is_trusted, is_proven = True, False

    def __init__(self, most: float) -> None:
        self.slots = [[torch.zeros(4)] for _ in range(16)]
        self._most, self._made = most, [torch.zeros(4)] * 16
        self.poison = Mock()

    def replay(self, times: int, deadline_s: float) -> None:
        for number, (inputs,) in enumerate(self.slots):
            self._made[number] = 2 * (inputs.clamp(max=self._most) if number else inputs)

    def outputs(self, first: int, end: int) -> list[torch.Tensor]:
        return [torch.stack(self._made[first:end])]


@pytest.mark.parametrize(("spared", "is_found"), [(0, True), (3, False)])
def test_a_timed_run_is_right_of_secret_sets_too(spared: int, is_found: bool) -> None:
    """Else a kernel that counts its forwards need be right of such inputs alone as timed calls get."""
    large = InputSet("large", Held([torch.full((4,), 9.0)], [torch.full((4,), 18.0)]), [Tolerance(1e-4, 1e-4)], False)
    for most in (math.inf, 2.0):
        sides = cast(Any, Sides.__new__(Sides))
        sides.reference, sides.candidate = Chain(math.inf), Chain(most)
        sides.batch, sides.limit_s, sides._rng = 16, 1.0, random.Random(1)
        sides.nominal = Mock(mutated=False, tolerances=[Tolerance(1e-4, 1e-4)])
        sides._checker = Mock(spared=spared, reference=Mock(sets=[large] * 10, keeps_sets=True))
        sides._checker.compare = lambda got, wanted, allowed: difference(got[0], wanted[0], allowed[0])
        sides.fill = lambda slots: None
        assert sides._replays_rightly() is not (is_found and most == 2.0)


class _Generator:
    """Torch's: a capture that breaks never tells it of its end, and then no graph can be replayed."""

    is_capturing = False


class _Capture:
    def __init__(self, keep_graph: bool = False) -> None:
        self.breaks = keep_graph

    def capture_begin(self, **given: Any) -> None:
        _Generator.is_capturing = True

    def capture_end(self) -> None:
        if self.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        _Generator.is_capturing = False


class _Recurrent(torch.nn.Module):
    """Keeps its hidden state, as KernelBench's L3/33 does: each call writes into the one of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(4)
        self.cached = [(torch.ones(3), {"deeper": torch.ones(5)})]
        self.inner = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        self.hidden.copy_(first)
        self.hidden = self.hidden + 1
        return self.hidden


def test_what_a_graph_writes_to_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was given back once the model had replaced it, and the next replay was an illegal access."""
    model, seen = _Recurrent(), list[weakref.ref[torch.Tensor]]()

    def forward(slot: int) -> list[torch.Tensor]:
        seen.append(weakref.ref(model.hidden))
        return [model(torch.ones(4)).clone()]

    monkeypatch.setattr(capture, "PLAIN", Mock)
    monkeypatch.setattr(capture, "thread_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    driver = types.SimpleNamespace(event=int, call=lambda *given: None, nodes=lambda graph: [])
    flush = types.SimpleNamespace(chained=lambda *given: 0)
    made = CapturedForwards(cast(Any, driver), cast(Any, flush), forward, 1, lambda: tensors_kept_by(model))
    _, of_the_graph = seen
    assert of_the_graph() is not None
    del made
    assert of_the_graph() is None, "and no longer"


def test_what_lies_deeper_in_a_model_is_known_too() -> None:
    assert sorted(tensor.numel() for tensor in tensors_kept_by(_Recurrent())) == [2, 3, 4, 4, 5]
    assert tensors_kept_by(lambda x: x) == []


@pytest.mark.parametrize("is_late", [False, True], ids=["in a call", "at its end"])
def test_a_capture_that_breaks_is_over_for_torchs_generator(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Who is watched, because it can't be captured, replays graphs of its own afterwards."""

    def forward(slot: int) -> list[torch.Tensor]:
        if _Generator.is_capturing and not is_late:
            raise RuntimeError("operation not permitted when stream is capturing")
        return []

    monkeypatch.setattr(capture, "PLAIN", _Capture)
    monkeypatch.setattr(capture, "thread_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    driver = types.SimpleNamespace(event=int, call=lambda *given: None)
    with pytest.raises(RuntimeError, match="previous error" if is_late else "not permitted"):
        CapturedForwards(cast(Any, driver), cast(Any, None), forward, 1)
    assert not _Generator.is_capturing


@pytest.mark.parametrize(
    ("refused", "is_reserved", "undone"),
    [
        ("cuMemAddressReserve", False, ["cuMemRelease"]),
        ("cuMemMap", False, ["cuMemAddressFree", "cuMemRelease"]),
        ("cuMemMap", True, ["cuMemRelease"]),
        ("cuMemSetAccess", False, ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
        ("cuMemSetAccess", True, ["cuMemUnmap", "cuMemRelease"]),
    ],
)
def test_memory_that_can_not_be_mapped_is_given_back(
    refused: str, is_reserved: bool, undone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full GPU there may be none for its page tables. Addresses that were reserved before stay so."""
    called: list[str] = []

    def call(name: str, *_: Any) -> None:
        called.append(name)
        if name == refused:
            raise CudaError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    made = Driver.__new__(Driver)
    monkeypatch.setattr(made, "call", call)
    monkeypatch.setattr(arena, "driver", lambda: made)
    with pytest.raises(CudaError):
        arena.DeviceArena(7, 1 << 21, torch.device("cuda", 0), arena.BASE if is_reserved else 0, is_reserved)
    assert called[called.index(refused) + 1 :] == undone


def accused(
    wholes: list[list[Any]], made: list[list[Any]], allowed: float = 0.0, is_operators: bool = False
) -> tuple[Finding | None, int]:
    """Of a kernel without which forward makes these, or an operator of it does, where those are expected; and how often
    it was drawn.
    """
    sides, drawn = Mock(nominal=Mock(mutated=False, degenerate=False), limit_s=1.0, batch=1), list[int]()
    sides.nominal.tolerances = [Tolerance(0.0, allowed)]
    sides.reference.slots = [[torch.full((4,), -7)]]
    sides.reference.call.return_value.tensors = [None]
    sides.reference.read = lambda meta: torch.tensor(wholes[len(drawn) - 1])
    sides.fill = lambda slots: drawn.append(slots[0])
    sides.candidate.own_kernels.return_value = ["own"]
    sides.candidate.muted.return_value = (100_000.0, 50_000.0)
    result = lambda: torch.tensor(made[len(drawn) - 1])  # noqa: E731
    poison = torch.full((1, len(wholes[0])), 1e9)
    sides.candidate.outputs = lambda *given: [poison if is_operators else result()[None]]
    sides.candidate.answered = lambda is_it, *given: "aten::mm" if is_operators and is_it(result()) else ""
    sides.differ = lambda got, wanted: difference(got[0], wanted[0], Tolerance(0.0, allowed))
    checker = Mock()
    checker.reference.declared.backward = ""
    found = CapturedKernels(checker, sides).finding(Captured(0, {"own": 1, "library": 1}), Candidate("", "triton"))
    return found, len(drawn)


def test_whole_numbers_that_are_right_by_chance_accuse_nobody() -> None:
    """`x & y` with 0x7F… for x is y, which is right where x has all bits of y: an honest kernel was a decoy."""
    assert accused([[3, 2, 1], [1, 2, 0]], [[3, 2, 1], [3, 2, 1]]) == (None, 2)
    finding, looks = accused([[3, 2, 1], [1, 2, 0], [3, 0, 1], [1, 0, 1]], [[3, 2, 1], [1, 2, 0], [3, 0, 1], [1, 0, 1]])
    assert finding is not None
    assert (finding.rule, looks) == ("decoy_kernel", 4)


def test_a_draw_whose_answer_is_the_same_everywhere_says_nothing_of_own_kernels() -> None:
    nothing = [0, 0, 0]
    assert accused([nothing] * 9, [nothing] * 9) == (None, 9)
    finding, looks = accused([[1, 0, 0], nothing, nothing, [0, 1, 0]], [[1, 0, 0], nothing, nothing, [0, 0, 0]])
    assert (finding, looks) == (None, 4)
    told = [[1, 0, 0], nothing, [0, 1, 0], [0, 1, 1], nothing, [1, 1, 0]]
    finding, looks = accused(told, told)
    assert finding is not None
    assert looks == 6


@pytest.mark.parametrize("is_operators", [False, True])
def test_where_an_answer_to_other_inputs_is_right_too_only_a_nearer_one_accuses(is_operators: bool) -> None:
    """A vision transformer's answer hardly depends on its input, nor does a loss of random rows: right within their
    tolerance is what an honest candidate makes of poison, too.
    """
    answers = [[8.0 + n / 100, 1.0, 2.0] for n in (0, 3, 1, 5, 2, 4)]
    of_poison = [[8.0 + n / 100, 1.0, 2.0] for n in (5, 0, 4, 1, 5, 0)]
    assert accused(answers, of_poison, 0.1, is_operators)[0] is None
    finding, looks = accused(answers, answers, 0.1, is_operators)
    assert finding is not None
    assert (finding.rule, looks) == ("decoy_kernel", 4)


@pytest.mark.parametrize("is_one_row", [False, True])
def test_an_answer_within_a_larger_result_is_the_librarys(is_one_row: bool) -> None:
    """One row of several, or the first half of one: a batch of one is no slot."""
    wholes = [[float(n + place) ** 2 for place in range(16)] for n in range(4)]
    larger = [
        [[*whole, *[0.5] * 16]] if is_one_row else [[0.5] * 16, whole, [float(n)] * 16]
        for n, whole in enumerate(wholes)
    ]
    finding, looks = accused(wholes, larger, is_operators=True)
    assert finding is not None
    assert (finding.rule, looks) == ("decoy_kernel", 4)


def test_of_one_answer_to_all_inputs_nothing_is_proven() -> None:
    """Inputs that seed themselves: a copy of the library's answer passed, and by chance a right one is no copy."""
    same = [[1, 0, 2]] * 9
    finding, looks = accused(same, same)
    assert finding is not None
    assert (finding.fault, looks) == (Fault.UNPROVEN, 9)
    assert accused(same, [[1, 0, 3]] * 9) == (None, 1)


def test_where_a_large_answer_begins_with_what_never_changes_a_copy_is_found() -> None:
    padded = [[0] * (1 << 20) + [n, n + 1] for n in range(9)]
    finding, looks = accused(padded, padded)
    assert finding is not None
    assert (finding.rule, looks) == ("decoy_kernel", 4)


def test_a_first_draw_that_says_nothing_is_no_acquittal() -> None:
    """Two numbers behind a ReLU are both zero one time in four: so often a copy of the library's result passed."""
    told = [[0, 0], [3, 1], [0, 0], [2, 0], [4, 1], [0, 5]]
    finding, looks = accused(told, told, 0.0, is_operators=True)
    assert finding is not None
    assert looks == 6


def of_written_input(changes: list[float], answers: list[float], is_replayed: bool = True) -> tuple[bool, str]:
    """Of a forward that writes over its input: what it leaves there without own kernels, and what is expected."""
    sides = Mock(nominal=Mock(mutated=True, degenerate=False, tolerances=[Tolerance(1e-4, 1e-4)]), limit_s=1.0)
    place = torch.tensor([1.0, 2.0, 3.0])
    sides.reference.slots, sides.candidate.slots = [[place.clone()]], [[place]]
    sides.reference.call.return_value.tensors = [None]
    sides.reference.read = lambda meta: torch.tensor(answers)
    session = cast(Any, ReplaySession if is_replayed else CudaSession)
    sides.candidate = Mock(spec=session, slots=sides.candidate.slots)
    sides.candidate.outputs = lambda *given: [torch.full((1, 3), 1e9)]
    sides.candidate.answered = lambda *given: ""
    sides.differ = lambda got, wanted: difference(got[0], wanted[0], Tolerance(1e-4, 1e-4))

    def muted(*given: Any) -> tuple[float, float]:
        place.copy_(torch.tensor(changes))
        return 1.0, 1.0

    sides.candidate.muted = muted
    return CapturedKernels(Mock(), sides).without(["own"], 0)[2:]


def test_an_answer_that_the_library_leaves_in_an_input_is_its_own() -> None:
    """A shift by slices that are written over each other: its copy passed."""
    assert of_written_input([3.0, 1.0, 2.0], [3.0, 1.0, 2.0]) == (False, IN_PLACE)
    assert of_written_input([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]) == (False, "")
    assert of_written_input([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (False, ""), "a step that changes nothing"


def test_of_who_is_only_watched_a_whole_forward_wrote_last() -> None:
    """Whoever wrote its answer over an input was a decoy."""
    assert of_written_input([3.0, 1.0, 2.0], [3.0, 1.0, 2.0], is_replayed=False) == (False, "")


def test_what_is_filled_before_its_parts_are_copied_there_is_put_together() -> None:
    assert stretches_of([(0, 1024), (0, 512), (512, 1024)], 1024) == [0]
    assert stretches_of([(0, 1024), (0, 512)], 1024) == []
