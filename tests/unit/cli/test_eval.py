"""`kbrl eval`'s arguments: what is evaluated, with which settings, and where."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kbrl_async.cli import eval as evaluate
from kbrl_async.cli import main, parse, preflight, train
from kbrl_async.cli.launch import ProcessesEnded
from kbrl_async.errors import ConfigError, RunError, UserError
from kbrl_async.evaluation import document
from kbrl_async.evaluation.metrics import Sample
from kbrl_async.runs.config import Config, load, process_counts, to_yaml


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A training run that `resolve` finds as a published policy."""
    from kbrl_async.runs import targets

    made = folder / "runs" / "mine"
    made.mkdir(parents=True)
    words = ["name=mine", "max_tokens=77", "level=2", "broker.submit=tcp://127.0.0.1:5755", "lora_rank=3"]
    (made / "config.yaml").write_text(to_yaml(load(overrides=words)))
    target = targets.Target("policy", str(made / "policies" / "policy-v4"), "mine-v4", str(made), 4, "abc")
    monkeypatch.setattr(targets, "of_run", lambda _run, _wanted: target)
    return made


def resolved(*words: str) -> Config:
    return evaluate.resolve(parse(["eval", *words]))[1]


def test_an_evaluation_inherits_its_run_but_not_its_place(run: Path) -> None:
    config = resolved("mine")
    assert (config.max_tokens, config.levels, config.lora_rank) == (77, (2,), 3)
    assert (config.log_path, config.resume) == (str(run.parent / "evals"), None)
    assert config.name is not None
    assert config.name.startswith("mine-v4-")
    assert config.broker.submit is None, "the run itself may be going on"


@pytest.mark.parametrize(
    ("learned", "asked"),
    [
        (["method=sft", "demonstrations.files=gone.jsonl"], ["method=grpo"]),
        (["method=sft", "demonstrations.files=gone.jsonl"], []),
        (["mode=multi_turn", "max_turns=3", "turns.stop=correct"], ["--turns", "1"]),
    ],
)
def test_how_a_run_learned_is_no_matter_to_its_evaluation(run: Path, learned: list[str], asked: list[str]) -> None:
    (run / "config.yaml").write_text(to_yaml(load(overrides=["name=mine", *learned])))
    (run / "other.yaml").write_text("method: grpo\n")
    preflight.check_files(resolved("mine", "--config", str(run / "other.yaml"), *asked))


def target_of(*words: str) -> tuple[str, str]:
    target = evaluate.resolve(parse(["eval", *words]))[0]
    return target.kind, target.name


def test_a_model_that_is_named_without_a_policy_is_the_policy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_of() == ("policy", str(run / "policies" / "policy-v4")), "of the newest run"
    assert target_of("model_name=owner/model", "level=1") == ("model", "owner/model")
    config = resolved("model_name=owner/model", "level=1")
    assert (config.model_name, config.max_tokens, config.levels) == ("owner/model", 256, (1,))
    Path("my.yaml").write_text("model_name: owner/other\n")
    assert target_of("--config", "my.yaml") == ("model", "owner/other")
    assert target_of("mine", "model_name=owner/base")[0] == "policy", "a policy that is named is the policy"
    monkeypatch.setenv("KBRL_MODEL_NAME", "owner/third")
    assert target_of() == ("model", "owner/third")


