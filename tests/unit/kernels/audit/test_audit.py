"""The audit finds problems that an output can pass without doing the work, and says what it could not try."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from kbrl_async.errors import InfraError, ProblemError
from kbrl_async.kernels.audit import Auditor, Limits, audit_problems, probe, trials
from kbrl_async.kernels.problems import audit_file, load_problems, parse_problem, usable
from kbrl_async.kernels.problems.audit_file import Audit, AuditFinding, OutputTrial, ProblemAudit, problem_hash
from protocols.records import Problem
from tests.suite import suite

TEXT = """
import time
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x, *more):
        return FORWARD

def get_inputs():
    return [INPUTS]

def get_init_inputs():
    return []
"""


def problem(forward: str, inputs: str = "torch.randn(8, 64)") -> Problem:
    return parse_problem(TEXT.replace("FORWARD", forward).replace("INPUTS", inputs), "L1/01_x")


@pytest.fixture(scope="module")
def auditor() -> Iterator[Auditor]:
    with Auditor(Limits("cpu", 30.0, 0.25)) as started:
        yield started


def flags(audit: ProblemAudit) -> set[str]:
    return {finding.flag for finding in audit.findings}


def test_an_honest_problem_is_clean(auditor: Auditor) -> None:
    audit = auditor.audit(problem("torch.tanh(x)"))
    assert (audit.status, audit.flags, audit.reason, audit.ours) == ("clean", (), "", "")
    assert {trial.tolerance for trial in audit.trials} == {"kernelbench", "kernelbench_half", "ours"}
    assert audit.outputs == ("float32[8, 64]",)
    assert audit.problem_hash == problem_hash(problem("torch.tanh(x)"))


@pytest.mark.parametrize(
    ("forward", "inputs", "flag"),
    [
        ("torch.zeros_like(x)", "torch.randn(8, 64)", "zeros@ours"),
        ("x * 1e-6", "torch.randn(8, 64)", "zeros@kernelbench"),
        ("x * 0 + 3", "torch.randn(8, 64)", "constant@ours"),
        ("x * 1e-3 + torch.arange(64.)", "torch.randn(8, 64)", "input_independent@kernelbench_half"),
        ("torch.cat([x, x * 0])", "torch.randn(8, 64)", "half_rows@ours"),
        ("x.clone()", "torch.randn(8, 64)", "unchanged_input@ours"),
        ("torch.mean(x * x)", "torch.rand(8192, 256) * 0.01 + 1", "half_batch@kernelbench"),
        ("x + torch.rand_like(x)", "torch.randn(8, 64)", "random"),
        ("nn.functional.dropout(x)", "torch.randn(8, 64)", "random"),
        ("x.add_(1)", "torch.randn(8, 64)", "mutates_inputs"),
        ("x @ x", "torch.randn(8, 64)", "cannot_run"),
        ("nn.functional.cross_entropy(x, more[0])", "torch.randn(8, 64), torch.arange(8)", "dtype_cast"),
        ("x[more[0]]", "torch.randn(8, 64), torch.tensor([1, 2])", "dtype_cast"),
        ("x * more[0]", "torch.randn(8, 64), torch.tensor([4097])", "dtype_cast"),
        ("torch.tanh(x) + torch.ones(64)", "torch.randn(8, 64)", "fixed_device"),
    ],
)
def test_what_makes_a_score_meaningless_is_found(auditor: Auditor, forward: str, inputs: str, flag: str) -> None:
    audit = auditor.audit(problem(forward, inputs))
    assert flag in flags(audit), audit
    assert all(finding.evidence for finding in audit.findings)
    assert (audit.status == "flagged") == bool(audit.flags)


STATEFUL = """
import random
import time
import torch
import torch.nn as nn

CACHE = {}
DRAWN = torch.rand(64)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(64)
        self.inner.calls, self.inner.kept, self.inner.layer = 0, [], None
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x):
        inner = self.inner
        BODY

def get_inputs():
    return [torch.randn(8, 64) * DRAWN]

def get_init_inputs():
    return []
