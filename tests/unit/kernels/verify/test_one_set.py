"""One set at a time: by parts and in place the same values as before, and no more memory than was predicted."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kbrl_async.kernels.verify import compare, fresh, inputs, pieces, values, wire
from kbrl_async.kernels.verify.cuda import drawing
from kbrl_async.kernels.verify.cuda.reference import CudaReference
from kbrl_async.kernels.verify.cuda.runner import CudaRunner
from kbrl_async.kernels.verify.cuda.session import CudaSession, place_outputs
from kbrl_async.kernels.verify.fresh import Pool, SecretWeights, blend, structure_of
from kbrl_async.kernels.verify.known import Offloaded, Recent, Redrawn, Sizes, outlines
from kbrl_async.kernels.verify.options import no_tick
from kbrl_async.kernels.verify.session import ForwardOutcome
from kbrl_async.kernels.verify.sets import SetMaker
from tests.unit.kernels.verify import whole_sets

CHUNK = 1000
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.randn(70, 93),
    "square": lambda: torch.randn(3, 90, 90),
    "never negative": lambda: torch.rand(5431),
    "never near zero": lambda: torch.rand(70, 93) + 1,
    "never near zero, never positive": lambda: -torch.rand(70, 93) - 1,
    "channels last": lambda: torch.rand(2, 9, 30, 31).to(memory_format=torch.channels_last),
    "turned": lambda: torch.rand(91, 73).T,
    "half": lambda: torch.randn(70, 93).half(),
    "bfloat16, never negative": lambda: torch.rand(70, 93).bfloat16(),
    "fp64": lambda: torch.randn(6001, dtype=torch.float64),
    "triangular": lambda: torch.randn(80, 80).tril(),
    "probabilities": lambda: torch.randn(80, 90).softmax(-1),
    "logarithms of such": lambda: torch.randn(80, 90).log_softmax(-1),
    "integers": lambda: torch.randint(0, 9, (6000,)),
    "a mask of floats": lambda: (torch.rand(6000) < 0.5).float(),
    "one-sided, turned": lambda: (torch.rand(91, 73) + 0.01).T,
    "of both signs, in blocks, turned": lambda: torch.randn(40, 5, 33).permute(2, 0, 1),
    "negative, in blocks, turned": lambda: -torch.rand(3, 50, 70).transpose(0, 1),
    "probabilities, turned": lambda: torch.randn(80, 90).softmax(0).T,
    "logarithms of such, turned": lambda: torch.randn(70, 6, 30).log_softmax(0).permute(1, 2, 0),
    "symmetric": lambda: (lambda x: x + x.mT)(torch.rand(4, 60, 60)),
    "a permutation": lambda: torch.randperm(6000),
    "one value": lambda: torch.tensor(0.7),
    "with a NaN": lambda: torch.randn(5000).index_fill(0, torch.tensor([4321]), torch.nan),
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, inputs, fresh, compare):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_sets_varied_by_parts_are_those_of_before_to_the_last_bit(name: str, is_ours: bool) -> None:
    torch.manual_seed(3)
    given = TENSORS[name]()
    for kind in inputs.KINDS:
        wanted = whole_sets.vary([given], kind, random.Random(5))[0]
        drawn = torch.empty_like(given).copy_(given)
        made = inputs.vary([drawn], kind, random.Random(5), is_ours=is_ours)[0]
        assert torch.equal(bits(made), bits(wanted)), kind.name
        assert made.stride() == wanted.stride()
        assert (made.data_ptr() == drawn.data_ptr()) == (is_ours or wanted is given)
        assert is_ours or torch.equal(bits(drawn), bits(given)), "others need the draw"


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_inputs_moved_by_parts_are_those_of_before_to_the_last_bit(name: str, coarse: bool) -> None:
    torch.manual_seed(3)
    given = TENSORS[name]()
    wanted = whole_sets.moved([given], random.Random(5), coarse)[0]
    assert torch.equal(bits(inputs.moved([given], random.Random(5), coarse)[0]), bits(wanted))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("target", [0, 1, 2], ids=["into the first", "into the second", "elsewhere"])
@pytest.mark.parametrize("name", TENSORS)
def test_mixtures_in_place_are_those_of_before_to_the_last_bit(name: str, target: int) -> None:
    torch.manual_seed(3)
    three = TENSORS[name](), TENSORS[name](), TENSORS[name]()
    given = [torch.empty_like(one).copy_(one) for one in three]
    structure, is_number = structure_of(given[:2]), all(map(inputs.is_continuous, given[:2]))
    weights = SecretWeights(given[0].numel(), torch.device("cpu"), random.Random(1))
    wanted = whole_sets.blend(three[0], three[1], structure, is_number, weights, random.Random(2), CHUNK)
    blend((given[0], given[1], given[target]), structure, is_number, weights, random.Random(2))
    assert torch.equal(bits(given[target]), bits(wanted)), structure


def test_what_is_lent_is_mixed_as_what_is_kept() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        made = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
        return [made, (made[:900] > 0).float()]

    place = drawn(0)

    def lent(seed: int) -> list[torch.Tensor]:
        for where, block in zip(place, drawn(seed), strict=True):
            where.copy_(block)
        return place

    kept = Pool([drawn(1), drawn(2)], outlines(drawn(1)), random.Random(7))
    pool = Pool(Redrawn([1, 2], drawn, lent), outlines(drawn(1)), random.Random(7))
    for turn in range(4):
        outs = [[torch.empty(3000), torch.empty(900)] for _ in range(2)]
        kept.mix(outs, random.Random(turn))
        for others in ([place], [place, drawn(0)], [drawn(0), place], [drawn(0)]):
            pool.mix(others, random.Random(turn))
            assert all(torch.equal(a, b) for other in others for a, b in zip(other, outs[0], strict=True))
        assert all(map(torch.equal, pool.mixed(random.Random(turn)), outs[0]))


# ── draws ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "there"),
    [
        (lambda: [torch.rand(30, 40), torch.randn((50,))], [True, True]),
        (lambda: [torch.randn(50), torch.rand(30, 40)][::-1], [True, True]),
        (lambda: [torch.rand(30, 40) * 2, torch.randn(50)], [False, True]),
        (lambda: [torch.rand(40, 30).T, torch.randn(50)], [False, True]),
        (lambda: [torch.rand(30, 40, dtype=torch.float64).float(), torch.randn(50)], [False, True]),
        (lambda: [torch.rand(30, 40), torch.randn(30, 40)[:5, :10].reshape(-1)], [True, False]),
        (lambda: (lambda x: [x + 1, x.view(-1)[100:150]])(torch.rand(30, 40)), [False, False]),
        (lambda: [torch.rand(30, 40, requires_grad=True).detach(), torch.randn(50)], [False, True]),
    ],
    ids=["plain", "in another order", "scaled", "turned", "cast", "cut", "a part of another's place", "with more said"],
)
def test_a_draw_in_place_is_the_same_draw(make: Callable[[], list[torch.Tensor]], there: list[bool]) -> None:
    torch.manual_seed(5)
    wanted = [tensor.clone() for tensor in make()]
    arena = torch.full((2000 * 4,), 0x7F, dtype=torch.uint8)
    places = [arena[:4800].view(torch.float32).view(30, 40), arena[4800:5000].view(torch.float32)]
    torch.manual_seed(5)
    with drawing.DrawnInPlace(places), torch.device("cpu"):
        made = make()
    found = drawing.settled(made, places, (arena.data_ptr(), arena.data_ptr() + arena.numel()))
    assert [drawing.is_there(*both) for both in zip(found, places, strict=True)] == there
    for tensor, place in zip(found, places, strict=True):
        place.copy_(tensor.view(place.shape))
    assert all(map(torch.equal, places, wanted))


def test_what_is_done_to_a_draw_leaves_its_place_as_it_was() -> None:
    place = torch.empty(30, 40)
    with drawing.DrawnInPlace([place]), torch.device("cpu"):
        made = torch.rand(30, 40)
        made.t_().requires_grad_()
    assert made.data_ptr() == place.data_ptr()
    assert (place.shape, place.requires_grad) == ((30, 40), False)


def test_what_reads_a_lent_draw_has_ended_before_the_next_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def asked(order: bytes) -> None:
        done.append("asked")
        raise AskedError

    done: list[str] = []
    session = CudaSession.__new__(CudaSession)
    session._frozen, session.uses, session._metas = False, 0, []
    session._child = SimpleNamespace(channel=SimpleNamespace(send=asked))  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    with pytest.raises(AskedError):
        session.lent(1, 1.0)
    assert done == ["waited", "asked"]


def test_nothing_of_a_draw_is_there_once_it_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    made = CudaRunner.__new__(CudaRunner)
    made._pending = [torch.rand(30), torch.rand(40)]
    made._shared = Arena(4096)  # type: ignore[assignment]
    made._driver = SimpleNamespace(call=lambda *_: None)  # type: ignore[assignment]
    made.channel = SimpleNamespace(send=lambda _: None)  # type: ignore[assignment]
    known = [weakref.ref(tensor) for tensor in made._pending]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.extend(one() is None for one in known))
    made._export(None)
    assert found == [True, True]


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch's
    """Live bytes of tensors that are made in here; what is copied to the host waits there, and does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._live: dict[int, int] = {}
        self.peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        waits = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.note(tensor, 0 if waits else tensor.untyped_storage().nbytes())
        return made

    def forget(self, tensor: torch.Tensor) -> None:
        """It counts no more."""
        self._live[tensor.untyped_storage()._cdata] = 0

    def note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = size
            weakref.finalize(storage, self._live.pop, key, None)
            self.peak = max(self.peak, sum(self._live.values()))


