"""The evaluator against a world that answers at once: it asks once, survives kill -9, and writes everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbrl_async.errors import RunError
from kbrl_async.evaluation import document
from kbrl_async.evaluation.course import Command, Course
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.rollouts.prompts.first import FirstPrompts
from kbrl_async.runs.archive.journal import EntryJournal
from kbrl_async.runs.archive.recorder import RolloutRecorder
from kbrl_async.runs.config import Config, available_cores, cpu_layout, endpoints, load
from protocols.messages import Stage, Status, Task
from protocols.records import (
    BenchReport,
    BuildReport,
    Candidate,
    Fault,
    Generation,
    Problem,
    RolloutRequest,
    StageReport,
    Verdict,
)
from services.evaluator.actor import Evaluator
from services.evaluator.outputs import build, write_all
from services.runtime.rollout_actor import Outside
from services.runtime.service import Service
from tests.records import timing
from tests.unit.services.log import Log

SOURCE = "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"
PROBLEMS = [parse_problem(SOURCE, f"L1/{n}_p{n}", level=1) for n in (1, 2, 3)]


class Killed(Exception):  # noqa: N818 - what happened
    pass


class World:
    """The broker and all workers: `submit` is answered through the handler; dies after so many answers."""

    def __init__(self, dies_after: int = 10**9, lost: str = "", mute: str = "") -> None:
        self.asked: list[str] = []
        self.retired: list[str] = []
        self.evaluator: Evaluator | None = None
        self._dies_after, self._lost, self._mute = dies_after, lost, mute

    async def submit(
        self, task_id: str, stage: str, frames: list[bytes], group_id: str = "", _lag: int = -1, _needs: str = ""
    ) -> bool:
        assert self.evaluator is not None
        self.asked.append(task_id)
        if self._mute and self._mute in task_id:
            return True
        if len(self.asked) > self._dies_after:
            raise Killed
        request = msgspec.msgpack.decode(frames[0], type=RolloutRequest)
        is_lost = bool(self._lost) and self._lost in task_id
        status = Status.WORKER_LOST if is_lost else Status.OK
        record = frames if is_lost else [*frames, *map(msgspec.msgpack.encode, answer(request))]
        task = Task(task_id, "lease", Stage(stage), 1, 60.0, 0, group_id=group_id, status=status)
        await self.evaluator.handle(task, record)
        await self.evaluator.handle(task, record)  # delivery is at least once
        return True

    async def retire(self, group_id: str) -> None:
        self.retired.append(group_id)


def answer(request: RolloutRequest) -> list[Any]:
    """Wrong in its first turn, right in the second; the sample's number decides how fast."""
    number = int(request.rollout_id.rpartition(".")[2])
    text = f"# {request.rollout_id} turn {request.turn}"
    wrote = Generation(3, [1], [2, 3], [-0.1, -0.1], text, "stop", Candidate(text, "c"))
    built = BuildReport(Fault.OK, stages=(StageReport("static", Fault.OK, 0.1), StageReport("compile", Fault.OK, 0.1)))
    if request.turn == 0 and number == 1:
        return [wrote, built, BenchReport(Verdict(Fault.INCORRECT, 1, 5, "off by one"))]
    speedup = 1.5 + number
    return [wrote, built, BenchReport(Verdict(Fault.OK, 5, 5), timing(speedup))]


def config(*words: str) -> Config:
    return load(overrides=["evaluation.policy=p", "evaluation.samples=2", "evaluation.in_flight=4", *words])


def run(
    folder: Path,
    world: World,
    settings: Config,
    clock: Callable[[], float] | None = None,
    problems: Sequence[Problem] = PROBLEMS,
) -> Course:
    """One life of the evaluator on this folder; a later one goes on."""
    layout = cpu_layout(settings, available_cores())
    service = Service("evaluator", "evaluator.1", folder, settings, endpoints(settings, folder), layout, Log())
    wanted = settings.evaluation
    course = Course(problems, wanted.samples, wanted.in_flight, wanted.deadline_s)

    async def live() -> None:
        with (
            EntryJournal[Command](folder / "e.sqlite", Command) as journal,
            RolloutRecorder(settings.archive, folder) as recorder,
        ):
            for entry in journal.entries():
                course.do(entry)
            prompts = FirstPrompts(settings.prompt_option, settings.backend)
            times = {"clock": clock} if clock else {}
            world.evaluator = Evaluator(Outside(service, journal, world, recorder), course, prompts, **times)  # type: ignore[arg-type]
            await world.evaluator.pump()

    asyncio.run(live())
    return course


def figures(settings: Config, course: Course) -> document.Document:
    made = build(settings, course, {"label": "p"})
    return msgspec.structs.replace(made, seconds=0.0, created_at=0.0)


