"""`kbrl worker`: what it makes before it becomes the service, and what it refuses."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
import pytest

from kbrl_async import cli
from kbrl_async.cli import worker
from kbrl_async.errors import ConfigError, HostError, UserError
from kbrl_async.keyring import Keyring, client_keys
from kbrl_async.runs.config import Config, agreed, load
from kbrl_async.runs.folder import load_run
from protocols import messages as msg
from protocols.auth import Role
from protocols.limits import LedgerOptions
from protocols.sockets import ClientKeys
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Worker, WorkerOptions
from tests.brokers import endpoints, serving, until

REMOTE = "tcp://10.0.0.1:5756"


def arguments(tmp_path: Path, *words: str) -> argparse.Namespace:
    return cli.parse(["worker", *words, f"cache_path={tmp_path / 'cache'}"])


def issued(tmp_path: Path, role: Role) -> str:
    return str(Keyring(tmp_path / "keys").new(role, "host7"))


def test_it_gets_a_folder_of_its_own_with_the_brokers_address(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.BENCH)
    variables = worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE, "--keys", keys, "backend=triton"))
    config = load_run(variables["KBRL_RUN_DIR"])
    assert Path(variables["KBRL_RUN_DIR"]).is_relative_to(tmp_path / "cache" / "workers")
    assert (config.broker.work, config.backend) == (REMOTE, "triton")
    assert variables["KBRL_KEYS"] == keys
    assert variables["KBRL_WORKER_APART"] == "1"


def test_nothing_of_the_runs_of_this_host_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    worker.prepare(arguments(tmp_path, "compile", "--connect", "tcp://127.0.0.1:5756"))
    assert not (tmp_path / "runs").exists()


def test_the_same_worker_finds_its_folder_again_and_another_gets_another(tmp_path: Path) -> None:
    words = ("bench", "--connect", "tcp://127.0.0.1:5756")
    folders = [worker.prepare(arguments(tmp_path, *words))["KBRL_RUN_DIR"] for _ in range(2)]
    second = worker.prepare(arguments(tmp_path, *words, "--number", "2"))["KBRL_RUN_DIR"]
    assert folders[0] == folders[1] != second
    assert load_run(second).processes.timing_bench == 2


def test_another_host_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kbrl keys new bench --name NAME"):
        worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE))


def test_the_key_must_be_of_the_workers_role(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.COMPILE)
    with pytest.raises(UserError, match="key of role compile, and this worker is a bench"):
        worker.prepare(arguments(tmp_path, "bench", "--connect", REMOTE, "--keys", keys))


def test_a_sampler_finds_the_policies_of_a_shared_disk_where_it_looks_and_has_its_own_without(tmp_path: Path) -> None:
    keys = issued(tmp_path, Role.SAMPLER)
    words = ("sample", "--connect", REMOTE, "--keys", keys)
    with pytest.raises(UserError, match=r"--policies .*gone is no folder"):
        worker.prepare(arguments(tmp_path, *words, "--policies", str(tmp_path / "gone")))
    (tmp_path / "shared").mkdir()
    folder = worker.prepare(arguments(tmp_path, *words, "--policies", str(tmp_path / "shared")))["KBRL_RUN_DIR"]
    assert (Path(folder) / "policies").resolve() == tmp_path / "shared"
    assert not (Path(worker.prepare(arguments(tmp_path, *words))["KBRL_RUN_DIR"]) / "policies").exists()


ANY = "tcp://127.0.0.1:*"
RUN = agreed.encode(load(overrides=["timing_bench.cap_s=0.4"]))


def ask(folder: Path, worker_id: str, keys: ClientKeys | None = None, ring: Keyring | None = None) -> msg.Welcome:
    """What a broker with the settings of `RUN` answers."""

    async def play() -> msg.Welcome:
        options = BrokerOptions(str(folder), ANY, ANY, LedgerOptions(settings=RUN))
        broker = BrokerServer(options if ring is None else msgspec.structs.replace(options, keys=str(ring.folder)))
        async with serving(broker):
            answer = await asyncio.to_thread(worker.welcome, endpoints(broker)[1], keys, worker_id)
            await until(lambda: not broker.ledger.pool.by_id)
            return answer

    return asyncio.run(play())


def test_it_asks_the_broker_for_the_runs_settings_and_leaves(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    keys = client_keys(str(ring.new(Role.BENCH, "host7")))
    answer = ask(tmp_path, "host7.asking.timing_bench.here.1", keys, ring)
    variables = worker.prepare(
        arguments(tmp_path, "bench", "--connect", "tcp://127.0.0.1:1"), agreed.decode(answer.settings)
    )
    assert load_run(variables["KBRL_RUN_DIR"]).timing_bench.cap_s == 0.4


def test_a_refusal_is_the_end_of_its_question(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    keys = client_keys(str(ring.new(Role.BENCH, "host7")))
    with pytest.raises(HostError, match=r"worker ids of bench/host7 begin with 'host7\.'"):
        ask(tmp_path, "host8.asking", keys, ring)


class SaidEnoughError(Exception):
    """Ends a question that would go on for ever."""


@pytest.mark.parametrize(
    ("reason", "told"),
    [("the name broker.example can't be resolved: unknown", "broker.example can't be resolved"), ("", "does it run")],
)
def test_its_question_names_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, reason: str, told: str) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise SaidEnoughError

    monkeypatch.setattr(worker, "LONELY_S", 0.0)
    monkeypatch.setattr(worker, "REPEAT_S", 0.01)
    monkeypatch.setattr(worker, "unresolved", lambda _: reason)
    with pytest.raises(SaidEnoughError):
        worker.welcome("tcp://127.0.0.1:1", None, "w", say)
    assert told in said[0]


def test_a_flag_that_contradicts_the_run_is_refused(tmp_path: Path) -> None:
    words = ("bench", "--connect", "tcp://127.0.0.1:1", "timing_bench.cap_s=0.2")
    with pytest.raises(ConfigError, match=r"0\.2 here .* and 0\.4 in the run"):
        worker.prepare(arguments(tmp_path, *words), agreed.decode(RUN))


def test_a_worker_of_another_run_does_not_go_on(tmp_path: Path) -> None:
    async def work(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
        raise AssertionError("it must not work")

    async def play() -> None:
        options = BrokerOptions(str(tmp_path), ANY, ANY, LedgerOptions(settings=RUN))
        async with serving(BrokerServer(options)) as broker:
            other = lambda text: agreed.differences(Config(), "timing_bench", text)  # noqa: E731
            with pytest.raises(ConfigError, match=r"timing_bench.cap_s is 0\.1 here and 0\.4 in the run"):
                await Worker(endpoints(broker)[1], "b", ["bench"], 1, work, WorkerOptions(differs=other)).run()

    asyncio.run(play())


def test_processes_of_one_host_have_names_of_their_own(tmp_path: Path) -> None:
    names = [
        worker.prepare(arguments(tmp_path, kind, "--connect", "tcp://127.0.0.1:1", "--number", number))[
            "HONCHO_PROCESS_NAME"
        ]
        for kind in ("bench", "compile")
        for number in ("1", "2")
    ]
    assert len(set(names)) == 4
    assert all(name.startswith(("timing_bench.", "compile_farm.")) for name in names)
