"""Of who is watched on a GPU and not replayed: whether its own kernels are needed. No GPU is asked here."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock, patch

import msgspec
import numpy as np
import pytest
import torch

from kbrl_async.kernels.backends.launch.recorder import RECORDER
from kbrl_async.kernels.verify import compare, wire
from kbrl_async.kernels.verify.cpu.own_kernels import OwnKernels
from kbrl_async.kernels.verify.cpu.replay import CpuReplaySession
from kbrl_async.kernels.verify.cpu.runner import Runner
from kbrl_async.kernels.verify.cuda.device import CudaDevice
from kbrl_async.kernels.verify.cuda.own_kernels import CapturedKernels
from kbrl_async.kernels.verify.cuda.runner import CudaRunner
from kbrl_async.kernels.verify.cuda.session import CudaSession
from kbrl_async.kernels.verify.hoarding import NoMemory
from kbrl_async.kernels.verify.proof import Finding
from kbrl_async.kernels.verify.session import CandidateFault, ForwardOutcome
from kbrl_async.kernels.verify.tolerance import Tolerance
from protocols.records import Fault

Forward = Callable[[torch.Tensor], torch.Tensor]
ALLOWED = [Tolerance(1e-4, 1e-4)]


def launched(x: torch.Tensor, y: torch.Tensor, function: Forward) -> torch.Tensor:
    """An own kernel that writes into `y`, as each launcher does it."""
    if RECORDER.tape is not None:
        RECORDER.tape("own", (x, y), [])
    RECORDER.call("own", lambda: y.copy_(function(x)))
    return y


def own(x: torch.Tensor, function: Forward) -> torch.Tensor:
    return launched(x, torch.empty_like(x).fill_(7.0), function)


def copied(x: torch.Tensor) -> torch.Tensor:
    return x


def tanh_unseen(x: torch.Tensor) -> torch.Tensor:
    """By none of the library's operators."""
    return torch.from_numpy(np.tanh(x.numpy()))


def decoy(x: torch.Tensor) -> torch.Tensor:
    return own(torch.tanh(x), lambda found: found)


def suspicious(x: torch.Tensor) -> torch.Tensor:
    """A decoy that fails where its kernel did not run."""
    y = decoy(x)
    if bool((y == 7.0).all()):
        raise ValueError("nothing was written")
    return y


def honest(x: torch.Tensor) -> torch.Tensor:
    return own(x * 2, lambda doubled: torch.from_numpy(np.tanh(doubled.numpy() / 2)))


def idle(x: torch.Tensor) -> torch.Tensor:
    own(x, torch.exp)
    return torch.tanh(x)


def unseen(x: torch.Tensor) -> torch.Tensor:
    """By a way that no launcher sees."""
    return torch.from_numpy(np.tanh(x.numpy()))


class Pool:
    """Memory as torch's allocator hands it out: of what was given back the lowest, with whatever lies there."""

    def __init__(self, size: int = 64) -> None:
        self._blocks = [torch.full((size,), float(number)) for number in range(16)]
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}

    def empty(self) -> torch.Tensor:
        free = (n for n in range(len(self._blocks)) if n not in self._given or self._given[n]() is None)
        number = next(free)
        given = self._blocks[number][:]
        self._given[number] = weakref.ref(given)
        return given


def turned(x: torch.Tensor) -> torch.Tensor:
    """Of a problem that only brings elements into another order."""
    return x.view(8, 8).t()


def copies_what_was_turned(x: torch.Tensor) -> torch.Tensor:
    return own(turned(x).contiguous(), lambda found: found)


def turns_a_copy(x: torch.Tensor) -> torch.Tensor:
    return own(x.clone(), lambda found: turned(found).reshape(-1)).view(8, 8)