class Arena:
    def __init__(self, size: int) -> None:
        self.raw, self.size = torch.empty(size, dtype=torch.uint8), size

    def view(self, meta: wire.TensorMeta) -> torch.Tensor:
        return values.view(self.raw, meta)


class Here(CudaSession):
    """A reference's child in this process: every buffer that it and the bench have on a GPU is one of torch's here."""

    def __init__(self, draw: Callable[[], list[torch.Tensor]], forward: Callable[..., torch.Tensor]) -> None:
        self._draw, self._forward, self.copies = draw, forward, True
        self.last: torch.Tensor | None = None
        self.uses = 0
        self.is_widened = False
        examples = outlines(draw())
        out = outlines([forward(*draw())])
        placed, end = values.layout(examples, 0, 512)
        self._metas, self._outputs_at = [placed], end
        self._outs, end = place_outputs(values.layout(out)[0], 1, end, False)
        self.shared: Any = Arena(end)
        self.slots = [[values.flat(self.shared.view(meta)) for meta in placed]]
        with Counted() as counted:
            counted.note(self.shared.raw, end)
            with drawing.DrawnInPlace(self.inputs):
                draw()
        self.drawn_beside = counted.peak - end

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.shared.view(meta) for meta in self._metas[0]]

    def lent(self, seed: int, deadline_s: float) -> tuple[wire.Tree, list[torch.Tensor], None]:
        self.uses += 1
        torch.manual_seed(seed)
        begin = self.shared.raw.data_ptr()
        with drawing.DrawnInPlace(self.inputs):
            drawn = drawing.settled(self._draw(), self.inputs, (begin, begin + self.shared.size))
        there = [drawing.is_there(*both) for both in zip(drawn, self.inputs, strict=True)]
        for place, tensor, is_there in zip(self.inputs, drawn, there, strict=True):
            if not is_there:
                place.copy_(tensor)
        return ["L", [["T", number] for number in range(len(drawn))]], self.inputs, None

    def call(self, op: int, slot: int, deadline_s: float, meter: object = None) -> ForwardOutcome:
        self.uses += 1
        if op == wire.OP_FREE:
            self.last = None
            return ForwardOutcome(0, 0, 0, ["V", None], [])
        if op == wire.OP_RUN:
            self.last = None
            self.last = self._forward(*self.inputs)
        assert self.last is not None
        meta = self._outs[0][0]
        self.shared.view(meta).copy_(self.last)
        return ForwardOutcome(1, 0, 0, ["T", 0], [meta])


