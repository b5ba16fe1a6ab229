"""Rounds: which settings each run has, that each follows on the one before, and that none is run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.cli import main, parse, train
from kbrl_async.cli.rounds import run_rounds
from kbrl_async.cli.shared import resolve
from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import Config, load, to_yaml
from kbrl_async.runs.folder import SUMMARY_FILE

ROUNDS = """\
name: mine
level: 2
group_size: 10
rounds:
  - method=best_of_n max_steps=4
  - method=sft model_name={first} demonstrations.files={previous} max_steps=10
  - method=grpo max_steps=6
"""
POLICY = "runs/mine-2/policies/policy-v1"


class Trainer:
    """Leaves what a run leaves; `codes` are those of the first runs, all others are 0."""

    def __init__(self, *codes: int) -> None:
        self.configs: list[Config] = []
        self._codes = list(codes)

    def __call__(self, config: Config) -> int:
        self.configs.append(config)
        folder = Path(config.log_path) / str(config.name)
        policy = folder / "policies" / "policy-v1"
        policy.mkdir(parents=True, exist_ok=True)
        (policy / "manifest.json").write_text("{}")
        (policy / "COMPLETE").touch()
        (folder / "config.yaml").write_text(to_yaml(config))
        if code := self._codes.pop(0) if self._codes else 0:
            return code
        (folder / SUMMARY_FILE).write_text("{}")
        return 0


def run(trainer: Trainer, *words: str) -> int:
    Path("rounds.yaml").write_text(ROUNDS)
    args = parse(["train", "--config", "rounds.yaml", *words])
    return run_rounds(args, resolve(args), trainer)


def test_each_round_has_its_words_and_follows_on_the_one_before(folder: Path) -> None:
    trainer = Trainer()
    assert run(trainer, "max_minutes=3", "seed=7") == 0
    one, two, three = trainer.configs
    assert [c.name for c in trainer.configs] == ["mine-1", "mine-2", "mine-3"]
    assert [(c.method, c.max_steps, c.max_minutes, c.seed, c.levels) for c in trainer.configs] == [
        ("best_of_n", 4, 3.0, 7, (2,)),
        ("sft", 10, 3.0, 7, (2,)),
        ("grpo", 6, 3.0, 7, (2,)),
    ]
    assert (one.model_name, two.model_name, two.demonstrations.files) == ("small", "small", ["runs/mine-1"])
    assert three.model_name == str(folder / POLICY)
    assert [c.rounds for c in trainer.configs] == [[], [], []]


def test_the_command_line_wins_and_its_model_is_that_of_the_first_round(folder: Path) -> None:
    trainer = Trainer()
    run(trainer, "max_steps=1", "model_name=owner/model")
    assert [c.max_steps for c in trainer.configs] == [1, 1, 1]
    assert [c.model_name for c in trainer.configs] == ["owner/model"] * 2 + [str(folder / POLICY)]


def test_a_round_that_failed_is_gone_on_with_and_those_before_it_are_not_run_again(folder: Path) -> None:
    first, second = Trainer(0, 130), Trainer()
    assert run(first) == 130
    assert [c.name for c in first.configs] == ["mine-1", "mine-2"]
    assert run(second) == 0
    assert [c.name for c in second.configs] == ["mine-2", "mine-3"]


def test_a_round_of_that_name_that_was_another_experiment_is_not_taken_for_it(folder: Path) -> None:
    run(Trainer())
    with pytest.raises(ConfigError, match="mine-1 has ended, and was another experiment"):
        run(Trainer(), "seed=9")


def test_a_wrong_word_of_the_last_round_is_told_before_the_first_begins(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Config] = []
    monkeypatch.setattr(train, "train", lambda config: began.append(config) or 0)
    Path("wrong.yaml").write_text("rounds: [max_steps=3, methd=grpo]\n")
    for words in ([], ["--dry-run"]):
        assert main(["train", "--config", "wrong.yaml", *words]) == 2
    assert "unknown key 'methd'" in capsys.readouterr().err
    assert began == []


def test_other_commands_refuse_rounds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rounds.yaml").write_text(ROUNDS)
    assert main(["prepare", "--config", "rounds.yaml"]) == 2
    assert "rounds are several runs" in capsys.readouterr().err
    assert load(["rounds.yaml"]).rounds