class Child:
    """The runner of a watched candidate, over memory that both hold."""

    def __init__(self, forward: Forward, size: int = 64) -> None:
        self.arena, self.place = torch.zeros(size), torch.zeros(size)
        self.runner = cast(Any, CudaRunner.__new__(CudaRunner))
        self.runner.slots, self.runner.model = [[self.place]], forward
        self.runner._outs = [["where the output of slot 0 goes"]]
        shape = forward(self.place).shape
        self.runner._shared = types.SimpleNamespace(view=lambda meta: self.arena.view(shape))
        self.runner.last, self.runner.held = None, [None, None]
        self.runner._places, self.runner._batch, self.runner.double = (lambda tensors: []), None, None
        self.runner.channel = types.SimpleNamespace(send=self._told)
        self._trace: wire.Trace | None = None

    def _told(self, data: bytes) -> None:
        self._trace = msgspec.msgpack.decode(data, type=wire.Done).trace

    def call(self, op: int, slot: int, deadline_s: float) -> ForwardOutcome:
        """Copies, as a child makes them: what it keeps itself is what its runner keeps."""
        try:
            self.runner._go(op, slot, 0)
        except ValueError as error:
            raise CandidateFault(Fault.RUNTIME_ERROR, str(error)) from error
        result = [] if self.runner.last is None else [self.runner.last.clone()]
        return ForwardOutcome(0, 0, 0, ["V", None], result, self._trace)

    def watched_forward(self, op: int, answer: list[torch.Tensor], deadline_s: float) -> ForwardOutcome:
        self.arena.copy_(answer[0].reshape(-1))
        return self.call(op, 0, deadline_s)


def watched(
    child: Child,
    keeps_sets: bool = True,
    right: Forward = torch.tanh,
    is_mutated: bool = False,
    draw: Callable[[], torch.Tensor] | None = None,
) -> CapturedKernels:
    session = cast(Any, CudaSession.__new__(CudaSession))
    session.slots, session.call, session.watched_forward = [[child.place]], child.call, child.watched_forward
    reference, sides = Mock(slots=[[torch.zeros_like(child.place)]]), Mock(limit_s=1.0)
    reference.call = lambda *given: Mock(tensors=[right(reference.slots[0][0])])
    reference.look = lambda answer: answer
    sides.nominal.degenerate, sides.nominal.mutated = False, is_mutated
    sides.nominal.tolerances = ALLOWED
    sides.reference, sides.candidate = reference, session

    def fill(slots: list[int]) -> None:
        child.place.copy_(torch.randn_like(child.place) if draw is None else draw())
        reference.slots[0][0].copy_(child.place)

    sides.fill = fill
    sides.differ = lambda got, expected: compare.difference(got[0], expected[0], ALLOWED[0])
    checker = Mock(reference=Mock(keeps_sets=keeps_sets))
    checker.outputs = lambda outcome: outcome.tensors
    return CapturedKernels(checker, sides)


def found_of(forward: Forward, keeps_sets: bool = True, right: Forward = torch.tanh) -> Finding | None:
    return watched(Child(forward), keeps_sets, right).of_watched()


