"""What calls are claimed to take, where a candidate knows which of them only audit it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kbrl_async.kernels.verify.cuda.claims import Claims
from kbrl_async.kernels.verify.cuda.device_places import BothThere
from kbrl_async.kernels.verify.cuda.session import TimedCall
from kbrl_async.kernels.verify.session import CandidateFault

MS = 1e6
CALL_MS = 0.1
"""What calling takes on both sides."""


class Side:
    """Of calls that take `took` and are said to take `claimed` (ms): when it is audited, too."""

    def __init__(self, took: float, claimed: float, is_trusted: bool = False) -> None:
        self.took, self.claimed, self.is_trusted = took, claimed, is_trusted

    def replay(self, times: int, limit_s: float) -> TimedCall:
        told = times * self.claimed * MS
        return TimedCall(told, int((times * self.took + CALL_MS) * MS), 0.0, told)

    events = replay


def audited(pairs: Side, audit: Side, refused: str, jitter: float = 0.0) -> Claims:
    """Against a reference of 10 ms; `jitter`: ms that a host adds to any call."""
    rng, reference, candidate = random.Random(3), Side(10.0, 10.0), SimpleNamespace(is_trusted=pairs.is_trusted)
    candidate.replay = candidate.events = audit.replay
    sides: Any = SimpleNamespace(
        refused=refused,
        places=BothThere(),
        batch=1,
        limit_s=1.0,
        reference=reference,
        candidate=candidate,
        bring=lambda _: None,
    )
    claims = Claims(SimpleNamespace(evidence=""), sides)  # type: ignore[arg-type]

    def of(side: Side) -> TimedCall:
        return TimedCall(
            side.claimed * MS, int((side.took + CALL_MS + rng.random() * jitter) * MS), 0.0, side.claimed * MS
        )

    for _ in range(10):
        claims.note(of(reference), of(pairs))
    claims.audit()
    return claims


@pytest.mark.parametrize("refused", ["", "it can't be captured"])
@pytest.mark.parametrize(
    ("name", "audit"), [("tells the truth", Side(10.0, 10.0)), ("is done at once", Side(2.0, 2.0))]
)
def test_an_audit_that_is_known_for_one_hides_nothing(name: str, audit: Side, refused: str) -> None:
    """Five times as fast by its own word, and the audit's answer was all that counted."""
    found = audited(Side(10.0, 2.0), audit, refused)
    assert found.hidden == pytest.approx(8 * MS, rel=0.02)


@pytest.mark.parametrize("refused", ["", "it can't be captured"])
def test_who_lies_to_an_audit_is_accused(refused: str) -> None:
    with pytest.raises(CandidateFault, match="longer than between"):
        audited(Side(10.0, 2.0), Side(10.0, 2.0), refused)


@pytest.mark.parametrize("refused", ["", "it can't be captured"])
@pytest.mark.parametrize("took", [2.0, 10.0, 50.0])
def test_on_a_host_that_is_late_an_honest_one_has_nothing_added(took: float, refused: str) -> None:
    assert audited(Side(took, took), Side(took, took), refused, jitter=4.0).hidden < 0.01 * MS
    assert audited(Side(took, took), Side(took, 1.1 * took), refused).hidden < 0.01 * MS, "a clock that went down"