def test_every_sample_is_asked_for_once_and_ends(tmp_path: Path) -> None:
    world = World()
    course = run(tmp_path, world, config())
    assert sorted(world.asked) == sorted(f"eval.{p.problem_id}.{n}" for p in PROBLEMS for n in range(2))
    assert {key: kept.sample.correct for key, kept in course.kept.items() if "1_p1" in key} == {
        "eval.L1/1_p1.0": True,
        "eval.L1/1_p1.1": False,
    }


@pytest.mark.parametrize("dies_after", [1, 3, 5, 8])
def test_after_kill_9_the_figures_are_those_of_an_undisturbed_evaluation(tmp_path: Path, dies_after: int) -> None:
    settings = config("mode=multi_turn", "max_turns=2")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed = run(tmp_path / "a", World(), settings)
    with pytest.raises(Killed):
        run(tmp_path / "b", World(dies_after), settings)
    again = World()
    resumed = run(tmp_path / "b", again, settings)
    assert figures(settings, resumed) == figures(settings, undisturbed)
    assert resumed.kept == {
        key: msgspec.structs.replace(kept, outcome=resumed.kept[key].outcome) for key, kept in undisturbed.kept.items()
    }
    assert len(again.asked) <= 12 - dies_after + 4, "what has ended is not asked for again"


def test_refinement_turns_are_taken_and_the_best_counts(tmp_path: Path) -> None:
    settings = config("mode=multi_turn", "max_turns=2")
    world = World()
    course = run(tmp_path, world, settings)
    assert len(world.asked) == 12
    kept = course.kept["eval.L1/1_p1.1"]
    assert (kept.sample.correct, kept.sample.turns, kept.source) == (True, 2, "# eval.L1/1_p1.1 turn 1")


def test_greedy_sampling_can_be_asked_for(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watching(World):
        async def submit(self, task_id: str, stage: str, frames: list[bytes], *more: Any) -> bool:
            seen.append(msgspec.msgpack.decode(frames[0], type=RolloutRequest).sampling.temperature)
            return await super().submit(task_id, stage, frames, *more)

    run(tmp_path, Watching(), config("evaluation.temperature=0"))
    assert set(seen) == {0.0}


def test_a_silent_problem_expires_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.rollout_actor.IDLE_S", 0.01)
    now = iter(range(10**6))
    world = World(mute="2_p2")
    course = run(tmp_path, world, config("evaluation.deadline_s=50"), clock=lambda: float(next(now)))
    assert [kept.sample.expired for key, kept in sorted(course.kept.items())] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert world.retired == ["eval.L1/2_p2"]


def test_what_infrastructure_lost_is_said_and_in_no_figure(tmp_path: Path) -> None:
    settings = config()
    course = run(tmp_path, World(lost="2_p2.0"), settings)
    made = figures(settings, course)
    assert made.lost == {"worker_lost": 1}
    assert len(made.samples) == 5


def test_without_any_verdict_there_is_no_document(tmp_path: Path) -> None:
    settings = config()
    course = run(tmp_path, World(lost="p"), settings)
    with pytest.raises(RunError, match="6 × worker_lost"):
        write_all(tmp_path, settings, course, {"label": "p"})
    assert not (tmp_path / "summary.json").exists()


def test_it_leaves_the_document_kernelbench_files_event_files_and_the_sign_of_the_end(tmp_path: Path) -> None:
    settings = config(f"evaluation.tensorboard_log_dir={tmp_path / 'board'}", "evaluation.tensorboard_step=5")
    course = run(tmp_path, World(), settings)
    write_all(tmp_path, settings, course, {"label": "p", "version": 3})
    assert document.read(tmp_path / "evaluation.json").policy["version"] == 3
    place = tmp_path / "kernelbench" / "level1"
    assert (place / "level_1_problem_2_sample_1_kernel.py").read_text() == "# eval.L1/2_p2.1 turn 0"
    entries = json.loads((place / "eval_results.json").read_text())["1"]
    assert [(e["sample_id"], e["compiled"], e["correctness"]) for e in entries] == [(0, True, True), (1, True, False)]
    assert list((tmp_path / "board").glob("events.out.*"))
    assert json.loads((tmp_path / "summary.json").read_text())["kind"] == "evaluation"
    assert (tmp_path / "rollouts.sqlite").is_file()


def test_flagged_problems_are_known_to_the_figures(tmp_path: Path) -> None:
    flagged = [msgspec.structs.replace(PROBLEMS[0], flags=("zeros@ours",)), *PROBLEMS[1:]]
    settings = config()
    assert figures(settings, run(tmp_path, World(), settings, problems=flagged)).overall.flagged == 1