@pytest.mark.parametrize("keeps_sets", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("forward", [decoy, suspicious])
def test_a_copy_of_the_librarys_result_is_a_decoy_where_it_is_only_watched(forward: Forward, keeps_sets: bool) -> None:
    """Such were accepted wherever forward could be captured: nobody looked at the operators' results."""
    found = found_of(forward, keeps_sets)
    assert found is not None
    assert (found.rule, found.fault) == ("decoy_kernel", Fault.CHEATING)
    assert "aten::tanh" in found.text


def test_who_needs_its_own_kernels_passes() -> None:
    assert found_of(honest) is None


@pytest.mark.parametrize("answers", [1, 2])
def test_memory_that_torch_hands_out_again_is_no_answer(answers: int) -> None:
    """What a child keeps of earlier calls came back just when its kernels were off, with the answer to these very
    inputs in it: each honest kernel that was watched, with an output of `torch.empty`, was a decoy. `answers`: of
    outputs that it has of its own, in turns.
    """
    pool, own_outputs = Pool(), [torch.zeros(64) for _ in range(answers)]

    def keeps_its_outputs(x: torch.Tensor) -> torch.Tensor:
        own_outputs.append(own_outputs.pop(0))
        return launched(x, own_outputs[-1], tanh_unseen)

    assert found_of(lambda x: launched(x, pool.empty(), tanh_unseen)) is None
    assert found_of(keeps_its_outputs) is None


def test_nor_is_it_one_where_the_answer_to_other_inputs_is_right() -> None:
    """A sum of sigmoids over an image hardly moves: what an own kernel had copied of a call before was good enough, and
    an honest kernel was a decoy."""

    def hardly_moves(x: torch.Tensor) -> torch.Tensor:
        return 100 + 1e-5 * torch.tanh(x)

    pool = Pool()

    def copies_its_input(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(hardly_moves(launched(x, pool.empty(), copied)).numpy())

    def a_decoy(x: torch.Tensor) -> torch.Tensor:
        return own(hardly_moves(x), lambda found: found)

    for forward in (copies_its_input, a_decoy):
        found = found_of(forward, right=hardly_moves)
        assert found is not None
        assert (found.fault, "an answer to other inputs is right" in found.text) == (Fault.UNPROVEN, True)


def test_what_is_no_nearer_than_the_answer_to_other_inputs_needs_its_kernel() -> None:
    def moves_within(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(100 + 4e-3 * np.tanh(x.numpy()))

    pool = Pool()

    def copies_its_input(x: torch.Tensor) -> torch.Tensor:
        return moves_within(launched(x, pool.empty(), copied))

    assert found_of(copies_its_input, right=moves_within) is None


def test_nor_where_that_is_right_of_some_draws_only() -> None:
    """A mean of few numbers moves by about its tolerance: of two answers one was right of the other by chance. Whether
    it was so was asked before the first call alone, so that one of ten honest kernels was a decoy; 4 of 12,000
    are now.
    """

    def moves_a_little(x: torch.Tensor) -> torch.Tensor:
        return (100 + 0.4 * x.mean()).reshape(1).expand(64) + torch.linspace(0, 1, 64)

    def of_its_memory() -> Fault | None:
        pool = Pool()

        def copies_its_input(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(moves_a_little(launched(x, pool.empty(), copied)).numpy())

        found = found_of(copies_its_input, right=moves_a_little)
        return None if found is None else found.fault

    torch.manual_seed(0)  # whose draws accuse nobody
    assert Fault.CHEATING not in {of_its_memory() for _ in range(100)}


@pytest.mark.parametrize("fills", [4, 100])
def test_nor_where_other_inputs_are_the_same_ones(fills: int) -> None:
    """Complex, fp8 and sorted inputs are one of four draws, or of two: the calls over others could be over these."""
    pool, filled = Pool(), list[int]()

    def in_memory(x: torch.Tensor) -> torch.Tensor:
        return launched(x, pool.empty(), tanh_unseen)

    draws = [torch.randn(64), torch.randn(64)]

    def draw() -> torch.Tensor:
        """First another one, then the one that is asked about; and that again, `fills` times of which one is not."""
        filled.append(0)
        return draws[len(filled) == 1 or (len(filled) - 2) % fills == fills - 1]

    found = watched(Child(in_memory), draw=draw).of_watched()
    assert found is None if fills == 4 else found is not None and found.fault is Fault.UNPROVEN


@pytest.mark.parametrize("is_honest", [False, True])
def test_what_the_library_leaves_in_an_input_is_looked_at_where_it_is_only_watched(is_honest: bool) -> None:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1], 2 * x[:-1]])

    def in_place(x: torch.Tensor) -> torch.Tensor:
        x[1:] = x[:-1].clone() * (1 if is_honest else 2)
        if not is_honest:
            return own(x, lambda found: found)
        return own(x, lambda found: torch.from_numpy(np.concatenate([found[:1].numpy(), 2 * found[1:].numpy()])))

    found = watched(Child(in_place), right=right, is_mutated=True).of_watched()
    assert (found and (found.rule, found.fault)) == (None if is_honest else ("decoy_kernel", Fault.CHEATING))


def test_one_call_of_two_accuses_nobody() -> None:
    muted: list[int] = []

    def right_by_chance(x: torch.Tensor) -> torch.Tensor:
        y = honest(x)
        if RECORDER.is_muted:
            muted.append(1)
        return unseen(x) if RECORDER.is_muted and len(muted) == 1 else y

    found = found_of(right_by_chance)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
    assert len(muted) == 2


def test_a_kernel_that_nothing_needs_is_a_decoy() -> None:
    found = found_of(idle)
    assert found is not None
    assert found.rule == "decoy_kernel"


def test_launches_that_nobody_saw_prove_nothing_and_accuse_nobody() -> None:
    found = found_of(unseen)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)


