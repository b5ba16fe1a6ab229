"""What a rehearsal is made of: a model without weights of its own, answers, and what it finds."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig

from kbrl_async.cli import main, rehearse
from kbrl_async.errors import ConfigError, UserError
from kbrl_async.kernels.answers.extraction import extract
from kbrl_async.kernels.problems import load_problems
from kbrl_async.lab.rehearsal import answers, model
from kbrl_async.lab.rehearsal.findings import RehearsalFindings, find
from kbrl_async.learning.policies.models import load_model, load_tokenizer
from kbrl_async.runs.archive.rows import TurnRow, UpdateRow
from kbrl_async.runs.config import Config
from kbrl_async.runs.sizing.footprint import GB, Footprint
from kbrl_async.runs.sizing.layout import Tenant
from kbrl_async.runs.telemetry.system_metrics import SystemSample, WorkerSample
from kbrl_async.shapes import CONFIG, KNOWN, parse_shape, shape_of

TEXTS = [
    "import torch\n\nclass ModelNew(torch.nn.Module):\n    pass\n",
    "for (long i = 0; i < n; i++) { y[i] = x[i]; }\n",
]
TINY = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that holds a config and nothing else."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(TINY))
    return folder


def test_a_folder_with_a_config_alone_becomes_a_model_that_loads(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    model.describe(str(source), made, TEXTS)
    model.fill(made, "cpu")
    loaded, tokenizer = load_model(str(made)), load_tokenizer(str(made))
    assert sum(p.numel() for p in loaded.parameters()) == parse_shape(source / CONFIG).parameters
    for text in (*TEXTS, "Σ, café\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert max(ids) < TINY["vocab_size"]
        assert tokenizer.decode(ids) == text
    assert loaded.config.eos_token_id == tokenizer.eos_token_id  # type: ignore[union-attr]


def test_its_weights_are_the_same_when_they_are_made_again(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        model.describe(str(source), tmp_path / name, TEXTS)
        model.fill(tmp_path / name, "cpu")
    first, second = (load_model(str(tmp_path / name)).state_dict() for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_tokenizer_that_is_there_is_taken(source: Path, tmp_path: Path) -> None:
    model.describe(str(source), source, ["some text"])
    model.describe(str(source), tmp_path / "made", TEXTS)
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", KNOWN)
def test_the_config_of_a_public_model_has_its_shape(name: str) -> None:
    content = model.config_of(KNOWN[name])
    assert shape_of(content) == KNOWN[name]
    assert content["architectures"][0].endswith("ForCausalLM")
    assert AutoConfig.for_model(**content).hidden_size == KNOWN[name].hidden


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"model_type": "qwen2"', "can't be read"),
        ("[1]", "can't be read"),
        (json.dumps({"hidden_size": 64}), "is None"),
    ],
)
def test_a_config_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=cause):
        model.describe(str(tmp_path), tmp_path / "made", TEXTS)
    assert not (tmp_path / "made").exists()


def test_a_stop_while_weights_are_made_leaves_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(folder: Path, _: str) -> None:
        (folder / "model-00001.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    monkeypatch.setattr(rehearse, "fill", fill)
    monkeypatch.setattr(rehearse.random_model, "describe", lambda _model, folder, _texts: folder.mkdir(parents=True))
    monkeypatch.setattr(rehearse.preflight, "check", lambda _todo: None)
    words = ["level=1", "device=cpu", "backend=c", f"cache_path={tmp_path}", f"log_path={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit, match="143"):
        main(["rehearse", "--model", str(source), *words])
    assert "stopped" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("said", "told"),
    [("Traceback\nValueError: no such family\nUpdate with pip …", "ValueError: no such family"),
     ("a.b.OutOfMemoryError: 2 GiB", "a.b.OutOfMemoryError: 2 GiB"), ("Killed", "Killed"), ("", "exit code 1")],
)  # fmt: skip
def test_the_line_that_names_the_exception_is_told(said: str, told: str) -> None:
    assert rehearse.why(subprocess.CompletedProcess([], 1, "", said)) == told


def test_a_vocabulary_that_can_t_spell_is_refused(source: Path, tmp_path: Path) -> None:
    (source / CONFIG).write_text(json.dumps({**TINY, "vocab_size": 64}))
    with pytest.raises(UserError, match="a vocabulary of 64"):
        model.describe(str(source), tmp_path / "made", TEXTS)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["c", "cuda-nvrtc"])
def test_every_problem_of_three_levels_is_answered_with_a_kernel(backend: str) -> None:
    problems = load_problems("", levels=(1, 2, 3))
    said = answers.written(problems, backend, 1.0, 0)
    assert said.keys() == {problem.problem_id for problem in problems}
    for texts in said.values():
        assert len(texts) == answers.EACH
        assert len(set(texts)) > 1
        assert all(extract(text).source for text in texts)


def test_some_are_wrong_where_that_is_asked() -> None:
    (problem,) = load_problems("", levels=(1,))[:1]
    right = answers.written([problem], "c", 1.0, 0)[problem.problem_id]
    mixed = answers.written([problem], "c", 0.5, 0)[problem.problem_id]
    assert sum(text in right for text in mixed) < len(mixed)


def test_a_problem_that_nobody_answers_is_named() -> None:
    with pytest.raises(UserError, match=r"no demonstration for L4/"):
        answers.written(load_problems("", levels=(4,)), "c", 1.0, 0)
    with pytest.raises(UserError, match="demonstrations for backend=triton"):
        answers.written([], "triton", 1.0, 0)


def test_answers_of_ones_own_are_read_and_have_to_be_complete(tmp_path: Path) -> None:
    one, two = load_problems("", levels=(1,))[:2]
    path = tmp_path / "answers.jsonl"
    path.write_bytes(msgspec.json.encode(answers.ForcedAnswer(one.problem_id, "text")) + b"\n")
    assert answers.read(path, [one]) == {one.problem_id: ["text"]}
    with pytest.raises(UserError, match=f"has none for {two.problem_id}"):
        answers.read(path, [one, two])
    path.write_text("{}\n")
    with pytest.raises(UserError, match="can't be read"):
        answers.read(path, [one])


# ── what it finds ────────────────────────────────────────────────────────────────────────────────────────────────

STAGES = {"sampler.1": "generate", "timing_bench.1": "bench", "learner.1": "train", "reward_aggregator.1": "score"}


def line(second: int, version: int, busy: dict[str, float]) -> SystemSample:
    workers = {
        name: WorkerSample(
            [stage], busy.get(name, 0.0), done=second * (1 if stage == "train" else 8), tokens=100 * second, gpu=0.5,
            gpu_mb=1000.0 * second,
        )
        for name, stage in STAGES.items()
    }  # fmt: skip
    return SystemSample(100.0 + second, version, workers=workers)


def found(busy: dict[str, float], config: Config) -> RehearsalFindings:
    samples = [line(second, second // 2, busy) for second in range(13)]
    updates = [UpdateRow(f"batch-{n}", n, {"tokens_per_s": 1000.0, "memory_peak_mb": 1024.0 * n}) for n in range(1, 7)]
    rows = [TurnRow(task_id=f"g{n}", group_id="g", rollout_id="r", tokens=100 * n, correct=n > 1) for n in (1, 2, 3)]
    return find(config, samples, updates, rows, [Tenant("learner", range(1), Footprint({"weights": 2 * GB}))])


def test_what_is_busy_most_is_what_bounds_it_and_what_to_change_is_said() -> None:
    slow = found({"sampler.1": 0.95, "timing_bench.1": 0.2, "learner.1": 0.05}, Config())
    assert slow.bottleneck == "generate"
    assert "sampler.engine=vllm" in slow.changes[0]
    assert found({"timing_bench.1": 0.9}, Config()).changes[-1].startswith(("benches", "learner: busy"))
    trained = found({"learner.1": 0.99, "sampler.1": 0.3}, Config())
    assert (trained.bottleneck, trained.changes[-1].split(":")[0]) == ("train", "learner")


def test_figures_are_those_of_the_run() -> None:
    it = found({"sampler.1": 0.5, "learner.1": 0.4}, Config())
    assert (it.updates, it.answers, it.tokens_median) == (6, 3, 200)
    assert it.correct == pytest.approx(2 / 3)
    assert it.learner_gb == pytest.approx(6 * 2**30 / GB)
    assert it.predicted_gb == {"learner": 2.0}
    sampler = next(p for p in it.processes if p.name == "sampler.1")
    assert (sampler.busy, sampler.tokens_per_s) == (pytest.approx(0.5), pytest.approx(100))
    assert it.hours == pytest.approx(it.between_s * 1000 / 3600)


def test_what_a_bench_takes_is_said_to_be_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    told = found({"sampler.1": 0.5}, Config())
    told = msgspec.structs.replace(told, predicted_gb={"learner": 43.0, "timing_bench.1": 6.0})
    rehearse.show(told, Config(), argparse.Namespace(model="some", price=[]))
    assert "predicted, GB: learner 43.0, timing_bench.1 at least 6.0" in capsys.readouterr().out


def test_a_run_that_ended_before_its_first_update_still_says_who_did_what() -> None:
    samples = [line(second, 0, {"sampler.1": 0.5}) for second in range(5)]
    it = find(Config(), samples, [], [], [])
    assert (it.updates, it.bottleneck, it.changes, it.first_update_s) == (0, "", [], -1)
    assert it.first_answer_s == 1
    assert next(p for p in it.processes if p.name == "sampler.1").busy == pytest.approx(0.5)
    with pytest.raises(UserError, match="before its processes had begun"):
        find(Config(), [], [], [], [])


def test_weights_that_were_kept_are_known_as_long_as_they_are_whole_and_of_this_shape(
    source: Path, tmp_path: Path
) -> None:
    model.describe(str(source), made := tmp_path / "made", TEXTS)
    assert not model.is_filled(made)
    model.fill(made, "cpu")
    assert model.is_filled(made)
    other = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(other | {"num_hidden_layers": 2}))
    assert not model.is_filled(made)
    (made / "config.json").write_text(json.dumps(other))
    for path in model.weights_of(made):
        path.unlink()
    assert not model.is_filled(made)
