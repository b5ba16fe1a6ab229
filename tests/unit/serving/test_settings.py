"""A service is this host's only, unless it has keys; keys are of their owner and long enough."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from kbrl_async import cli
from kbrl_async.cli.launch import ProcessesEnded
from kbrl_async.errors import UserError
from kbrl_async.kernels.settings import Rules
from kbrl_async.runs.folder import load_run
from kbrl_async.serving.documents import Ask, Job
from kbrl_async.serving.journal import JobJournal
from kbrl_async.serving.settings import Keys, Serve, check, is_loopback, read, write
from protocols.records import Fault, Verdict
from services.verification.server import executor_of
from tests.candidates import affine, elementwise
from tests.unit.serving import making as _needs_the_extra  # noqa: F401 - skips without it

KEY = "0123456789abcdef"


def keys(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_by_default_nobody_else_reaches_it() -> None:
    assert Serve().is_loopback
    assert check(Serve()) == Serve()
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "a.b")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "host.example"])
def test_an_open_address_needs_keys(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "--host", host]) == 2
    assert "could run code here. Add --keys FILE" in capsys.readouterr().err
    assert check(Serve(host=host, keys=keys(tmp_path, f"a {KEY}\n"))).keys
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (f"a {KEY}\n", 0o644, "others can read"),
        ("a short\n", 0o600, ":1 holds no key"),
        (f"a b {KEY}\n", 0o600, ":1 holds no key"),
        ("# nobody\n\n", 0o600, "holds no key"),
    ],
)
def test_keys_that_protect_nothing_are_refused(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Keys.read(Path(keys(tmp_path, text, mode)))


def test_settings_come_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, Serve(port=1, timing=False))
    assert read(tmp_path) == Serve(port=1, timing=False)
    with pytest.raises(UserError, match="can't be read"):
        read(tmp_path / "nowhere")


def test_settings_of_farms_need_a_broker(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "timing_bench.cap_s=1"]) == 2
    assert "Add --broker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ([], "open"),
        (["--rules", "strict"], "strict"),
        (["--broker"], "strict"),
        (["--broker", "--rules", "open"], "open"),
        (["--broker", "compile_farm.rules=open"], "open"),
    ],
)
def test_by_which_rules_a_service_judges_is_said_or_its_farms(
    words: list[str], rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kbrl_async.cli.serve.start_and_wait", lambda *_: ProcessesEnded("", 143))
    assert cli.main(["serve", *words]) == 0
    assert read(tmp_path / "runs" / "serve").rules == rules
    if "--broker" in words:
        config = load_run(tmp_path / "runs" / "serve")
        assert config.compile_farm.rules == rules
        assert config.timing_bench.outputs == ("kept" if "--rules" in words else "fresh")


@pytest.mark.parametrize(("rules", "fault"), [("open", Fault.OK), ("strict", Fault.STATIC_VIOLATION)])
def test_its_verifiers_judge_by_them(rules: Rules, fault: Fault) -> None:
    async def found() -> Verdict:
        async with contextlib.AsyncExitStack() as stack:
            executor = await executor_of(Serve(rules=rules, device="cpu", timing=False), stack)
            ask = Ask("import os\n" + elementwise("2 * x[i] + 1"), reference=affine())
            result = (await executor.verify(Job("j", "me", ask, 0.0))).result
            assert result is not None
            return result.verdict

    verdict = asyncio.run(found())
    assert (verdict.fault, verdict.rules) == (fault, rules), verdict


def test_of_ended_jobs_the_newest_are_kept_and_names_of_others_go(tmp_path: Path) -> None:
    from kbrl_async.serving.documents import Ask, Job, Outcome, Trouble

    journal = JobJournal(tmp_path / "jobs.sqlite", keep=10)
    for number in range(300):
        job = Job(f"j{number}", "me", Ask(f"{number}"), 0.0)
        journal.put(job)
        journal.name(f"n{number}", job.id)
        if number:
            job.outcome = Outcome(owner="problem", trouble=Trouble("bad"))
            journal.put(job)
    assert journal.ended() <= 10 + 64
    assert journal.get("j299") is not None
    assert journal.get("j1") is None
    assert journal.named("n1") == ""
    assert [job.id for job in journal.unfinished()] == ["j0"]
    journal.close()