def test_where_nothing_but_movement_is_asked_for_a_copy_of_the_librarys_is_a_decoy() -> None:
    found = found_of(copies_what_was_turned, right=turned)
    assert found is not None
    assert (found.rule, "aten::clone" in found.text) == ("decoy_kernel", True)
    assert found_of(turns_a_copy, right=turned) is None, "a copy of the input is no answer"


def test_a_decoy_that_fails_without_its_kernel_is_found_on_a_processor_too() -> None:
    runner = cast(Any, Runner.__new__(Runner))
    place = torch.randn(64)
    runner.slots, runner.model, runner.held = [[place]], suspicious, [None, torch.zeros(64)]
    assert runner._traced(0, True)[1].answered == "aten::tanh"
    runner.model = lambda x: own(x, torch.tanh).log_() if RECORDER.is_muted else 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner._traced(0, True)


def test_the_librarys_work_in_a_graph_of_its_own_is_neither_seen_nor_proven() -> None:
    def replays(x: torch.Tensor) -> torch.Tensor:
        y = honest(x)
        RECORDER.unseen = "aten::tanh"
        return y

    found = found_of(replays)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
    assert "aten::tanh" in found.text


def returned(x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
    """What an extension's function gives back; it is left out as a whole."""
    return RECORDER.call("own", function, x)


def half_tanh(x: torch.Tensor) -> torch.Tensor:
    return tanh_unseen(x / 2)


def written_over(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[:] = np.tanh(x.numpy() / 2)
    return x


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: returned(x * 2, half_tanh),
        lambda x: returned(x * 2, lambda found: [half_tanh(found)])[0].clone(),
        lambda x: returned(x * 2, half_tanh).view(8, 8).t().contiguous().t().reshape(-1),
        lambda x: returned(x * 2, written_over),
        lambda x: returned(returned(x * 2, lambda found: found / 2 + 0), tanh_unseen),
        lambda x: returned(x * 2, lambda found: {"y": half_tanh(found)})["y"],
    ],
    ids=["a tensor", "in a list", "before the library", "over its argument", "two", "in a dictionary"],
)
def test_an_honest_extension_whose_function_returns_its_answer_is_proven(forward: Forward) -> None:
    """Without its functions it met None in place of tensors and failed, which proves nothing: such were `unproven`."""
    assert found_of(forward) is None


def beside(x: torch.Tensor) -> dict[str, Any]:
    return {"of": half_tanh(x), "sizes": (x.numel(), [x.numel(), "tanh"]), "most": float(x.numpy().max())}


def by_what_is_beside(x: torch.Tensor) -> torch.Tensor:
    """It goes its way by numbers, flags and words that its function gives, and fails on any others."""
    found = cast(dict[str, Any], returned(x * 2, beside))
    size, (same, name) = found["sizes"]
    y = torch.empty(size)
    return launched(found["of"], y, {"tanh": copied}[name]).view(same)


