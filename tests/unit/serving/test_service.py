"""The service over HTTP: verdicts, whose fault it is, what is refused and how, and that nothing accepted is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from kbrl_async.errors import DiskFull, InfraError, ProblemError
from kbrl_async.serving.documents import Ask, Job, Outcome
from kbrl_async.serving.journal import JobJournal
from kbrl_async.serving.settings import Keys, Serve
from protocols.records import Fault
from tests.unit.serving.making import ASK, Fake, ask, outcome, service


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.verification.desk.AGAIN_S", 0.001)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_question_gets_its_verdict_and_reward_and_is_verified_once(tmp_path: Path) -> None:
    async def play() -> None:
        fake = Fake()
        async with service(tmp_path, fake) as (client, _):
            first = (await client.post("/v1/verify", json=ASK)).json()
            again = await client.post("/v1/verify", json={**ASK, "preset": "correct", "priority": "high"})
            by_id = (await client.get(f"/v1/jobs/{first['id']}?preset=kevin")).json()
        assert (first["status"], first["ok"], first["fault_owner"]) == ("done", True, None)
        assert first["reward"] == pytest.approx(0.65 + 0.35 * 2 / 3)
        assert first["verdict"]["timing"]["speedup"] == 2.1
        assert (again.json()["id"], again.json()["reward"]) == (first["id"], 1.0)
        assert by_id["reward"] == pytest.approx(2.3)
        assert len(fake.asked) == 1
        assert "own;dur=" in again.headers["server-timing"]

    run(play())


def test_who_asks_for_the_services_own_rules_gets_them_and_other_rules_are_another_question(tmp_path: Path) -> None:
    async def asked(settings: Serve, body: dict[str, Any]) -> list[str | None]:
        fake = Fake()
        async with service(tmp_path, fake, settings) as (client, _):
            assert (await client.post("/v1/verify", json=body)).status_code == 200
        return [job.ask.rules for job in fake.asked]

    async def play() -> None:
        assert await asked(Serve(), {**ASK, "rules": "open"}) == ["open"]
        assert await asked(Serve(), ASK) == [], "the same question"
        assert await asked(Serve(rules="strict"), ASK) == ["strict"]
        assert await asked(Serve(rules="strict"), {**ASK, "rules": "strict"}) == []

    run(play())


def test_a_wrong_candidate_is_its_own_fault_and_earns_what_it_passed(tmp_path: Path) -> None:
    async def wrong(_: Job) -> Outcome:
        return outcome(Fault.INCORRECT)

    async def play() -> None:
        async with service(tmp_path, Fake(wrong)) as (client, _):
            found = (await client.post("/v1/verify", json=ASK)).json()
        assert (found["ok"], found["fault"], found["fault_owner"]) == (False, "incorrect", "candidate")
        assert found["reward"] == pytest.approx(0.4)

    run(play())


def test_a_fault_of_the_host_is_tried_again_and_never_a_reward_of_zero(tmp_path: Path) -> None:
    broken = [True]

    async def fails(_: Job) -> Outcome:
        if broken[0]:
            raise InfraError("the sandbox died")
        return outcome(Fault.OK)

    async def play() -> None:
        fake = Fake(fails)
        async with service(tmp_path, fake) as (client, _):
            failed = await client.post("/v1/verify", json=ASK)
            assert (failed.status_code, len(fake.asked)) == (503, 3)
            assert failed.headers["retry-after"]
            assert failed.json()["fault_owner"] == "host"
            assert failed.json()["reward"] is None
            broken[0] = False
            assert (await client.post("/v1/verify", json=ASK)).json()["ok"] is True

    run(play())


def test_an_unforeseen_error_is_the_hosts_and_the_service_goes_on(tmp_path: Path) -> None:
    async def breaks(job: Job) -> Outcome:
        if "# 1" in job.ask.candidate:
            raise ValueError("a bug")
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(breaks)) as (client, _):
            assert (await client.post("/v1/verify", json=ask(1))).status_code == 503
            assert (await client.post("/v1/verify", json=ask(2))).status_code == 200

    run(play())


def test_a_bad_problem_is_said_and_not_tried_for_every_candidate(tmp_path: Path) -> None:
    async def hangs(_: Job) -> Outcome:
        raise ProblemError("the reference hangs", "Mend it")

    async def play() -> None:
        fake = Fake(hangs)
        async with service(tmp_path, fake) as (client, _):
            for number in range(3):
                found = await client.post("/v1/verify", json=ask(number))
                assert (found.status_code, found.json()["fault_owner"], found.json()["reward"]) == (
                    422,
                    "problem",
                    None,
                )
        assert len(fake.asked) == 1

    run(play())


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"{not json", 400, "not what is asked for"),
        (b"[" * 100_000, 400, "not what is asked for"),
        (b'{"candidate": "\xff"}', 400, "not what is asked for"),
        (json.dumps({**ASK, "timings": True}).encode(), 400, "timings"),
        (json.dumps({"candidate": "x"}).encode(), 400, "a problem or a reference"),
        (json.dumps({**ASK, "reference": "x"}).encode(), 400, "a problem or a reference"),
        (json.dumps({**ASK, "problem": "L9/99"}).encode(), 404, "there is no problem"),
        (json.dumps({**ASK, "problem": "/etc/passwd"}).encode(), 404, "there is no problem"),
        (json.dumps({**ASK, "backend": "os:system"}).encode(), 400, "there is no backend"),
        (json.dumps({**ASK, "preset": "os:system"}).encode(), 400, "there is no preset"),
        (json.dumps({**ASK, "preset": "auto"}).encode(), 400, "there is no preset"),
        (json.dumps({**ASK, "wait_s": -1}).encode(), 400, "wait_s"),
        (json.dumps({**ASK, "rules": "lax"}).encode(), 400, "rules"),
        (json.dumps({**ASK, "rules": "strict"}).encode(), 400, "judges by the rules open, not strict"),
        (json.dumps({**ASK, "entry_point": "a b"}).encode(), 400, "entry_point"),
        (json.dumps({**ASK, "candidate": "x" * 300_000}).encode(), 413, "a candidate of 300000"),
        (b"x" * 10_000_000, 413, "a body of 10000000 bytes"),
    ],
)
def test_what_can_not_be_meant_is_refused_in_one_line(tmp_path: Path, body: bytes, code: int, says: str) -> None:
    async def play() -> None:
        fake = Fake()
        async with service(tmp_path, fake) as (client, _):
            found = await client.post("/v1/verify", content=body, headers={"Content-Type": "application/json"})
        assert (found.status_code, fake.asked) == (code, [])
        assert says in found.json()["error"]["cause"]

    run(play())


def test_a_body_that_does_not_say_its_length_is_read_to_the_limit_only(tmp_path: Path) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 65536
            yield b" " * 65536

    async def play() -> None:
        async with service(tmp_path, Fake(), Serve(max_body=1 << 20)) as (client, _):
            found = await client.post("/v1/verify", content=endless(), headers={"Content-Type": "application/json"})
            assert found.status_code == 413
        assert sent < 3 << 20

    run(play())


def test_another_site_in_a_browser_reaches_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        fake = Fake()
        async with service(tmp_path, fake) as (client, _):
            rebound = await client.post("/v1/verify", json=ASK, headers={"Host": "evil.example:8470"})
            form = await client.post("/v1/verify", content=json.dumps(ASK), headers={"Content-Type": "text/plain"})
            assert (rebound.status_code, form.status_code, fake.asked) == (421, 415, [])
            assert (await client.get("/v1/health", headers={"Host": "localhost:8470"})).status_code == 200

    run(play())


def test_keys_are_asked_for_and_name_the_client(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nalice 0123456789abcdef\n")
    (tmp_path / "keys").chmod(0o600)

    async def play() -> None:
        fake = Fake()
        async with service(tmp_path, fake, keys=Keys.read(tmp_path / "keys")) as (client, _):
            for header in (
                {},
                {"Authorization": "Bearer 0123456789abcdeF"},
                {"Authorization": "Basic 0123456789abcdef"},
            ):
                found = await client.post("/v1/verify", json=ASK, headers=header)
                assert (found.status_code, fake.asked) == (401, [])
            allowed = {"Authorization": "Bearer 0123456789abcdef"}
            assert (await client.post("/v1/verify", json=ASK, headers=allowed)).status_code == 200
            assert (await client.get("/v1/health")).status_code == 200
        assert fake.asked[0].client == "alice"

    run(play())


def test_who_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, Fake(), Serve(per_minute=2, wait_s=60)) as (client, _):
            codes = [
                (await client.post("/v1/verify", json=ask(n), headers={"X-Client": "eager"})).status_code
                for n in range(3)
            ]
            other = await client.post("/v1/verify", json=ask(9), headers={"X-Client": "calm"})
        assert codes == [200, 200, 429]
        assert other.status_code == 200

    run(play())


def test_a_full_queue_asks_to_come_back_and_holds_no_other_client_up(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def waits(_: Job) -> Outcome:
        await gate.wait()
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(waits), Serve(max_waiting_each=2)) as (client, _):
            mine = {"X-Client": "eager"}
            posts = [await client.post("/v1/verify", json=ask(n, wait_s=0), headers=mine) for n in range(5)]
            other = await client.post("/v1/verify", json=ask(9, wait_s=0), headers={"X-Client": "calm"})
            gate.set()
        assert [post.status_code for post in posts].count(503) >= 2
        assert other.status_code == 202
        assert other.json()["status"] in ("queued", "running")

    run(play())


def test_a_full_disk_accepts_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = [False]
    put = JobJournal.put

    def filling(journal: JobJournal, job: Job) -> None:
        if is_full[0]:
            raise DiskFull("no space left", "Free some")
        put(journal, job)

    async def fills(_: Job) -> Outcome:
        is_full[0] = True
        return outcome(Fault.OK)

    async def play() -> None:
        monkeypatch.setattr(JobJournal, "put", filling)
        async with service(tmp_path, Fake(fills)) as (client, _):
            waiting = asyncio.create_task(client.post("/v1/verify", json=ask(1)))
            while not is_full[0]:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/verify", json=ask(2))
            assert (refused.status_code, refused.json()["error"]["cause"]) == (507, "no space left")
            await asyncio.sleep(0.05)
            assert not waiting.done()  # an outcome that is not on disk is told to nobody
            job = Ask(candidate=str(ask(1)["candidate"]), problem="L1/13").id
            assert (await client.get(f"/v1/jobs/{job}")).json()["status"] == "running"
            assert (await client.get("/v1/health")).json()["status"] == "full_disk"
            is_full[0] = False
            assert (await waiting).json()["ok"] is True
            assert (await client.get("/v1/health")).json()["status"] == "ok"

    run(play())


def test_a_real_journal_without_room_says_so(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, Fake(), pages=14) as (client, _):
            codes = [(await client.post("/v1/verify", json=ask(n, candidate="x" * 9000 + str(n), wait_s=0))).status_code
                     for n in range(20)]  # fmt: skip
        assert codes[0] == 202
        assert codes[-1] == 507

    run(play())


def test_what_was_accepted_is_worked_on_after_a_crash(tmp_path: Path) -> None:
    async def never(_: Job) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    async def play() -> None:
        async with service(tmp_path, Fake(never)) as (client, _):
            ids = [(await client.post("/v1/verify", json=ask(n, wait_s=0))).json()["id"] for n in range(3)]
        fake = Fake()
        async with service(tmp_path, fake) as (client, desk):
            job = desk.find(ids[-1])
            assert job is not None
            await desk.wait(job, 60)
            found = [(await client.get(f"/v1/jobs/{i}")).json()["ok"] for i in ids]
        assert found == [True] * 3
        assert [job.id for job in fake.asked] == ids
        async with service(tmp_path, fake) as (client, _):  # and what ended is not done again
            assert (await client.post("/v1/verify", json=ask(0))).json()["ok"] is True
        assert len(fake.asked) == 3

    run(play())


def test_a_client_that_goes_away_takes_nothing_along(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def waits(_: Job) -> Outcome:
        await gate.wait()
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(waits)) as (client, desk):
            leaving = asyncio.create_task(client.post("/v1/verify", json=ASK))
            await asyncio.sleep(0.05)
            leaving.cancel()
            gate.set()
            assert (await client.post("/v1/verify", json=ASK)).json()["ok"] is True
            assert desk.done == 1

    run(play())


async def events(client: httpx.AsyncClient, path: str, body: object) -> list[tuple[str, dict[str, Any]]]:
    headers = {"Accept": "text/event-stream"}
    text = (await client.post(path, json=body, headers=headers)).text
    pairs = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_streams_tell_each_step_and_each_of_a_batch(tmp_path: Path) -> None:
    one_is_done = asyncio.Event()

    async def by_number(job: Job) -> Outcome:
        await asyncio.sleep(0.01)  # it is told that it runs
        if "# 0" in job.ask.candidate:
            await one_is_done.wait()
        elif "# 1" in job.ask.candidate:
            one_is_done.set()
        return outcome(Fault.OK if "# 0" in job.ask.candidate else Fault.INCORRECT)

    async def play() -> None:
        async with service(tmp_path, Fake(by_number, capacity=2)) as (client, _):
            one = await events(client, "/v1/verify", ask(3))
            batch = await events(client, "/v1/batch", {"requests": [ask(0), ask(1)]})
            plain = (await client.post("/v1/batch", json={"requests": [ask(0), ask(1)]})).json()
        assert [name for name, _ in one] in (["queued", "running", "done"], ["running", "done"])
        assert one[-1][1]["fault"] == "incorrect"
        assert [(name, found["index"]) for name, found in batch] == [("done", 1), ("done", 0)]
        assert [found["ok"] for found in plain] == [True, False]

    run(play())


def test_who_reads_a_stream_slowly_is_told_the_end_too(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def ends(_: Job) -> Outcome:
        await may_end.wait()
        return outcome(Fault.OK)

    async def play() -> None:
        async with service(tmp_path, Fake(ends)) as (_, desk):
            job = desk.submit("somebody", Ask(candidate=ASK["candidate"], problem=ASK["problem"]))
            steps = desk.follow(job)
            seen = [(await anext(steps)).status]
            may_end.set()
            assert (await desk.wait(job, 60)).outcome is not None
            seen += [now.status async for now in steps]
        assert seen == ["queued", "done"], "it ended while the first was being sent"

    run(play())


def test_the_document_describes_every_path_and_leads_nowhere_else(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, Fake()) as (client, _):
            found = (await client.get("/openapi.json")).json()
            page = (await client.get("/docs")).text
            listed = (await client.get("/v1/problems")).json()["problems"]
            hardware = (await client.get("/v1/hardware")).json()
        for path in ("/v1/verify", "/v1/batch", "/v1/jobs/{id}", "/evaluate", "/status/{id}", "/results/{id}"):
            assert path in found["paths"]
            assert path in page
        text = json.dumps(found)
        names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert names <= set(found["components"]["schemas"])
        assert "Ask" in names
        assert any(problem["problem_id"] == "L1/13_softmax" for problem in listed)
        assert hardware["devices"] == {"cpu": "a chip"}

    run(play())
