"""What a candidate tries in its process: threads, files, forged words, patched clocks, a search for the answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.kernels.backends.c.build import CBackend
from kbrl_async.kernels.verify import Bench, proof
from kbrl_async.kernels.verify import session as sessions
from protocols.records import Fault
from tests.unit.kernels.verify.catalogue.exploits import Patch, Run, candidate, caught, refused, row

LATE = candidate("y = self.own(x)\nimport threading\nthreading.Thread(target=y.mul_, args=(1,)).start()\nreturn y")


@row("background thread computes after return")
def test_no_thread_can_go_on_behind_a_call(run: Run) -> None:
    verdict = run(LATE).verdict
    assert refused(verdict, Fault.RUNTIME_ERROR)
    assert "start new thread" in verdict.message


def test_unconfined_a_thread_starts(run: Run, open_bench: Bench) -> None:
    assert "start new thread" not in run(LATE, on=open_bench).verdict.message


REACHES = {
    "ctypes": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 or ctypes.get_errno() != 1",
    "own memory as a file": "open('/proc/self/mem', 'r+b').close()",
    "a file of the host": "open('/etc/passwd').read()",
    "a process": "import os\nos.posix_spawn('/bin/true', ['true'], {})",
}


@row("ctypes, ptrace, /proc/self/mem, edited grader files")
@pytest.mark.parametrize("way", [way for way in REACHES if way != "ctypes"])
def test_nothing_outside_the_process_can_be_reached(run: Run, open_bench: Bench, way: str) -> None:
    attack = candidate(init=REACHES[way])
    assert refused(run(attack).verdict, Fault.RUNTIME_ERROR)
    assert run(attack, on=open_bench).verdict.fault is Fault.OK, "unconfined it is reached"


@row("ctypes, ptrace, /proc/self/mem, edited grader files")
def test_a_grader_file_can_not_be_edited(run: Run, open_bench: Bench, tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("verdict = 0")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    attack = candidate(init=f"open({str(grader)!r}, 'w').write('verdict = 1')")
    assert refused(run(attack).verdict, Fault.RUNTIME_ERROR)
    assert grader.read_text() == "verdict = 0"
    assert run(attack, on=open_bench).verdict.fault is Fault.OK, "unconfined it is edited"
    assert grader.read_text() == "verdict = 1"


FORGED = candidate(
    """
    import os, msgspec
    y = self.own(x)
    meta = ["float32", list(y.shape), list(y.stride()), y.data_ptr(), "Tensor"]
    told = {"type": "done", "nonce": 7, "tree": ["T", 0], "tensors": [meta]}
    if self.calls == 3:
        for fd in range(3, 30):
            try:
                os.write(fd, msgspec.msgpack.encode(told))
            except OSError:
                pass
    return y
    """
)


@row("forges the verdict")
def test_an_answer_sent_ahead_lacks_the_nonce(run: Run) -> None:
    assert caught(run(FORGED).verdict, "forged_result")


def test_with_a_nonce_that_can_be_guessed_the_forged_answer_is_taken(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sessions.secrets, "randbits", lambda bits: 7)
    monkeypatch.setattr(CBackend, "is_recorded", False)  # an answer that lacks its record would be seen
    assert run(FORGED).verdict.rule != "forged_result"


@row("forges the verdict")
@pytest.mark.parametrize(
    "way", ["import os\nos._exit(0)", "raise SystemExit(0)", 'print(\'{"fault": "ok"}\')\nraise ValueError']
)
def test_words_and_exit_codes_are_no_verdict(run: Run, way: str) -> None:
    assert refused(run(candidate(way)).verdict, Fault.RUNTIME_ERROR)


PATCHED = candidate(top="import time\ntime.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0")


@row("patched timers")
def test_a_replaced_clock_is_named(run: Run) -> None:
    assert caught(run(PATCHED).verdict, "tampered")


def test_without_looking_at_identities_a_replaced_clock_goes_unnoticed_and_changes_nothing(
    run: Run, monkeypatch: Patch
) -> None:
    untampered = lambda trace, **rest: _of_recorded(msgspec.structs.replace(trace, tampered=""), **rest)  # noqa: E731
    _of_recorded = proof.of_recorded
    monkeypatch.setattr(proof, "of_recorded", untampered)
    assert run(PATCHED).verdict.fault is Fault.OK


@row("finds expected outputs")
def test_what_is_expected_is_not_in_the_process(run: Run) -> None:
    scan = """
    import gc
    y = self.own(x)
    self.mine.append(y)
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.shape == y.shape and not any(thing is one for one in self.mine):
            if torch.allclose(thing, y, atol=1e-6):
                raise ValueError("found")
    return y
    """
    assert run(candidate(scan, init="self.mine = []")).verdict.fault is Fault.OK
    planted = scan.replace("for thing in gc", "copied = y.clone()\n    for thing in gc")
    assert "found" in run(candidate(planted, init="self.mine = []")).verdict.message, "the scan finds what is there"