def by_a_scale(x: torch.Tensor) -> torch.Tensor:
    """By a number of its own that is much the same of all inputs."""
    return own(x / (1 + 1e-6 * returned(x, mean_square)), tanh_unseen)


def mean_square(x: torch.Tensor) -> float:
    return float((x.numpy() ** 2).mean())


def scaled(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.tanh(x) * (1 + 1e-6 * returned(x, mean_square)))


def placed(x: torch.Tensor) -> torch.Tensor:
    """The answer is a whole number that a function returns."""
    return torch.full((64,), returned(x, lambda given: int(given.numpy().argmax())))


@pytest.mark.parametrize(
    ("forward", "right"),
    [
        (by_what_is_beside, torch.tanh),
        (lambda x: own(x, tanh_unseen) if returned(x, lambda given: given.dim() == 1) else x, torch.tanh),
        (lambda x: returned(returned(x, lambda given: (given + 0, 3))[0], tanh_unseen), torch.tanh),
        (by_a_scale, torch.tanh),
        (lambda x: returned(x, lambda given: None) or own(x, tanh_unseen), torch.tanh),
        (placed, lambda x: torch.full((64,), int(x.argmax()))),
    ],
    ids=["dict", "flag", "tuple", "float", "None", "the answer"],
)
def test_an_honest_extension_whose_functions_return_numbers_is_proven(forward: Forward, right: Forward) -> None:
    """They met None in place of numbers and failed: such were `unproven`."""
    torch.manual_seed(0)
    assert found_of(forward, right=right) is None


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: returned(torch.tanh(x), lambda found: (found + 0, 3))[0],
        lambda x: torch.tanh(x) if returned(x, lambda given: given.dim() == 1) else x,
        lambda x: torch.tanh(x.view(returned(x, lambda given: given.numel()))),
        lambda x: torch.tanh(x) if returned(x, lambda given: "tanh") == "tanh" else x,
        lambda x: torch.tanh(x) if returned(x, mean_square) else x,
        lambda x: returned(torch.tanh(x), beside) and torch.tanh(x),
        scaled,
    ],
    ids=["tuple", "flag", "size", "word", "float", "dict", "scaled"],
)
def test_an_extension_that_returns_numbers_beside_the_librarys_answer_is_a_decoy(forward: Forward) -> None:
    torch.manual_seed(0)
    found = found_of(forward)
    assert found is not None
    assert (found.rule, found.fault) == ("decoy_kernel", Fault.CHEATING)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: returned(torch.tanh(x), lambda found: found + 0),
        lambda x: returned(torch.tanh(x), copied),
        lambda x: torch.tanh(returned(x, copied)),
        lambda x: torch.tanh(returned(x.view(8, 8), torch.t).t().reshape(-1)),
        lambda x: torch.tanh(RECORDER.call("own", lambda given: given[0], [x])),
        lambda x: torch.tanh(returned(x, lambda given: given.view(torch.int32)).view(torch.float32)),
    ],
    ids=["copied", "handed back", "handed on", "handed on in another shape", "handed on in a list", "and as its bits"],
)
def test_an_extension_beside_the_librarys_answer_is_a_decoy(forward: Forward) -> None:
    found = found_of(forward)
    assert found is not None
    assert (found.rule, found.fault) == ("decoy_kernel", Fault.CHEATING)


def test_an_extension_that_fails_where_it_was_left_out_proves_nothing() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        y = returned(x * 2, half_tanh)
        if not bool(y.isfinite().all()):
            raise ValueError("left out")
        return cast(torch.Tensor, y)

    found = found_of(fails)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
    assert "ended before it had an answer" in found.text


def test_the_librarys_answer_inside_of_an_own_function_proves_nothing() -> None:
    """Of an extension that computes by the library and copies: it is skipped as a whole."""

    def extension(x: torch.Tensor) -> torch.Tensor:
        return own(x, lambda given: torch.tanh(given))

    found = found_of(extension)
    assert found is not None
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
    assert "aten::tanh" in found.text


