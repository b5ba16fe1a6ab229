"""A set of proven answers: what gets in, in which order, and that it is learned as it was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import UserError
from kbrl_async.runs.archive.archive import FILE, ArchiveWriter, make_row
from kbrl_async.runs.demonstrations import Renderer, gather
from kbrl_async.runs.demonstrations.distilled import distil, write
from protocols.records import BenchReport, Fault, Problem, Purpose, Timing, Verdict
from protocols.rollout import Record
from tests.records import record, timing


def answer(
    name: str,
    text: str,
    fault: Fault = Fault.OK,
    *,
    problem: str = "L1/a",
    split: str = "train",
    finish: str = "stop",
    timed: Timing | None = None,
    turn: int = 0,
) -> Record:
    asked = Problem(problem, 1, problem, "class Model: ...", split=split)
    made = record(
        name, text, problem=asked, prompt=f"asked {turn}", purpose=Purpose.EVAL, finish=finish,
        bench=BenchReport(Verdict(fault, 5, 5), timed),
    )  # fmt: skip
    return msgspec.structs.replace(made, request=msgspec.structs.replace(made.request, turn=turn))


def write_run(folder: Path, *turns: tuple[Record, float]) -> Path:
    folder.mkdir()
    with ArchiveWriter(folder / FILE) as archive:
        for number, (turn, reward) in enumerate(turns):
            archive.add(make_row(f"t{number}", turn, reward=reward, at=0.0), turn.encode())
    return folder


def test_the_best_of_each_problem_are_kept_with_their_times(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        (answer("g1.r0", "slow", timed=timing(0.8)), 0.6),
        (answer("g1.r1", "wrong", Fault.INCORRECT), 0.3),
        (answer("g1.r2", "fast", timed=timing(3.0)), 0.9),
        (answer("g1.r3", "between", timed=timing(2.0)), 0.8),
        (answer("g2.r0", "other", problem="L1/b"), 0.5),
    )
    found = distil([run], keep=2)
    kept = [(one.problem, one.answer, one.speedup, one.lo, one.hi, one.found_in) for one in found.answers]
    assert kept == [
        ("L1/a", "fast", 3.0, 2.9, 3.1, "run:t2"),
        ("L1/a", "between", 2.0, 1.9, 2.1, "run:t3"),
        ("L1/b", "other", None, None, None, "run:t4"),
    ]
    assert found.left_out == {"not proven right": 1, "beyond the best 2 of its problem": 1}
    assert (found.problems, found.repairs) == (2, 0)


def test_what_is_held_out_cut_off_or_there_already_stays_out(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "first",
        (answer("g1.r0", "held", split="heldout"), 1.0),
        (answer("g2.r0", "cut", finish="length"), 1.0),
        (answer("g2.r1", "good"), 0.9),
        (answer("g2.r2", "good \n"), 0.8),
    )
    second = write_run(tmp_path / "second", (answer("g1.r0", "good"), 0.7))
    found = distil([first, second], keep=3)
    assert [one.answer for one in found.answers] == ["good"]
    assert found.left_out == {"its problem is held out": 1, "it was cut off": 1, "the same as another": 2}


def test_repairs_are_kept_beside_first_answers(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        (answer("g1.r0", "at once"), 0.9),
        (answer("g1.r1", "repaired", turn=1), 0.5),
        (answer("g1.r2", "repaired twice", turn=2), 0.4),
    )
    found = distil([run], keep=1)
    assert [(one.answer, one.turn, one.asked) for one in found.answers] == [
        ("at once", 0, "asked 0"),
        ("repaired", 1, "asked 1"),
    ]
    assert found.repairs == 1


def test_the_file_is_learned_as_it_was_asked(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", (answer("g1.r0", "good", timed=timing(2.0)), 0.9))
    file = tmp_path / "set.jsonl"
    write(distil([run], keep=1), file)
    tokenizer = tokenizers["none"]
    found = gather([str(file)], Renderer(tokenizer, ask=lambda text: f"<{text}>"), keep=3, include_eval=False)
    (span,) = found.lessons[0].spans
    assert tokenizer.decode(span.prompt_ids) == "<asked 0>"
    assert tokenizer.decode(span.token_ids[:-1]) == "good"


def test_without_a_proven_answer_there_is_no_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", (answer("g1.r0", "wrong", Fault.INCORRECT), 0.3))
    with pytest.raises(UserError, match="no proven answer to a training problem: 1 not proven right"):
        write(distil([run], keep=1), tmp_path / "set.jsonl")
    assert not (tmp_path / "set.jsonl").exists()
    with pytest.raises(UserError, match="holds no answers"):
        distil([tmp_path], keep=1)
