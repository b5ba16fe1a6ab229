"""What a run would make at other stalenesses: the simulation against closed forms, and what is read of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.staleness.__main__ import commands
from benchmarks.staleness.forecast import Observed, Replayed, observe
from benchmarks.staleness.overlap import updates_per_hour
from kbrl_async.errors import UserError
from protocols.messages import Stage

GENERATE_S, BENCH_S, TRAIN_S, ANSWERS = 100.0, 1.0, 20.0, 16
ALONE_S = GENERATE_S + ANSWERS * BENCH_S + TRAIN_S
"""A batch by itself: all answers at once, verified one by one, then trained."""
OBSERVED = Observed(
    {Stage.GENERATE: [GENERATE_S], Stage.COMPILE: [0.0], Stage.BENCH: [BENCH_S]},
    [TRAIN_S],
    [ALONE_S],
    {Stage.GENERATE: 1, Stage.COMPILE: 1, Stage.BENCH: 1},
    slots=10 * ANSWERS,
    groups=4,
    group_size=4,
    max_staleness=0,
)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_as_many_batches_are_under_way_as_staleness_allows(lag: int) -> None:
    assert updates_per_hour(Replayed(OBSERVED, lag, 15)) == pytest.approx((lag + 1) * 3600 / ALONE_S, rel=0.1)


def test_the_slowest_stage_bounds_what_staleness_gains() -> None:
    slow = msgspec.structs.replace(OBSERVED, train_s=[90.0])
    assert updates_per_hour(Replayed(slow, 4, 15)) == pytest.approx(3600 / 90, rel=0.05)
    few = msgspec.structs.replace(OBSERVED, slots=ANSWERS)
    assert updates_per_hour(Replayed(few, 4, 15)) == pytest.approx(3600 / GENERATE_S, rel=0.05)


def test_another_seed_draws_other_times() -> None:
    spread = {**OBSERVED.taken, Stage.GENERATE: [50.0, 100.0, 150.0]}
    drawn = msgspec.structs.replace(OBSERVED, taken=spread)
    assert updates_per_hour(Replayed(drawn, 1, 5, seed=0)) != updates_per_hour(Replayed(drawn, 1, 5, seed=1))


def test_a_folder_without_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"has no rollouts\.sqlite"):
        observe(tmp_path)
    with pytest.raises(SystemExit) as ended:
        commands.main(["forecast", "--run", str(tmp_path)])
    assert ended.value.code == UserError.exit_code
    assert capsys.readouterr().err == f"error: {tmp_path} has no rollouts.sqlite. Name a run's folder\n"