"""


def stateful(body: str) -> Problem:
    return parse_problem(STATEFUL.replace("BODY", "\n        ".join(body.splitlines())), "L1/01_x")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("inner.calls += 1\nreturn torch.tanh(x) * inner.calls", "two runs .*: forward changes inner.calls"),
        ("inner.kept.append(x)\nreturn torch.cat(inner.kept).tanh()", "their shapes.*inner.kept"),
        ("self.total += x.sum(0)\nreturn self.total", "two runs .*: forward changes total"),
        ("inner(x)\nreturn torch.tanh(x) - inner.running_mean", "two runs .* inner.running_mean"),
        ("if not inner.kept:\n    inner.kept.append(x.amax(0))\nreturn x / inner.kept[0]", "first call.*inner.kept"),
        ("CACHE.setdefault('peak', x.amax(0))\nreturn x / CACHE['peak']", "the inputs of the first call$"),
        ("inner.layer = inner.layer or nn.Linear(64, 8)\nreturn inner.layer(x)", "first call.*inner.layer"),
    ],
)  # fmt: skip
def test_state_that_a_call_leaves_behind_is_named(auditor: Auditor, body: str, what: str) -> None:
    """A candidate has a state of its own: honest ones would be wrong, whose inputs come in another order."""
    audit = auditor.audit(stateful(body))
    assert (audit.status, "keeps_state" in audit.flags, "random" in audit.flags) == ("flagged", True, False), audit
    (found,) = [finding for finding in audit.findings if finding.kind == "keeps_state"]
    assert re.search(what, found.evidence), found
    asked = Problem("L1/01_x", 1, "x", "", flags=audit.flags)
    assert usable([asked]) == []


@pytest.mark.parametrize(
    ("body", "flag"),
    [
        ("inner.calls += 1\nreturn torch.tanh(x)", ""),
        ("return inner(x)", ""),
        ("if not inner.kept:\n    inner.kept.append(torch.ones(64, 64).triu())\nreturn x.tanh() @ inner.kept[0]", ""),
        ("torch.manual_seed(7)\ninner.layer = inner.layer or nn.Linear(64, 8)\nreturn inner.layer(x)", ""),
        ("return x.tanh() * self.factor", ""),
        ("return nn.functional.dropout(x)", "random"),
        ("return torch.tanh(x) * (time.perf_counter_ns() % 999_983)", "random"),
        ("inner.calls += 1\nreturn torch.tanh(x) * random.random()", "random"),
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_no_state_and_what_is_drawn_is_random(auditor: Auditor, body: str, flag: str) -> None:
    asked = stateful(body)
    if "factor" in body:  # of no seed: a candidate is given the number
        line = "self.factor = nn.Parameter(torch.tensor(time.perf_counter() % 7 + 1))"
        asked = msgspec.structs.replace(asked, source=asked.source.replace("self.reg", f"{line}\n        self.reg"))
    assert auditor.audit(asked).flags == ((flag,) if flag else ())


def test_an_output_of_8_bits_is_looked_at(auditor: Auditor) -> None:
    audit = auditor.audit(problem("torch.tanh(x).to(torch.float8_e4m3fn)"))
    assert (audit.status, audit.output_scale) == ("clean", 1.0), audit


@pytest.mark.parametrize(
    "forward",
    [
        "torch.tanh(x) + torch.ones(64, device=x.device)",
        "torch.tanh(x) * torch.tensor(2.0)",
        "torch.tanh(x)[torch.arange(7)]",
        "torch.tanh(x) * float(x.abs().max())",
        "torch.tanh(x) + (torch.ones(64).cuda() if x.is_cuda else torch.ones(64))",
    ],
)
def test_what_a_gpu_may_run_is_said_to_stay_on_no_cpu(auditor: Auditor, forward: str) -> None:
    assert "fixed_device" not in flags(auditor.audit(problem(forward)))


def test_tiny_outputs_pass_there_but_not_here(auditor: Auditor) -> None:
    found = flags(auditor.audit(problem("x * 1e-6")))
    assert "zeros@kernelbench" in found
    assert "zeros@ours" not in found


@pytest.mark.parametrize(
    ("forward", "inputs", "reason"),
    [
        ("x", "torch.zeros(1 << 33)", "memory"),
        ("__import__('ctypes').string_at(0)", "torch.randn(8)", "ended with status -11"),
    ],
)
def test_what_does_not_fit_is_not_audited(auditor: Auditor, forward: str, inputs: str, reason: str) -> None:
    audit = auditor.audit(problem(forward, inputs))
    assert audit.status == "not_audited"
    assert reason in audit.reason


def test_too_large_for_our_sets_is_said_and_kernelbenchs_tolerances_are_still_tried(auditor: Auditor) -> None:
    audit = auditor.audit(problem("torch.tanh(x)", "torch.randn(2 << 20)"))
    assert audit.ours.startswith("not tried: it would need about")
    assert {trial.tolerance for trial in audit.trials} == {"kernelbench", "kernelbench_half"}


def test_a_problem_without_end_costs_its_time_and_what_was_found_before_is_kept() -> None:
    with Auditor(Limits("cpu", 8.0, 0.25)) as auditor:
        slow = auditor.audit(problem("x * 0 if x.abs().max() < 8 else time.sleep(60)"))  # large inputs come late
        endless = auditor.audit(problem("time.sleep(60)"))
    assert "zeros@kernelbench" in flags(slow)
    assert slow.status == "flagged"
    assert endless.status == "not_audited"
    assert "longer than 8 s" in endless.reason


def test_casts_that_a_processor_is_slow_at_cost_little_and_are_said_to_be_cut() -> None:
    """Products in half precision take minutes where there are no instructions for them. That it runs on no GPU is known
    before.
    """
    with Auditor(Limits("cpu", 40.0, 0.25)) as auditor:
        audit = auditor.audit(problem("torch.tanh(x) + torch.ones(64) if x.element_size() > 2 else time.sleep(36)"))
    assert set(flags(audit)) == {"fixed_device"}
    assert audit.reason.startswith("casts: it took longer than")
    assert audit.seconds < 32.0


def test_a_problem_that_ends_its_process_costs_one_problem(auditor: Auditor) -> None:
    dead = auditor.audit(problem("__import__('os')._exit(1)"))
    assert (dead.status, "ended with status 1" in dead.reason) == ("not_audited", True)
    assert auditor.audit(problem("torch.tanh(x)")).status == "clean"


def test_a_host_where_no_worker_starts_is_no_fault_of_its_problems() -> None:
    """Each was said to need more memory, and an import took all rows untried."""
    with Auditor(Limits("no such device", 8.0, 0.25)) as auditor, pytest.raises(InfraError, match="no worker"):
        auditor.audit(problem("torch.tanh(x)"))


def test_a_worker_that_dies_is_replaced(auditor: Auditor) -> None:
    assert auditor.audit(problem("torch.tanh(x)")).status == "clean"
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    workers = [pid for pid in pids if b"kernels.audit.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert workers
    assert auditor.audit(problem("torch.tanh(x)")).status == "clean"


def test_comparing_in_pieces_is_allclose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "CHUNK", 7)
    torch.manual_seed(0)
    right = torch.randn(5, 13)
    right[2, 3] = float("inf")
    for figure in (1e-4, 1e-2, 0.5):
        for got in (right, right + 1e-3, right.new_zeros(1).expand(5, 13), right * 1.3):
            assert trials.fit(got, right, figure).passes == torch.allclose(got, right, atol=figure, rtol=figure)
    assert not trials.fit(right * float("nan"), right, 1e9).passes
    assert trials.fit(right, right, 0.0).passes


def made(*audits: ProblemAudit) -> Audit:
    return Audit(audit_file.VERSION, "suite", "cpu", "cpu", "2026-01-01", {}, 1.0, 1.0, list(audits))


def test_the_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    one = ProblemAudit("L1/01_x", "abc", "flagged", findings=(AuditFinding("zeros", "why", "ours"),))
    audit_file.write(tmp_path / "a" / "audit.json", made(one, one))
    assert audit_file.read(tmp_path / "a" / "audit.json") == made(one, one)
    assert (tmp_path / "a" / "audit.json").read_text().count("\n    {") == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2}', '{"version": 1}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "audit.json").write_text(content)
    with pytest.raises(ProblemError, match="kbrl problems audit"):
        audit_file.read(tmp_path / "audit.json")


def test_only_what_fools_our_own_verdicts_is_kept_from_training(tmp_path: Path) -> None:
    (tmp_path / "level1").mkdir()
    audits = []
    for number, found in enumerate(
        [
            (),
            (AuditFinding("zeros", "", "kernelbench"),),
            (AuditFinding("zeros", "", "ours"),),
            (AuditFinding("random", ""),),
        ]
    ):
        path = tmp_path / "level1" / f"{number}_x.py"
        path.write_text(TEXT.replace("FORWARD", f"x * {number}").replace("INPUTS", "torch.ones(2)"))
        loaded = parse_problem(path.read_text(), f"L1/{number}_x")
        audits.append(ProblemAudit(loaded.problem_id, problem_hash(loaded), "flagged", findings=found))
    audit_file.write(tmp_path / "audit.json", made(*audits))
    problems = load_problems(str(tmp_path))
    assert [p.flags for p in problems] == [(), ("zeros@kernelbench",), ("zeros@ours",), ("random",)]
    assert [p.problem_id for p in usable(problems)] == ["L1/0_x", "L1/1_x"]


def test_a_problem_that_was_changed_since_is_not_flagged(tmp_path: Path) -> None:
    old = problem("x * 0")
    audit = made(ProblemAudit("L1/01_x", problem_hash(old), "flagged", findings=(AuditFinding("random", ""),)))
    assert audit_file.with_flags([old], [audit])[0].flags == ("random",)
    assert audit_file.with_flags([problem("x * 1")], [audit])[0].flags == ()


def test_what_one_audit_had_no_room_for_another_may_have_found() -> None:
    asked = problem("x")
    of_it = ProblemAudit(asked.problem_id, problem_hash(asked), audit_file.NOT_AUDITED)
    flagged = [msgspec.structs.replace(of_it, findings=(AuditFinding(kind, ""),)) for kind in ("random", "cannot_run")]
    audits = [made(flagged[0]), made(flagged[1]), made(of_it)]
    assert audit_file.with_flags([asked], audits)[0].flags == ("random", "cannot_run")


def test_the_projects_own_suite_is_audited_and_clean() -> None:
    audit = audit_file.read(audit_file.OUR_AUDITS / "suite-cpu.json")
    known = {(a.problem_id, a.problem_hash): a for a in audit.problems}
    for one in suite():
        entry = known.get((one.problem_id, problem_hash(one)))
        assert entry is not None, f"{one.problem_id} was changed: audit it again"
        assert (entry.status, entry.ours) == ("clean", ""), entry


def test_progress_is_told_problem_by_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auditor, "audit", lambda _self, p: ProblemAudit(p.problem_id, problem_hash(p), "clean"))
    told: list[str] = []
    problems = [msgspec.structs.replace(problem("x"), problem_id=f"L1/{i}_x") for i in range(2)]
    audit = audit_problems(
        problems, Limits("cpu", 5.0, 1.0), suite="x", done=lambda _so_far, a: told.append(a.problem_id)
    )
    assert told == ["L1/0_x", "L1/1_x"] == [a.problem_id for a in audit.problems]
    assert audit.version == audit_file.VERSION


TRUE = probe.AuditProbe("state", (AuditFinding("random", "x"),), (), ("float32[1]",), 1.0, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\x91" * 100_000 + b"\x90",
        b"\x81\xa5error\xa2\xff\xfe",
        msgspec.msgpack.encode({"step": "ended"}),
        msgspec.msgpack.encode({"step": "run", "bytes": -1}),
        msgspec.msgpack.encode({"step": "run", "output_scale": float("nan")}),
    ],
)
def test_what_no_probe_sends_is_nothing(data: bytes) -> None:
    assert probe.read(msgspec.msgpack.encode(TRUE)) == TRUE
    assert probe.read(data) is None


def test_a_problem_that_speaks_for_its_probe_costs_one_problem(auditor: Auditor) -> None:
    forging = "[os.write(fd, b'x') for fd in range(3, 9) if _is_socket(fd)]"
    head = (
        "import os, stat\n"
        "def _is_socket(fd):\n"
        "    try:\n        return stat.S_ISSOCK(os.fstat(fd).st_mode)\n"
        "    except OSError:\n        return False\n"
    )
    source = problem(f"({forging}, torch.tanh(x))[1]").source
    audit = auditor.audit(Problem("L1/01_x", 1, "x", head + source))
    assert "what no probe sends" in audit.reason
    assert auditor.audit(problem("torch.tanh(x)")).status == "clean"


def test_what_is_no_number_or_infinite_on_both_sides_is_the_same() -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert trials.fit(values.clone(), values, 1e-4) == trials.Fit(True, 0.0, 0.0)
    assert not trials.fit(torch.zeros(4), values, 1e-4).passes


def test_an_infinite_error_can_be_written_down() -> None:
    found = trials.trial("zeros", "ours", [trials.Fit(False, float("inf"), 1.0)])
    assert msgspec.json.decode(msgspec.json.encode(found), type=OutputTrial).worst_error > 1e200


def test_a_problem_that_compiles_its_own_functions_finds_their_text(auditor: Auditor) -> None:
    found = problem("twice(x)")
    scripted = "\n\n@torch.jit.script\ndef twice(x):\n    return torch.tanh(x) * 2\n"
    assert auditor.audit(msgspec.structs.replace(found, source=found.source + scripted)).status == "clean"
