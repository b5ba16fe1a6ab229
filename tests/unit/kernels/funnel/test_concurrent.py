"""Several candidates at once from an event loop; a host's fault is tried again and then raised."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.errors import InfraError, MissingTool, UserError
from kbrl_async.kernels.funnel import AsyncVerifier, Verifier
from kbrl_async.kernels.funnel.concurrent import cores_for, with_retry
from kbrl_async.kernels.funnel.verifier import VerifyOptions, default_bench
from kbrl_async.kernels.verify.options import ALONE_SHARE
from protocols.records import Fault, Problem
from tests.unit.kernels.funnel.conftest import PROBLEM, QUICK, kernel


def test_candidates_are_verified_beside_one_another(problem: Problem) -> None:
    async def all_of(*texts: str) -> list[Fault]:
        async with AsyncVerifier(2, "cpu", QUICK) as verifier:
            return [r.fault for r in await asyncio.gather(*(verifier.verify(problem, text) for text in texts))]

    found = asyncio.run(all_of(kernel(), kernel("3 * x[i]"), "nothing"))
    assert found == [Fault.OK, Fault.INCORRECT, Fault.FORMAT_ERROR]


def test_many_candidates_are_doubted_as_in_a_run_and_whoever_chooses_a_bench_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[VerifyOptions] = []

    class Seen(Verifier):
        def __enter__(self) -> Verifier:
            return self

        def verify(self, *_args: object, **_named: object) -> Any:
            made.append(self.options)

    async def asked(options: VerifyOptions | None) -> None:
        async with AsyncVerifier(1, "cpu", options) as verifier:
            await verifier.verify("L1/13", "text")

    monkeypatch.setattr("kbrl_async.kernels.funnel.concurrent.Verifier", Seen)
    chosen = default_bench(())
    asyncio.run(asked(None))
    asyncio.run(asked(VerifyOptions(bench=chosen)))
    assert [one.bench.alone_share for one in made if one.bench] == [ALONE_SHARE, 1.0]


def test_a_verifier_takes_ids_texts_and_files(verifier: Verifier, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(kernel())
    assert verifier.verify(PROBLEM, tmp_path / "mine.py", timing=False).ok
    (tmp_path / "problem.py").write_text(PROBLEM)
    assert verifier.verify(tmp_path / "problem.py", kernel(), timing=False).ok
    with pytest.raises(UserError, match="there is no problem 'L9/99'"):
        verifier.verify("L9/99", kernel())


def test_a_fault_of_the_host_is_tried_once_more_with_everything_anew() -> None:
    calls: list[str] = []

    def verify() -> None:
        calls.append("verify")
        raise InfraError("lost")

    with pytest.raises(InfraError):
        with_retry(verify, lambda: calls.append("restart"))  # type: ignore[arg-type]
    assert calls == ["verify", "restart", "verify"]


def test_what_is_missing_is_said_and_no_pool_breaks(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(_: Verifier) -> None:
        raise MissingTool("no sandbox here")

    async def twice() -> None:
        async with AsyncVerifier(1, "cpu", QUICK) as verifier:
            for _ in range(2):
                with pytest.raises(MissingTool, match="no sandbox here"):
                    await verifier.verify(problem, kernel())

    monkeypatch.setattr(Verifier, "__enter__", enter)
    asyncio.run(twice())


def test_each_of_several_workers_has_a_core_of_its_own() -> None:
    assert cores_for(1) == [()]
    assert all(len(cores) == 1 for cores in cores_for(3))
    with pytest.raises(UserError, match="workers=0 verify nothing"):
        AsyncVerifier(0)