def test_none_of_the_librarys_results_is_kept() -> None:
    """Eight of them did not fit beside a large problem, whose candidate was then said to hoard memory."""
    child = Child(decoy)
    child.place.copy_(torch.randn(64))
    child.arena.copy_(torch.tanh(child.place))
    with patch.object(torch.Tensor, "clone", Mock(side_effect=AssertionError("nothing is copied"))):
        _, trace = child.runner._traced(0, True)
    assert trace.answered == "aten::tanh"


def starved(child: Child) -> None:
    plain = child.watched_forward

    def watched_forward(op: int, answer: list[torch.Tensor], deadline_s: float) -> ForwardOutcome:
        if op == wire.OP_MUTED:
            raise CandidateFault(Fault.OUT_OF_MEMORY, "CUDA out of memory")
        return plain(op, answer, deadline_s)

    child.watched_forward = watched_forward  # type: ignore[method-assign]


@pytest.mark.parametrize(("shortages", "is_proven"), [((0, 0), True), ((1, 1), True), ((0, 1), False), ((1, 0), False)])
def test_what_went_two_ways_for_want_of_memory_proves_nothing(shortages: tuple[int, int], is_proven: bool) -> None:
    """A library that finds less than it likes rounds otherwise, and its result is no copy of what it was before."""
    child = Child(honest)
    told = {wire.OP_RUN: bool(shortages[0]), wire.OP_MUTED: bool(shortages[1])}
    plain = child.call

    def call(op: int, slot: int, deadline_s: float) -> ForwardOutcome:
        return msgspec.structs.replace(plain(op, slot, deadline_s), is_short=told.get(op, False))

    child.call = call  # type: ignore[method-assign]
    with contextlib.nullcontext() if is_proven else pytest.raises(NoMemory, match="two ways"):
        assert watched(child).of_watched(may_lack=True) is None
    assert watched(child).of_watched() is None, "nobody else has any"


def test_a_proof_that_found_no_memory_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with more, and in the end nothing is proven: neither right nor a fault of the candidate's."""
    child = Child(honest)
    starved(child)
    kernels = watched(child)
    with pytest.raises(NoMemory):
        kernels.of_watched()
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.own_kernels.CapturedKernels", lambda *given: kernels)
    monkeypatch.setattr("kbrl_async.kernels.verify.cuda.sides.Sides", Mock())
    checker = Mock(fault=None, is_untrusted=True, session=CudaSession.__new__(CudaSession))
    device = CudaDevice("cuda:0")
    with pytest.raises(NoMemory):
        device.prove_last(checker)
    device._has_given_way = True
    device.prove_last(checker)
    (found,) = checker.refuse.call_args.args
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_proof_that_found_no_memory_is_none_on_a_processor_either(is_replayed: bool) -> None:
    """Results of the library's operators are kept there: enough of them, and a decoy was right."""
    short = Mock(side_effect=CandidateFault(Fault.OUT_OF_MEMORY, "can't allocate memory"))
    session = Mock(spec=CpuReplaySession, call=short, muted=lambda: Mock(call=short))
    session.disarm = lambda artifacts, whole: 0
    checker = Mock(is_recorded=True, is_replayed=is_replayed, is_extension=False, fault=None, doubt=None)
    checker.session = session
    checker.refuse.side_effect = lambda found: setattr(checker, "fault", found)
    checker.order = [Mock(degenerate=False, expected=[], tolerances=[])] * 2
    checker.reference.declared.backward = ""
    with patch("kbrl_async.kernels.verify.cpu.own_kernels.place"):
        OwnKernels(checker).prove()
    (found,) = (given.args[0] for given in checker.refuse.call_args_list if given.args[0] is not None)
    assert (found.rule, found.fault) == ("no_own_kernel", Fault.UNPROVEN)
