"""A run has one folder, which appears whole, is found again, and is never mixed up with another's."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from kbrl_async.errors import CheckpointError, ConfigError, DiskFull
from kbrl_async.runs import folder as rundir
from kbrl_async.runs.config import Config, load
from kbrl_async.runs.folder import ensure_run, load_run, plan, prepare


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def config(runs: Path, *overrides: str) -> Config:
    return load(overrides=[f"log_path={runs}", *overrides])


def finish(run: Path) -> None:
    (run / "summary.json").write_text("{}")


def test_a_run_is_named_default_unless_told_otherwise(runs: Path) -> None:
    assert prepare(config(runs)).path == runs / "default"
    assert prepare(config(runs, "seed=3")).path == runs / "default-seed3"
    assert prepare(config(runs, "name=mine", "seed=3")).path == runs / "mine"


def test_the_folder_stores_what_was_resolved(runs: Path) -> None:
    run = prepare(config(runs, "learning_rate=1e-3"))
    stored = load_run(run.path)
    assert stored == run.config
    assert (stored.learning_rate, stored.name) == (1e-3, "default")


def test_an_unfinished_run_is_continued(runs: Path) -> None:
    first = prepare(config(runs))
    again = prepare(config(runs))
    assert (again.path, first.resumed, again.resumed) == (first.path, False, True)


def test_a_finished_run_gives_way_to_the_next_free_name(runs: Path) -> None:
    finish(prepare(config(runs)).path)
    second = prepare(config(runs))
    assert (second.path.name, second.config.name) == ("default-2", "default-2")
    finish(second.path)
    assert prepare(config(runs)).path.name == "default-3"


def test_an_unfinished_second_run_is_continued_too(runs: Path) -> None:
    finish(prepare(config(runs)).path)
    prepare(config(runs))
    assert prepare(config(runs)).resumed


def test_latest_is_the_newest_run(runs: Path) -> None:
    prepare(config(runs, "name=a"))
    prepare(config(runs, "name=b"))
    assert (runs / "latest").resolve() == (runs / "b").resolve()
    assert os.readlink(runs / "latest") == "b"


def test_a_continued_run_may_last_longer(runs: Path) -> None:
    prepare(config(runs, "max_steps=5"))
    run = prepare(config(runs, "max_steps=9"))
    assert load_run(run.path).max_steps == 9


def test_a_continued_run_may_not_become_another_experiment(runs: Path) -> None:
    prepare(config(runs))
    with pytest.raises(ConfigError, match=r"unfinished run with batch_size=8, not 4\. Continue it with batch_size=8"):
        prepare(config(runs, "batch_size=4"))
    assert load_run(runs / "default").batch_size == 8


def test_planning_writes_nothing(runs: Path) -> None:
    todo = plan(config(runs))
    assert (todo.path, todo.resumed) == (runs / "default", False)
    assert not runs.exists()


def test_resume_continues_the_run_of_that_folder(runs: Path) -> None:
    prepare(config(runs, "name=mine"))
    run = prepare(load(overrides=[f"resume={runs}/mine"]))
    assert (run.path, run.resumed) == (runs / "mine", True)
    assert run.config.resume is None


def test_resume_takes_the_name_of_a_run_too(runs: Path) -> None:
    prepare(config(runs, "name=mine", "batch_size=2"))
    for name in ("mine", "latest"):
        todo = plan(load(overrides=[f"log_path={runs}", f"resume={name}"]))
        assert (todo.path.resolve(), todo.config.batch_size) == ((runs / "mine").resolve(), 2)


def test_resume_keeps_the_runs_own_settings(runs: Path) -> None:
    prepare(config(runs, "name=mine", "batch_size=2", "max_steps=5"))
    todo = plan(load(overrides=[f"resume={runs}/mine", "max_steps=6"]))
    assert (todo.config.batch_size, todo.config.max_steps) == (2, 6)


def test_a_file_that_happens_to_lie_here_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("batch_size: 3")
    monkeypatch.chdir(tmp_path)
    assert load(overrides=["resume=null"]).batch_size == 8


def test_resume_of_no_run_is_refused(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="no run folder"):
        plan(load(overrides=[f"resume={runs}/none"]))


def test_resume_of_a_finished_run_is_refused(runs: Path) -> None:
    finish(prepare(config(runs)).path)
    with pytest.raises(CheckpointError, match="has finished"):
        plan(load(overrides=[f"resume={runs}/default"]))


def test_a_folder_of_something_else_is_left_alone(runs: Path) -> None:
    (runs / "default").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no run folder"):
        prepare(config(runs))


def test_a_full_disk_leaves_no_folder_behind(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir, "write_atomically", full)
    with pytest.raises(DiskFull, match="no space left"):
        prepare(config(runs))
    assert [path.name for path in runs.iterdir()] == [".lock"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        prepare(config(tmp_path / "file"))


def test_a_damaged_stored_configuration_is_named_with_its_line(runs: Path) -> None:
    run = prepare(config(runs))
    (run.path / "config.yaml").write_text("seed: 1\nbatchsize: 2\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:2"):
        load_run(run.path)


def test_a_service_uses_the_run_it_is_given(runs: Path) -> None:
    run = prepare(config(runs, "name=given"))
    prepare(config(runs, "name=newer"))
    assert ensure_run({"KBRL_RUN_DIR": str(run.path)}) == run.path


def test_a_service_without_a_run_uses_the_latest_unfinished_one(runs: Path) -> None:
    run = prepare(config(runs, "name=mine"))
    assert ensure_run({"KBRL_LOG_PATH": str(runs)}) == run.path.resolve()


def test_a_service_opens_a_new_run_when_the_latest_has_finished(runs: Path) -> None:
    finish(prepare(config(runs, "name=mine")).path)
    assert ensure_run({"KBRL_LOG_PATH": str(runs)}).name == "default"


def test_a_new_run_of_a_service_is_made_from_the_named_file(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nlog_path: {runs}\n")
    assert ensure_run({"KBRL_CONFIG": str(file)}).name == "mine"


def test_services_that_are_told_a_run_do_not_continue_another_one(runs: Path, tmp_path: Path) -> None:
    prepare(config(runs, "name=other", "batch_size=2"))
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nlog_path: {runs}\n")
    mine = ensure_run({"KBRL_CONFIG": str(file)})
    assert mine.name == "mine"
    assert ensure_run({"KBRL_CONFIG": str(file), "KBRL_NAME": "named"}).name == "named"
    assert ensure_run({"KBRL_CONFIG": str(file)}) == mine


def test_variables_that_may_change_do_so_in_the_run_that_services_continue(runs: Path) -> None:
    run = prepare(config(runs, "name=mine", "batch_size=2"))
    assert ensure_run({"KBRL_LOG_PATH": str(runs), "KBRL_LOG_LEVEL": "debug"}) == run.path.resolve()
    assert load_run(run.path).log_level == "debug"
    assert load_run(run.path).batch_size == 2


def test_services_that_continue_the_latest_run_by_another_path_leave_its_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = prepare(load(overrides=["log_path=runs", "name=mine"]))
    before = (run.path / "config.yaml").read_text()
    (tmp_path / "mounted").symlink_to(tmp_path / "runs")
    for seen_as in ("runs", "mounted"):
        assert ensure_run({"KBRL_LOG_PATH": seen_as}) == run.path.resolve()
    assert (run.path / "config.yaml").read_text() == before


def test_services_refuse_variables_of_another_experiment_than_the_run_they_continue(runs: Path) -> None:
    prepare(config(runs, "name=mine", "batch_size=2"))
    with pytest.raises(ConfigError, match="mine is an unfinished run with batch_size=2, not 4"):
        ensure_run({"KBRL_LOG_PATH": str(runs), "KBRL_BATCH_SIZE": "4"})


def _ensure(log_path: str) -> str:
    return str(ensure_run({"KBRL_LOG_PATH": log_path}))


def test_services_that_start_together_agree_on_one_run(runs: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(_ensure, [str(runs)] * 6)
    assert set(paths) == {str((runs / "default").resolve())}