def test_a_misspelt_model_name_is_no_word_for_the_newest_run(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model_nam' .* Did you mean model_name"):
        target_of("model_nam=owner/model")


def test_an_endpoint_s_model_is_at_the_endpoint(folder: Path) -> None:
    words = ("model_name=m", "sampler.engine=openai", "sampler.base_url=http://127.0.0.1:9/v1")
    assert target_of(*words) == ("endpoint", "http://127.0.0.1:9/v1")
    assert resolved(*words).model_name == "m"


def test_a_run_named_as_the_model_is_asked_as_it_was_trained(run: Path) -> None:
    policy = run / "policies" / "policy-v4"
    policy.mkdir(parents=True)
    (policy / "manifest.json").write_text("{}")
    (policy / "COMPLETE").touch()
    config = load(overrides=["model_name=runs/mine"])
    assert config.model_name == str(policy)
    assert (config.prompt_option, config.max_tokens) == ("compact", 77)


def test_a_run_as_model_name_is_evaluated_as_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbrl_async.runs import targets

    found = targets.resolve("mine", run.parent)
    policy = run / "policies" / "policy-v4"
    policy.mkdir(parents=True)
    (policy / "COMPLETE").touch()
    monkeypatch.setattr(targets, "of_folder", lambda _folder, _wanted: found)
    config = resolved("model_name=runs/mine")
    assert (config.model_name, config.prompt_option, config.max_tokens, config.lora_rank) == ("small", "compact", 77, 3)


def test_the_words_of_other_tools_are_taken(run: Path) -> None:
    args = parse(["eval", "checkpoint_path=mine", "output_path=out/results.json", "measure_performance=false"])
    target, config = evaluate.resolve(args)
    assert (target.label, args.output, config.timing_bench.timed) == ("mine-v4", Path("out/results.json"), False)
    args = parse(["eval", "mine", "output_path=out"])
    evaluate.resolve(args)
    assert args.output == Path("out/evaluation.json")
    with pytest.raises(UserError, match="one policy at a time"):
        resolved("mine", "checkpoint_path=other")


def test_a_limit_takes_the_first_problems(run: Path) -> None:
    from kbrl_async.runs.planning import evaluated_problems

    wanted = [p.problem_id for p in evaluated_problems(resolved("mine", "--level", "1"))]
    assert len(wanted) > 5
    assert [p.problem_id for p in evaluated_problems(resolved("mine", "--level", "1", "--limit", "5"))] == wanted[:5]


def test_options_and_settings_win_over_the_run(run: Path) -> None:
    config = resolved(
        "mine", "--samples", "8", "--temperature", "0", "--level", "1,3", "--ids", "L1/13,softmax", "--heldout",
        "--deadline", "60", "--turns", "3", "max_tokens=99",
    )  # fmt: skip
    wanted = config.evaluation
    assert (wanted.samples, wanted.temperature, wanted.ids, wanted.split) == (8, 0.0, ["L1/13", "softmax"], "heldout")
    assert (wanted.deadline_s, config.mode, config.max_turns, config.max_tokens) == (60.0, "multi_turn", 3, 99)
    assert config.levels == (1, 3)


def test_examples_are_asked_for_by_their_index(run: Path) -> None:
    config = resolved("mine", "--raicl", "index", "--raicl-k", "2")
    prompt = config.prompt
    assert (prompt.option, prompt.index, prompt.examples) == ("raicl", "index", 2)


def test_tensorboard_settings_go_by_their_short_names_too(run: Path) -> None:
    assert resolved("mine", "tensorboard_log_dir=board", "tensorboard_step=7").evaluation.tensorboard_step == 7
    assert resolved("mine", "--tensorboard-log-dir", "board").evaluation.tensorboard_log_dir == "board"


def test_an_endpoint_is_a_sampler_engine(folder: Path) -> None:
    config = resolved("http://127.0.0.1:9/v1", "--model", "m", "log_path=here")
    assert (config.sampler.engine, config.sampler.base_url, config.model_name) == (
        "openai",
        "http://127.0.0.1:9/v1",
        "m",
    )
    assert config.log_path == "here/evals"


def test_the_same_command_means_the_same_folder_and_another_one_another(run: Path) -> None:
    assert resolved("mine", "--samples", "2").name == resolved("mine", "--samples", "2").name
    assert resolved("mine", "--samples", "2").name != resolved("mine", "--samples", "3").name
    assert resolved("mine", "name=given").name == "given"
    assert resolved("mine", "--deadline", "5").name == resolved("mine").name, "a deadline may change in between"


def test_an_evaluator_takes_the_place_of_learner_and_aggregator(run: Path) -> None:
    assert list(process_counts(resolved("mine"))) == ["broker", "sampler", "compile_farm", "timing_bench", "evaluator"]
    assert "learner" in process_counts(Config())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no policy nothing"),
        (["small", "--level", "9"], r"level \[9\]"),
        (["small", "--ids", "L1/999"], "no problem 'L1/999'"),
        (["small", "--ids", "L1/01_tanh", "--heldout"], "is heldout"),
        (["small", "other"], "one policy at a time"),
        (["small", "--version", "x", "--problems", "broken"], "does not parse"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (folder / "broken" / "level1").mkdir(parents=True)
    (folder / "broken" / "level1" / "1_a.py").write_text("import (")
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (folder / "runs").exists()


def finished(folder: Path) -> Path:
    made = document.build([Sample(problem_id="L1/1_a", level=1, sample=0)], policy={"label": "p"}, settings={})
    document.write(folder / "evaluation.json", made)
    (folder / "kernelbench" / "level1").mkdir(parents=True)
    (folder / "summary.json").write_text(msgspec.json.encode({"kind": "evaluation"}).decode())
    return folder


def arguments(**given: Any) -> Any:
    return SimpleNamespace(**{"output": None, "kernelbench": None, **given})


def test_its_end_is_a_table_and_the_copies_that_were_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = finished(folder)
    args = arguments(output=folder / "to" / "out.json", kernelbench=folder / "kb")
    assert evaluate.conclude(made, ProcessesEnded("evaluator", 0), args) == 0
    assert "Evaluation of p" in capsys.readouterr().out
    assert (folder / "to" / "out.json").read_bytes() == (made / "evaluation.json").read_bytes()
    assert (folder / "kb" / "level1").is_dir()


def test_a_stop_says_how_to_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.conclude(folder, ProcessesEnded("", 130), arguments()) == 130
    assert "the same command continues it" in capsys.readouterr().err


def test_a_service_that_gives_up_says_why(folder: Path) -> None:
    with pytest.raises(RunError, match="sampler gave up: the endpoint is down") as caught:
        evaluate.conclude(folder, ProcessesEnded("sampler", 4, "the endpoint is down"), arguments())
    assert caught.value.exit_code == 4


def test_kbrl_summary_shows_an_evaluation_too(folder: Path) -> None:
    from kbrl_async.cli import summary

    out = io.StringIO()
    summary.show(finished(folder), Console(file=out, width=100))
    assert "Evaluation of p" in out.getvalue()


def test_an_evaluation_is_no_training_run(folder: Path, run: Path) -> None:
    config = resolved("mine")
    place = Path(config.log_path) / str(config.name)
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError, match="kbrl eval"):
        train.run(parse(["train", f"resume={place}", "--dry-run"]))
