"""Work that is not the candidate's own: the library's, the reference's, a decoy's."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.backends.c.build import CBackend
from kbrl_async.kernels.verify import proof, similarity, wire
from kbrl_async.kernels.verify import session as sessions
from kbrl_async.kernels.verify.cpu.own_kernels import OwnKernels
from protocols.records import Fault
from tests.unit.kernels.verify.catalogue.exploits import PROBLEM, Patch, Run, candidate, caught, nothing, row


def test_the_honest_candidate_passes(run: Run) -> None:
    verdict = run(candidate()).verdict
    assert verdict.fault is Fault.OK, verdict.message
    assert "rows ×1" in verdict.evidence


# ---- wraps the library, try/except fallback to torch, decoy kernel never launched ----------------------------------

WRAPPERS = {
    "plain": candidate("return torch.softmax(x * self.gain, dim=-1)"),
    "an alias at module level": candidate("return f(x * self.gain, dim=-1)", top="f = torch.softmax"),
    "imported by name": candidate("return softmax(x * self.gain, -1)", top="from torch import softmax"),
    "a module-level helper": candidate(
        "return helper(x, self.gain)", top="def helper(x, g): return (x * g).softmax(-1)"
    ),
    "getattr with a built name": candidate("return getattr(torch, 'soft' + 'max')(x * self.gain, -1)"),
    "torch.ops": candidate("return torch.ops.aten._softmax(x * self.gain, -1, False)"),
    "a submodule": candidate("return self.net(x * self.gain)", init="self.net = nn.Softmax(dim=-1)"),
    "a method by its name in a dictionary": candidate("return vars(torch)['softmax'](x * self.gain, -1)"),
    "arithmetic by hand": candidate(
        "e = (x * self.gain - (x * self.gain).amax(-1, True)).exp(); return e / e.sum(-1, True)"
    ),
    "a fallback in except": candidate(
        "try:\n    return self.rows(x, 'no tensor', 1)\nexcept Exception:\n    return torch.softmax(x * self.gain, -1)"
    ),
    "a fallback that the kernel always takes": candidate(
        "y = self.own(x) if x.shape[0] > 10**6 else torch.softmax(x * self.gain, -1)\nreturn y"
    ),
}


@row("wraps the library, try/except fallback, decoy kernel")
@pytest.mark.parametrize("way", WRAPPERS)
def test_a_result_from_the_library_has_no_own_kernel(run: Run, way: str) -> None:
    verdict = run(WRAPPERS[way]).verdict
    assert caught(verdict, "no_own_kernel"), verdict
    assert "aten::" in verdict.evidence


def test_without_the_recorded_run_a_wrapper_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CBackend, "is_recorded", False)
    assert run(WRAPPERS["plain"]).verdict.fault is Fault.OK


TORCH = "y = torch.softmax(x * self.gain, dim=-1)\n"
DECOYS = {
    "launched on the finished result": candidate(TORCH + "self.touch(y, 1)\nreturn y"),
    "computed in full and thrown away": candidate("self.own(x)\n" + TORCH + "return y"),
    "a copy of the library's result": candidate(
        TORCH + "z = torch.empty_like(y)\nself.copy(y, z, y.numel())\nreturn z"
    ),
}


@row("wraps the library, try/except fallback, decoy kernel")
@pytest.mark.parametrize("way", DECOYS)
def test_a_kernel_that_the_answer_does_not_need_is_a_decoy(run: Run, way: str) -> None:
    verdict = run(DECOYS[way]).verdict
    assert caught(verdict, "decoy_kernel"), verdict


@pytest.mark.parametrize("way", DECOYS)
def test_without_the_muted_run_a_decoy_passes(run: Run, monkeypatch: Patch, way: str) -> None:
    monkeypatch.setattr(OwnKernels, "prove", nothing)
    assert run(DECOYS[way]).verdict.fault is Fault.OK


@row("wraps the library, try/except fallback, decoy kernel")
def test_a_kernel_with_next_to_no_share_of_the_time_is_a_decoy() -> None:
    small = {"rows": (1, 500)}
    assert proof.of_recorded(wire.Trace(small, {"aten::mm": (1, 2_000_000)})) is not None
    assert proof.of_recorded(wire.Trace(small, {"aten::mm": (1, 20_000)})) is None, "too short to say anything"
    assert proof.of_recorded(wire.Trace(small, {"aten::copy_": (1, 2_000_000)})) is None, "moving is no computing"
    assert proof.of_recorded(wire.Trace({"rows": (1, 10_000)}, {"aten::mm": (1, 2_000_000)})) is None, "an epilogue"


SNIFFER = candidate(
    """
    import sys
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if names & {"recorded", "_traced"}:
        return self.own(x)
    return torch.softmax(x * self.gain, dim=-1)
    """
)


@row("phase sniffing")
def test_own_kernels_only_while_somebody_looks_are_decoys(run: Run) -> None:
    assert caught(run(SNIFFER).verdict, "decoy_kernel")


def test_without_switching_kernels_off_from_outside_a_stack_sniffer_passes(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sessions.Session, "disarm", lambda self, artifacts, whole: 0)
    assert run(SNIFFER).verdict.fault is Fault.OK


# ---- reference code pasted inline ----------------------------------------------------------------------------------

PASTED = PROBLEM.replace("class Model(", "class ModelNew(").replace("x", "values").replace("softmavalues", "softmax")


@row("reference code pasted inline")
def test_pasted_reference_code_is_named_as_such(run: Run) -> None:
    assert caught(run(PASTED).verdict, "reference_copied")


def test_without_the_similarity_pasted_code_is_only_a_wrapper(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(similarity, "copied_reference", lambda *given: "")
    assert run(PASTED).verdict.rule == "no_own_kernel"