def reference_of(session: Here) -> CudaReference:
    made = CudaReference.__new__(CudaReference)
    made.session, made._drawn, made._weights = session, [], None
    made.keeps_sets, made.widens, made._recent = False, False, Recent()
    made._options = SimpleNamespace(reference_deadline_s=1.0)  # type: ignore[assignment]
    made._share = SimpleNamespace(attached=id(made))  # type: ignore[assignment]
    made.examples = outlines(session.inputs)
    return made


MEGA = 1 << 17
PROBLEMS: dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]] = {
    "element by element": (lambda: [torch.rand(2 * MEGA)], torch.relu),
    "of both signs": (lambda: [torch.randn(2 * MEGA)], torch.relu),
    "scaled draws": (lambda: [torch.rand(2 * MEGA) * 2 - 1], torch.relu),
    "a reduction": (lambda: [torch.rand(8, MEGA // 2)], lambda x: x.sum(-1)),
    "two inputs": (
        lambda: [torch.rand(8, MEGA // 8), torch.randn(8, MEGA // 8)],
        lambda x, y: torch.dot(x.flatten(), y.flatten()),
    ),
    "large outputs": (lambda: [torch.rand(1024), torch.rand(2048)], torch.outer),
    "half precision": (lambda: [torch.rand(4 * MEGA).half()], torch.relu),
}


@pytest.fixture
def large_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small beside the inputs here, as they are beside those of problems that are large."""
    for module in (pieces, inputs, fresh, compare):
        monkeypatch.setattr(module, "CHUNK", 1 << 13)
    monkeypatch.setattr(fresh, "_SLACK", 1 << 10)
    monkeypatch.setattr(inputs, "_SAMPLE", 1 << 12)
    monkeypatch.setattr("kbrl_async.kernels.verify.input_set._FEW", 1 << 12)


@pytest.mark.usefixtures("large_parts")
@pytest.mark.parametrize(("frees", "is_far"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_counted_peak_is_the_predicted_one(name: str, frees: bool, is_far: bool) -> None:
    """`frees`: the candidate holds one output while a set is made, and two while it is called; else always three.
    `is_far`: the reference's arena lies on the host.
    """
    draw, forward = PROBLEMS[name]
    with Counted() as counted:
        session = Here(draw, forward)
        if is_far:
            counted.forget(session.shared.raw)
        given, out = sum(one.nbytes for one in session.inputs), session._outs[0][1]
        counted.peak = 0
        reference = reference_of(session)
        draws = Redrawn([1, 2], reference._draw, reference._lend)
        pool = Pool(draws, reference.examples, random.Random(1))
        maker = SetMaker(reference, name, random.Random(2), "bfloat16" if "half" in name else "")
        maker.make(draws, pool, reference._redraw, plan=lambda outputs, mutated: (False, False))
        made, counted.peak = counted.peak, 0
        sizes = Sizes(given, out, drawn=session.drawn_beside or 0, frees=frees, offloaded=Offloaded(is_far))
        arena = torch.empty(given + out, dtype=torch.uint8)
        before, called = (1, 2) if frees else (3, 3)
        for one in maker.sets:
            held = torch.empty(before * out, dtype=torch.uint8)
            one.known.load()
            del held
            held = torch.empty(called * out, dtype=torch.uint8)
            for place, block in zip((arena[:given].view(one.blocks[0].dtype),), one.blocks[:1], strict=True):
                place[: block.numel()].copy_(block)
            got = [expected.clone() for expected in one.expected]
            three = zip(got, one.expected, one.tolerances, strict=True)
            assert not any(compare.difference(*each).wrong for each in three), one.name
            del got, three, held  # a zip keeps its last tuple
        held = torch.empty(3 * out, dtype=torch.uint8)  # asked without its kernels it holds all three
        draws.lent(0)
        del arena, held
    parts = 1 << 17 if is_far else 0  # more than a tenth of so little
    assert sizes.made * 0.9 < made < sizes.made * 1.1 + parts, made / sizes.made
    assert sizes.asked * 0.9 < counted.peak < sizes.asked * 1.1 + parts, counted.peak / sizes.asked


def test_a_set_is_made_again_once_anything_else_was_asked() -> None:
    session = Here(lambda: [torch.rand(300)], torch.relu)
    reference = reference_of(session)
    draws = Redrawn([1, 2], reference._draw, reference._lend)
    maker = SetMaker(reference, "L1/1", random.Random(2))
    pool = Pool(draws, reference.examples, random.Random(1))
    first, second, *_ = maker.make(draws, pool, reference._redraw, plan=lambda outputs, mutated: (False, False))
    wanted = [tensor.clone() for tensor in (*first.blocks, *first.expected)]
    uses = session.uses
    assert first.blocks[0].data_ptr() == session.slots[0][0].data_ptr(), "the reference's own"
    assert first.expected[0].data_ptr() != wanted[1].data_ptr()
    assert session.uses == uses, "it is there"
    assert not torch.equal(second.blocks[0], wanted[0])
    session.call(wire.OP_RUN, 0, 1.0)
    assert all(map(torch.equal, (*first.blocks, *first.expected), wanted))


def test_who_writes_to_its_inputs_leaves_the_bench_its_own() -> None:
    session = Here(lambda: [torch.rand(300)], lambda x: x.mul_(2) + 1)
    reference = reference_of(session)
    draws = Redrawn([1, 2], reference._draw, reference._lend)
    maker = SetMaker(reference, "L1/1", random.Random(2))
    pool = Pool(draws, reference.examples, random.Random(1))
    first, *_ = maker.make(draws, pool, reference._redraw, plan=lambda outputs, mutated: (False, False))
    assert first.mutated
    assert torch.equal(first.blocks[0] * 2 + 1, first.expected[0])


def test_inputs_for_a_recording_are_those_that_were_answered() -> None:
    """Of a reference that writes to its inputs, what was lent is something else after its answer."""
    session = Here(lambda: [torch.rand(300)], lambda x: x.mul_(2) + 1)
    reference = reference_of(session)
    draws = Redrawn([1, 2], reference._draw, reference._lend)
    maker = SetMaker(reference, "L1/1", random.Random(2))
    pool = Pool(draws, reference.examples, random.Random(1))
    reference.sets = maker.make(draws, pool, reference._redraw, plan=lambda outputs, mutated: (False, False))
    reference._rehearsals, reference._rng = [], random.Random(3)
    found = reference.rehearsal(0)
    assert torch.equal(found.blocks[0] * 2 + 1, found.expected[0])


# ── new secrets ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_new_secrets_of_what_is_not_kept_are_drawn_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """How large they are is known: a draw beside it would be a third time the inputs."""
    session = Here(lambda: [torch.rand(300)], torch.relu)
    reference = reference_of(session)
    asked: list[list[torch.Tensor]] = []

    def planned(self: CudaReference, outputs: list[torch.Tensor], mutated: bool = False) -> tuple[bool, bool]:
        asked.append(outputs)
        self.keeps_sets = False
        return False, False

    monkeypatch.setattr(CudaReference, "_planned", planned)
    reference._options = SimpleNamespace(reference_deadline_s=1.0, pool=4)  # type: ignore[assignment]
    reference._rng, reference.tick, reference.keeps_sets = random.Random(3), no_tick, True
    reference.wanted = outlines([torch.rand(300)])
    draws = reference._draws()  # `Here` has no memory for a draw but its arena
    assert isinstance(draws, Redrawn)
    assert asked == [reference.wanted]
    assert draws.lent(0)[0].data_ptr() == session.slots[0][0].data_ptr()
