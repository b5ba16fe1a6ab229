"""Second opinions: a bench or farm that lies is found out, what it said is done again, and honest ones are believed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import HostError
from protocols import events as ev
from protocols import messages as msg
from protocols.checking import CheckDesk, CheckOptions
from protocols.ledger import Ledger, LedgerOptions
from protocols.opinions import agree, agreeing
from protocols.records import BenchReport, BuildReport, Fault, Timing, Verdict
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Producer, Worker
from tests.brokers import beside, serving, until, working
from tests.records import timing


def report(speedup: float = 2.0, fault: Fault = Fault.OK, passed: int = 5, width: float = 0.1) -> BenchReport:
    return BenchReport(Verdict(fault, passed, 5), timing(speedup, width) if fault is Fault.OK else None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (report(2.0), report(2.3)),
        (report(fault=Fault.TIMEOUT), report(fault=Fault.RUNTIME_ERROR)),
        (report(fault=Fault.INCORRECT, passed=2), report(fault=Fault.INCORRECT, passed=4)),
    ],
)
def test_what_may_differ_between_honest_benches_agrees(first: BenchReport, second: BenchReport) -> None:
    assert agree(first, second, 0.25)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (report(2.0), report(5.0)),
        (report(fault=Fault.INCORRECT), report()),
        (report(), report(fault=Fault.TIMEOUT)),
        (report(fault=Fault.INCORRECT, passed=0), report(fault=Fault.INCORRECT, passed=5)),
        (report(), msgspec.structs.replace(report(), timing=None)),
        (report(), BenchReport(Verdict(Fault.OK), Timing(9, 50.0, 1.9, 2.1, 1.0, 2.0))),
        (report(), BenchReport(Verdict(Fault.OK), Timing(9, 9.0, 9.0, float("inf"), 1.0, 2.0))),
        (report(), BenchReport(Verdict(Fault.OK), Timing(9, 9.0, float("nan"), 9.0, 1.0, 2.0))),
    ],
)
def test_what_only_a_lie_explains_does_not(first: BenchReport, second: BenchReport) -> None:
    assert not agree(first, second, 0.25)
    assert not agree(second, first, 0.25)


def spared(speedup: float = 0.4, total: int = 3) -> BenchReport:
    return BenchReport(Verdict(Fault.OK, total, total), timing(speedup))


def test_a_slow_kernel_that_one_bench_spared_the_sets_it_fails_makes_no_liar_of_anybody() -> None:
    wrong = report(fault=Fault.INCORRECT, passed=4)
    assert agree(spared(), wrong, 0.25)
    assert agree(wrong, spared(), 0.25)
    for lie in (spared(2.0), spared(total=10), msgspec.structs.replace(spared(), timing=None)):
        assert not agree(lie, wrong, 0.25)
    for other in (report(fault=Fault.INCORRECT, passed=2), report(fault=Fault.CHEATING, passed=5)):
        assert not agree(spared(), other, 0.25)


BUILT = BuildReport(Fault.OK, {"unit": "ab" * 32}, toolchain="gcc 12.2.0 znver4 1f3c", message="from here")
OF_GPU = msgspec.structs.replace(BUILT, toolchain="nvcc 13.0 sm_90 fast")


def built(of: BuildReport = BUILT, **changes: object) -> BuildReport:
    return msgspec.structs.replace(of, **changes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BUILT, built(cached=True, worker_id="another", started_at=9.0)),
        (BUILT, built(artifacts={"unit": "cd" * 32}, toolchain="gcc 13.1.0 znver4 77aa")),
        (OF_GPU, built(OF_GPU, artifacts={"unit": "cd" * 32})),
        (BuildReport(Fault.COMPILE_ERROR, message="line 3"), BuildReport(Fault.COMPILE_ERROR, message="line 4")),
    ],
)
def test_what_honest_farms_may_build_differently_agrees(first: BuildReport, second: BuildReport) -> None:
    assert agree(first, second, 0.25)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BUILT, BuildReport(Fault.COMPILE_ERROR, message="no")),
        (BUILT, built(artifacts={"unit": "cd" * 32})),
        (BUILT, built(artifacts={})),
        (OF_GPU, built(OF_GPU, artifacts={"other": "ab" * 32})),
        (BuildReport(Fault.STATIC_VIOLATION), BuildReport(Fault.COMPILE_ERROR)),
        (BUILT, report()),
    ],
)
def test_what_only_a_lying_farm_explains_does_not(first: BuildReport, second: BuildReport) -> None:
    assert not agree(first, second, 0.25)
    assert not agree(second, first, 0.25)


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"\x91" * 5000], [b"a", b"b"], [msgspec.msgpack.encode({})]])
def test_an_opinion_that_can_not_be_read_agrees_with_nothing(frames: list[bytes]) -> None:
    assert agreeing([frames, frames], 0.25) == []


# ── the desk ──────────────────────────────────────────────────────────────────────────────────────────────────────


def desk(share: float = 1.0, **more: float) -> CheckDesk:
    return CheckDesk(CheckOptions(share, **more), random.Random(0))


def test_what_is_not_picked_is_held_until_a_check_agrees() -> None:
    ours = desk(share=1e-9)
    assert [ours.opinion(f"t{n}", "a", True, 0.0) for n in range(3)] == ["hold"] * 3
    ours.options = CheckOptions(share=1.0)
    assert ours.opinion("t9", "a", True, 1.0) == "check"
    assert ours.opinion("t9", "b", True, 2.0) == "compare"
    found = ours.compared("t9", [(0, 1)], True)
    assert (found.winner, found.release) == (0, ("t0", "t1", "t2"))


def test_two_that_differ_need_a_third_and_the_lonely_one_lied() -> None:
    ours = desk(strikes=1.0)
    ours.opinion("t", "liar", True, 0.0)
    ours.opinion("t", "b", True, 0.0)
    assert ours.compared("t", [], True).more
    ours.opinion("t", "c", True, 0.0)
    found = ours.compared("t", [(1, 2)], True)
    assert (found.winner, found.quarantine) == (1, "liar")


def test_without_a_third_nobody_is_blamed_and_nothing_is_believed() -> None:
    ours = desk()
    ours.opinion("t", "a", True, 0.0)
    ours.opinion("t", "b", False, 0.0)
    found = ours.compared("t", [], False)
    assert (found.winner, found.more, found.quarantine) == (-1, False, "")
    assert not ours.strikes


def test_agreement_wears_strikes_off() -> None:
    ours = desk(strikes=2.0)
    ours.strikes["a"] = 1.0
    ours.opinion("t", "a", True, 0.0)
    ours.opinion("t", "b", True, 0.0)
    ours.compared("t", [(0, 1)], True)
    assert ours.strikes["a"] == 0.5


def test_the_only_bench_is_believed_and_counted_as_unchecked() -> None:
    ours = desk()
    assert ours.opinion("t", "a", False, 0.0) == "pass"
    assert ours.counters["unchecked"] == 1


# ── in the ledger ─────────────────────────────────────────────────────────────────────────────────────────────────


class Site:
    """A ledger whose comparisons are made by name: whoever is in `liars` disagrees with everybody."""

    def __init__(self, share: float = 1.0, liars: Iterable[str] = (), **options: float) -> None:
        checks = CheckOptions(share, **options)
        self.ledger = Ledger(LedgerOptions(checks=checks), rng=random.Random(1))
        self.liars = set(liars)
        self.now = 0.0
        self.settled: dict[str, int] = {}

    def does(self, event: ev.Event) -> None:
        for action in self.ledger.handle(event, self.now):
            if isinstance(action, ev.Compare):
                said = self.ledger.checks.cases[action.task_id].principals
                pairs = [(i, j) for j, b in enumerate(said) for i, a in enumerate(said[:j]) if not {a, b} & self.liars]
                self.does(ev.Compared(action.task_id, pairs))
            elif isinstance(action, ev.Settle):
                self.settled[action.row.task_id] = action.opinion

    def joins(self, *names: str, slots: int = 1) -> None:
        for name in names:
            self.does(ev.FromWorker(name.encode(), msg.Hello(name, "a", ["bench"], slots)))

    def submit(self, count: int) -> None:
        for number in range(count):
            self.does(ev.FromProducer(b"p", msg.Submit(f"t{number}", "bench", f"g{number}")))

    def work(self, rounds: int = 200, next_stages: Mapping[str, str] | None = None) -> None:
        """`next_stages`: where each worker sends its results; else to the stage that follows."""
        for _ in range(rounds):
            leases = [lease for worker in self.ledger.pool.by_id.values() for lease in worker.leases.values()]
            for lease in leases:
                following = "bench" if lease.task.stage == "compile" else "score"
                following = (next_stages or {}).get(lease.worker.worker_id, following)
                result = msg.Result(lease.task.task_id, lease.lease_id, following)
                self.does(ev.FromWorker(lease.worker.route, result))
            self.now += 1.0
            for worker in list(self.ledger.pool.by_id.values()):
                self.does(ev.FromWorker(worker.route, msg.Beat(worker.slots, list(worker.leases))))
            self.does(ev.Tick())

    def at(self, stage: str) -> int:
        return len(self.ledger.tasks.queues[stage])


def test_honest_benches_settle_everything_once() -> None:
    site = Site(share=0.3)
    site.joins("a", "b", "c")
    site.submit(40)
    site.work()
    assert site.at("score") == 40
    assert not site.ledger.checks.strikes
    assert not site.ledger.checks.cases


def test_a_liar_is_quarantined_and_nothing_it_said_alone_goes_on() -> None:
    site = Site(share=0.3, liars=["liar"])
    site.joins("liar", "b", "c")
    site.submit(60)
    site.work(rounds=300)
    assert site.ledger.checks.quarantined == {"liar"}
    assert "liar" not in site.ledger.pool.by_id
    assert site.at("score") == 60
    assert site.ledger.checks.counters["redone"] > 0, "what it had held was done again"


def test_a_quarantined_worker_is_not_let_in_again() -> None:
    site = Site()
    site.ledger.checks.quarantined.add("liar")
    site.joins("liar")
    assert not site.ledger.pool.by_id


def test_the_leases_of_a_liar_are_done_by_others() -> None:
    site = Site(liars=["liar"], strikes=1.0)
    site.joins("liar", slots=5)
    site.joins("b", "c")
    site.submit(12)
    site.work()
    assert site.at("score") == 12
    assert site.ledger.counters["lost"] == 0


def test_nobody_checks_itself_not_even_under_another_name() -> None:
    site = Site()
    for name in ("k.1", "k.2"):
        hello = msg.Hello(name, "a", ["bench"], 1)
        site.does(ev.FromWorker(name.encode(), hello, "bench/k"))
    site.submit(1)
    (lease,) = [lease for worker in site.ledger.pool.by_id.values() for lease in worker.leases.values()]
    site.does(ev.FromWorker(lease.worker.route, msg.Result("t0", lease.lease_id, "score"), "bench/k"))
    assert site.ledger.checks.counters["checked"] == 0
    assert site.at("score") == 1


def test_an_older_lease_of_its_own_is_no_second_opinion() -> None:
    site = Site()
    site.joins("a")
    site.submit(1)
    (old,) = site.ledger.pool.by_id["a"].leases
    for _ in range(60):  # without beats the lease runs out, and the same worker gets the task again
        site.now += 1.0
        site.does(ev.Tick())
        site.joins("a")
        if old not in site.ledger.pool.by_id["a"].leases:
            break
    (new,) = site.ledger.pool.by_id["a"].leases
    site.joins("b", slots=0)
    site.does(ev.FromWorker(b"a", msg.Result("t0", new, "score")))
    site.does(ev.FromWorker(b"a", msg.Result("t0", old, "score")))
    assert site.ledger.checks.cases["t0"].principals == ["a"]


def test_a_beat_that_crosses_the_result_does_not_take_the_task_back() -> None:
    site = Site()
    site.joins("a")
    site.submit(1)
    site.joins("b", slots=0)
    (lease,) = site.ledger.pool.by_id["a"].leases
    site.does(ev.FromWorker(b"a", msg.Result("t0", lease, "score")))
    site.does(ev.FromWorker(b"a", msg.Beat(1, [lease])))
    assert not site.ledger.pool.by_id["a"].leases


def test_a_check_that_nobody_can_make_any_more_does_not_hold_a_task_for_ever() -> None:
    site = Site()
    site.joins("a", "b")
    site.submit(1)
    (lease,) = [lease for worker in site.ledger.pool.by_id.values() for lease in worker.leases.values()]
    other = b"b" if lease.worker.worker_id == "a" else b"a"
    site.does(ev.FromWorker(other, msg.Bye()))
    site.joins("late")
    site.does(ev.FromWorker(lease.worker.route, msg.Result("t0", lease.lease_id, "score")))
    site.does(ev.FromWorker(b"late", msg.Bye()))
    site.work(rounds=15)
    assert site.at("score") == 1
    assert site.ledger.checks.counters["unchecked"] == 1


def test_a_held_task_of_a_retired_group_is_forgotten() -> None:
    site = Site(share=1e-9)
    site.joins("a", "b")
    site.submit(1)
    site.does(ev.FromWorker(b"a", msg.Result("t0", next(iter(site.ledger.pool.by_id["a"].leases)), "score")))
    assert site.ledger.checks.cases
    site.does(ev.FromProducer(b"p", msg.Retire("g0")))
    assert not site.ledger.checks.cases
    site.work(rounds=30)


def test_nothing_is_held_or_checked_by_default() -> None:
    site = Site(share=0.0)
    site.joins("a", "b")
    site.submit(3)
    site.work(rounds=5)
    assert site.at("score") == 3
    assert not site.settled


def test_farms_are_checked_too_and_what_they_agree_on_goes_where_they_send_it() -> None:
    site = Site(share=0.3, liars=["liar"])
    for name in ("liar", "b", "c"):
        site.does(ev.FromWorker(name.encode(), msg.Hello(name, "a", ["compile"], 1)))
    for number in range(60):
        site.does(ev.FromProducer(b"p", msg.Submit(f"t{number}", "compile", f"g{number}")))
    site.work(rounds=300, next_stages={"liar": "score", "b": "bench", "c": "bench"})
    assert site.ledger.checks.quarantined == {"liar"}
    assert site.at("bench") == 60
    assert site.at("score") == 0, "nothing that the liar said alone"


def test_farms_that_say_the_same_and_send_it_elsewhere_do_not_agree() -> None:
    site = Site(share=1.0)
    for name in ("liar", "b", "c"):
        site.does(ev.FromWorker(name.encode(), msg.Hello(name, "a", ["compile"], 1)))
    site.does(ev.FromProducer(b"p", msg.Submit("t0", "compile", "g0")))
    site.work(rounds=20, next_stages={"liar": "score", "b": "bench", "c": "bench"})
    assert site.at("bench") == 1


def test_a_task_is_checked_at_both_stages() -> None:
    site = Site(share=1.0)
    for name in ("a", "b"):
        site.does(ev.FromWorker(name.encode(), msg.Hello(name, "a", ["compile", "bench"], 1)))
    site.does(ev.FromProducer(b"p", msg.Submit("t0", "compile", "g0")))
    site.work(rounds=20, next_stages={})
    assert site.at("score") == 1
    assert site.ledger.checks.counters["agreed"] == 2


# ── over sockets ──────────────────────────────────────────────────────────────────────────────────────────────────


def what_goes_on(
    folder: Path, stage: str, lie: HandlerOutcome, truth: HandlerOutcome, following: Sequence[str], count: int
) -> tuple[list[list[bytes]], BrokerServer]:
    """Of so many tasks: what comes to the stages that follow where one worker of three lies. It must be found out."""
    records: list[list[bytes]] = []
    # nobody is suspected because the machine stood still
    ledger = LedgerOptions(heartbeat_s=0.05, missed_beats=1000, checks=CheckOptions(0.5, hold_s=0.5))
    options = beside(folder, ledger=ledger)

    def saying(name: str, outcome: HandlerOutcome) -> Worker:
        async def says(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
            await asyncio.sleep(0.001)
            return outcome

        return Worker(options.work_address, name, [stage], 1, says)

    async def takes(_: msg.Task, frames: list[bytes]) -> HandlerOutcome:
        records.append(frames)
        return HandlerOutcome()

    async def play() -> BrokerServer:
        honest = [saying(name, truth) for name in ("b", "c")]
        others = [Worker(options.work_address, f"{name}.1", [name], 4, takes) for name in following]
        async with serving(BrokerServer(options)) as broker, working(*honest, *others):
            lying = asyncio.create_task(saying("liar", lie).run())
            async with asyncio.timeout(120), Producer(options.submit_address) as producer:
                await until(lambda: len(broker.ledger.pool.by_id) == 3 + len(following))
                await asyncio.gather(*(producer.submit(f"t{n}", stage, [b"request"], f"g{n}") for n in range(count)))
                await until(lambda: len(records) >= count)
                with pytest.raises(HostError, match="quarantined"):
                    await lying
        return broker

    broker = asyncio.run(play())
    assert {len(frames) for frames in records} == {2}
    assert broker.options.quarantine.read_text() == "liar\n"
    return records, broker


def said(report: BenchReport | BuildReport, following: str) -> HandlerOutcome:
    return HandlerOutcome(following, [msgspec.msgpack.encode(report)])


def test_a_lying_worker_is_found_out_by_a_live_broker(tmp_path: Path) -> None:
    lie, truth = said(report(40.0), "score"), said(report(2.0), "score")
    records, _ = what_goes_on(tmp_path, "bench", lie, truth, ["score"], 60)
    speedups = {msgspec.msgpack.decode(frames[1], type=BenchReport).timing.speedup for frames in records}  # type: ignore[union-attr]
    assert speedups == {2.0}, "no lie has reached the aggregator"


def test_a_lying_farm_is_found_out_by_a_live_broker(tmp_path: Path) -> None:
    lie = said(BuildReport(Fault.COMPILE_ERROR, message="does not compile"), "score")
    records, broker = what_goes_on(tmp_path, "compile", lie, said(BUILT, "bench"), ["bench", "score"], 40)
    faults = {msgspec.msgpack.decode(frames[1], type=BuildReport).fault for frames in records}
    assert faults == {Fault.OK}, "no lie has gone on"
    assert not len(broker.opinions), "nothing is kept of what was settled"
