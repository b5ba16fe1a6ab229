"""Settings from files, variables and the command line become one validated configuration, or one helpful error."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import KEYS, Config, config_hash, environment, load, to_yaml
from kbrl_async.runs.config.keys import flat
from kbrl_async.runs.config.loading import find_key, warn_once
from kbrl_async.runs.config.names import ALIASES, OTHER_NAMES, TRANSLATED

ROOT = Path(__file__).parents[4]
SWITCH = "true or false"
LOSSES = (
    "one of dppo_tv, ppo, grpo, decoupled, a3po, gspo, tis, cispo, reinforce, importance_sampling, "
    "or package.module:object"
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error(*overrides: str, paths: tuple[Path, ...] = (), env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths, overrides, env)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_default_configuration() -> None:
    assert load() == Config()


def test_the_default_file_holds_the_built_in_values_but_for_the_weight_of_speed() -> None:
    config = load([ROOT / "configs/default.yaml"])
    assert config.reward.speed_weight == 0.7
    reward = msgspec.structs.replace(config.reward, speed_weight=None)
    assert msgspec.structs.replace(config, reward=reward) == Config()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_every_file_of_the_project_is_valid(path: Path) -> None:
    load([path])


def test_command_line_wins_over_variables_which_win_over_files(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "batch_size: 2\ngroup_size: 3\nmax_steps: 4\n")
    env = {"KBRL_GROUP_SIZE": "30", "KBRL_MAX_STEPS": "40"}
    config = load([file], ["max_steps=400"], env)
    assert (config.batch_size, config.group_size, config.max_steps) == (2, 30, 400)


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    files = [write(tmp_path, "a.yaml", "seed: 1\nmax_steps: 7\n"), write(tmp_path, "b.toml", "seed = 2\n")]
    config = load(files)
    assert (config.seed, config.max_steps) == (2, 7)


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    yaml = write(tmp_path, "a.yaml", "level: [1, 2]\nlearner:\n  epochs: 5\n  grad_clip: 2\n")
    toml = write(tmp_path, "a.toml", "level = [1, 2]\n[learner]\nepochs = 5\ngrad_clip = 2\n")
    assert load([yaml]) == load([toml])
    assert load([yaml]).learner.epochs == 5


def test_yaml_takes_numbers_that_its_own_rules_call_text(tmp_path: Path) -> None:
    assert load([write(tmp_path, "a.yaml", "learning_rate: 1e-4\n")]).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("learning_rate=.5", "learning_rate", 0.5),
        ("level=2", "level", 2),
        ("level=1,3", "level", [1, 3]),
        ("level=[1, 3]", "level", [1, 3]),
        ("cpu.bench=1", "cpu.bench", [1]),
        ("cpu.bench=auto", "cpu.bench", "auto"),
        ("max_minutes=null", "max_minutes", None),
        ("max_minutes=2", "max_minutes", 2.0),
        ("tensorboard.enabled=false", "tensorboard.enabled", False),
        ("compile_farm.store_max_bytes=1e9", "compile_farm.store_max_bytes", 10**9),
        ("name=12", "name", "12"),
        ("model_name=org/model=x", "model_name", "org/model=x"),
        ("broker.submit=tcp://127.0.0.1:5000", "broker.submit", "tcp://127.0.0.1:5000"),
    ],
)
def test_an_override_is_read_as_its_key_wants_it(override: str, key: str, value: object) -> None:
    assert flat(load(overrides=[override]))[key] == value


def test_a_section_of_a_variable_is_set_off_by_two_underscores() -> None:
    assert load(env={"KBRL_LEARNER__GRAD_CLIP": "3"}).learner.grad_clip == 3


def test_variables_of_others_and_of_the_runner_are_no_settings() -> None:
    env = {"HOME": "/", "KBRL_RUN_DIR": "x", "KBRL_CONFIG": "y"}
    assert load(env=env) == Config()


def test_the_shell_wins_over_the_dotenv_file(tmp_path: Path) -> None:
    dotenv = write(tmp_path, ".env", "KBRL_SEED=1\nKBRL_MAX_STEPS=5\nOTHER=1\n")
    assert environment({"KBRL_SEED": "2", "PATH": ""}, dotenv) == {"KBRL_SEED": "2", "KBRL_MAX_STEPS": "5"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("batchsize=4", "batch_size"),
        ("learning-rate=1", "learning_rate"),
        ("lr=1", "learning_rate"),
        ("threads=1", "learner.threads or sampler.threads"),
        ("epochs=2", "learner.epochs"),
        ("learner.epoch=2", "learner.epochs"),
        ("dataset_builder.reward_speedup_weight=1", "reward.speed_weight"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(word: str, meant: str) -> None:
    assert error(word) == f"unknown key '{word.partition('=')[0]}' (command line). Did you mean {meant}?"


UNRELATED = (
    "weight_decay", "top_p", "timeout", "gpu_arch", "eval_mode", "verbose", "lora_alpha", "eval_batch_size",
    "max_prompt_length", "eval_size", "gradient_accumulation_steps",
)  # fmt: skip


@pytest.mark.parametrize("name", UNRELATED)
def test_a_hint_never_points_to_an_unrelated_key(name: str) -> None:
    assert error(f"{name}=1") == f"unknown key '{name}' (command line). Run 'kbrl config' for all keys"


def test_every_hint_and_alias_is_a_key() -> None:
    assert {key for hint in OTHER_NAMES.values() for key in hint.split(" or ")} | {*ALIASES.values()} <= set(KEYS)
    assert not set(KEYS) & ({*OTHER_NAMES} | {*ALIASES} | {*TRANSLATED})
    for key, values in TRANSLATED.values():
        for value in values.values():
            load(overrides=["mode=multi_turn", f"{key}={value}"])


def test_names_of_other_tools_are_taken_for_ours() -> None:
    words = ["checkpoint_path=owner/name", "output_path=out", "measure_performance=false", "reward.speed_weight=0"]
    config = load(overrides=words)
    assert (config.model_name, config.log_path, config.timing_bench.timed) == ("owner/name", "out", False)


@pytest.mark.parametrize(
    ("name", "value", "section_name", "read"),
    [
        ("tensorboard_enabled", "false", "enabled", False),
        ("tensorboard_log_dir", "all", "log_dir", "all"),
        ("tensorboard_log_histograms_every", "7", "histograms_every", 7),
        ("tensorboard_log_per_level", "false", "per_level", False),
    ],
)
def test_names_that_users_of_such_tools_know_are_taken(
    tmp_path: Path, name: str, value: str, section_name: str, read: object
) -> None:
    file = write(tmp_path, "a.yaml", f"{name}: {value}\n")
    for config in (
        load(overrides=[f"{name}={value}"]), load([file]), load(env={f"KBRL_{name.upper()}": value}),
    ):  # fmt: skip
        assert getattr(config.tensorboard, section_name) == read


THEIRS = """\
mode: multi_turn
num_substeps: 1
loss_fn: ppo
save_every: 5
dataset_builder:
  level: 1
  start_problem: null
  backend: triton
  batch_size: 4
  group_size: 6
  test_fraction: 0.2
  dataset_src: local
  prompt_precision: null
multiturn_dataset_builder:
  max_turns: 3
  early_stop_on_correct: true
  prompt_option: zero_shot
"""
"""A file as trainers with a builder of data sets have it."""


def test_the_file_of_a_trainer_with_a_builder_of_data_sets_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_once.cache_clear()
    found = flat(load([write(tmp_path, "theirs.yaml", THEIRS)]))
    wanted = {
        "learner.minibatches": 1, "loss": "ppo", "learner.checkpoint_every": 5, "level": 1, "backend": "triton",
        "batch_size": 4, "group_size": 6, "heldout_share": 0.2, "problems": "kernelbench", "precision": "fp32",
        "max_turns": 3, "turns.stop": "correct", "prompt.option": "zero_shot",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    said = capsys.readouterr().err
    assert f"warning: dataset_builder.batch_size is batch_size here ({tmp_path / 'theirs.yaml'}:9)" in said
    assert "dataset_builder.dataset_src=local is problems=kernelbench here" in said
    assert "start_problem" not in said, "null says nothing"


def test_what_others_have_and_we_do_otherwise_is_refused_all_at_once_with_what_does_it_here() -> None:
    refused = error("dataset_builder.num_correct_trials=5", "shuffle=true", "lr=1")
    assert refused.startswith(
        "dataset_builder.num_correct_trials (command line), shuffle (command line) are no keys here. Leave them out. "
    )
    assert "curriculum.strictness" in refused
    assert "curriculum.kind" in refused
    assert error("dataset_builder.reward_length_weight=1").endswith("docs/howto-reward.md")
    with pytest.raises(ConfigError, match="is no key here"):
        find_key("dataset_builder.num_correct_trials")


def test_a_word_that_others_have_for_a_setting_and_we_do_not_know_is_answered_with_those_that_are() -> None:
    refused = error("dataset_builder.dataset_src=disk")
    assert "dataset_builder.dataset_src is problems here" in refused
    assert "local is problems=kernelbench" in refused


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("loss=dapo", "preset=dapo"),
        ("method=rloo", "preset=rloo"),
        ("preset=reward_weighted_sft", "method=reward_weighted_sft"),
        ("preset=best_of_n", "method=best_of_n or advantage=best_of_n or reward.preset=best_of_n"),
    ],
)
def test_the_name_of_an_algorithm_at_the_wrong_key_is_answered_with_the_right_one(word: str, meant: str) -> None:
    assert error(word).endswith(f"Did you mean {meant}?")


def test_a_wrong_value_under_such_a_name_is_named_as_ours() -> None:
    assert "tensorboard.histograms_every must be an integer" in error("tensorboard_log_histograms_every=often")


def test_a_key_like_no_other_leads_to_the_reference() -> None:
    assert error("zzzzzz=1").endswith("Run 'kbrl config' for all keys")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "seed: 1\n\nlearner:\n  epoch: 2\n"), ("a.toml", "seed = 1\n\n[learner]\nepoch = 2\n")],
)
def test_a_wrong_key_in_a_file_is_named_with_its_line(tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path, name, text)
    assert error(paths=(file,)) == f"unknown key 'learner.epoch' ({file}:4). Did you mean learner.epochs?"


def test_a_wrong_key_in_the_environment_is_named_with_its_variable() -> None:
    assert "(variable KBRL_BATCHSIZE). Did you mean batch_size?" in error(env={"KBRL_BATCHSIZE": "1"})


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("batch_size=0", "batch_size must be an integer ≥ 1, not 0 (command line). Its default is 8"),
        ("batch_size=many", "batch_size must be an integer ≥ 1, not many (command line). Its default is 8"),
        ("group_size=0", "group_size must be an integer ≥ 1, not 0 (command line). Its default is 8"),
        ("temperature=0", "temperature must be a number > 0, not 0 (command line). Its default is 1.0"),
        ("max_staleness=-1", "max_staleness must be an integer ≥ 0, not -1 (command line). Its default is 2"),
        ("learning_rate=inf", "learning_rate must be a number > 0, not inf (command line). Its default is 0.0002"),
        ("learning_rate=nan", "learning_rate must be a number > 0, not nan (command line). Its default is 0.0002"),
        ("loss=pppo", f"loss must be {LOSSES}, not pppo (command line). Did you mean ppo?"),
        ("loss=dpo_tv", f"loss must be {LOSSES}, not dpo_tv (command line). Did you mean dppo_tv?"),
        ("tensorboard.enabled=a", f"tensorboard.enabled must be {SWITCH}, not a (command line). Its default is true"),
        ("seed=null", "seed must be an integer ≥ 0, not null (command line). Its default is 0"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_expected(word: str, expected: str) -> None:
    assert error(word) == expected


def test_a_wrong_value_is_found_even_where_a_later_one_replaces_it(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "batch_size: 0\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:1"):
        load([file], ["batch_size=4"])


def test_a_number_is_not_taken_for_true(tmp_path: Path) -> None:
    assert "true or false" in error(paths=(write(tmp_path, "a.yaml", "tensorboard:\n  enabled: 1\n"),))


def test_a_word_without_a_sign_is_no_setting() -> None:
    assert error("batch_size") == "'batch_size' is no setting (command line). Write key=value, such as batch_size=4"


def test_a_section_is_no_key() -> None:
    assert "tensorboard is a section, not a key (command line). Set one of its keys: enabled" in error("tensorboard=1")


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.yaml", "seed: 1\nlevel: [1\n", "is not YAML"),
        ("a.yaml", "- 1\n", "a.yaml:1 holds no 'key: value' pairs"),
        ("a.yaml", "seed: 1\nseed: 2\n", "seed is set twice"),
        ("a.yaml", "learner: 3\n", "learner is a section"),
        ("a.toml", "seed = = 1\n", "is not TOML"),
        ("a.json", "{}", "is neither YAML nor TOML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, part: str) -> None:
    assert part in error(paths=(write(tmp_path, name, text),))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in error(paths=(tmp_path / "none.yaml",))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["mode=multi_turn", "max_turns=1"], "mode=multi_turn needs at least two turns (command line)"),
        (["max_turns=3"], "max_turns=3 needs mode=multi_turn"),
        (["turns.stop=correct"], "turns.* needs mode=multi_turn"),
        (["timing_bench.min_pairs=99"], "timing_bench.min_pairs=99 is above"),
        (["timing_bench.cap_s=9"], "leaves nothing of timing_bench.deadline_s"),
        (["timing_bench.timed=false"], "reward.preset=stage3 pays for speed"),
        (["timing_bench.timed=false", "reward.preset=auto"], "reward.preset=auto pays for speed"),
        (["name=../x"], "cannot be the folder of a run"),
        (["name=latest"], "cannot be the folder of a run"),
        (["log_path="], "log_path is empty"),
        (["level=[]"], "level names no level"),
        (["sft.heads=5"], "does not split into 5 heads"),
        (["learner.minibatches=65"], "more than the batch has rollouts"),
        (["broker.submit=tcp://0.0.0.0:5000"], "can be reached from other hosts"),
        (["broker.submit=tcp://127.0.0.1.evil.org:5000"], "can be reached from other hosts"),
        (["broker.work=udp://127.0.0.1:5"], "is no address"),
        (["broker.work=tcp://127.0.0.1:5", "broker.submit=tcp://127.0.0.1:5"], "are the same address"),
    ],
)
def test_values_that_contradict_each_other_are_refused(words: list[str], part: str) -> None:
    assert part in error(*words)


def test_remote_addresses_need_keys() -> None:
    with pytest.raises(ConfigError, match=r"there are no keys.*kbrl keys new all"):
        load(overrides=["broker.submit=tcp://10.0.0.1:5000", "broker.allow_remote=true"])


def test_remote_addresses_are_allowed_when_asked_for() -> None:
    words = ["broker.submit=tcp://10.0.0.1:5000", "broker.allow_remote=true", "broker.keys=keys"]
    assert load(overrides=words).broker.submit == "tcp://10.0.0.1:5000"


def test_yaml_of_a_configuration_reads_back_to_an_equal_one(tmp_path: Path) -> None:
    config = load(overrides=["level=2", "cpu.bench=0,1", "name=x", "learning_rate=1e-7", "max_minutes=null"])
    assert load([write(tmp_path, "a.yaml", to_yaml(config))]) == config


def test_the_hash_tells_experiments_apart_but_not_where_they_run() -> None:
    base = config_hash(Config())
    assert config_hash(load(overrides=["learning_rate=1e-3"])) != base
    assert (
        config_hash(load(overrides=["name=x", "log_path=y", "max_steps=9", "cpu.bench=0", "log_level=debug"])) == base
    )


def test_what_a_door_has_not_is_named_with_the_nearest_and_a_user_s_own_part_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean veto\?"):
        load(overrides=["corrections=icepop,vetoo"])
    with pytest.raises(ConfigError, match=r"Did you mean vllm\?"):
        load(overrides=["sampler.engine=vlm"])
    config = load(overrides=["loss=mine.losses:soft", "corrections=mine.masks:half,veto"])
    assert (config.loss, config.corrections) == ("mine.losses:soft", ["mine.masks:half", "veto"])


def test_every_key_is_documented_in_one_line() -> None:
    undocumented = [name for name, key in KEYS.items() if len(key.doc) < 5 or len(key.doc) > 120]
    assert undocumented == []


def test_leases_are_given_by_stage() -> None:
    leases = load(overrides=["broker.lease_bench_s=7"]).broker.leases
    assert leases["bench"] == 7
    assert set(leases) == {"generate", "compile", "verify", "bench", "score", "train", "trained"}


def test_reward_weights_are_those_that_were_given() -> None:
    config = load(overrides=["reward.speed_weight=0", "reward.compile_weight=.2"])
    assert config.reward.weights == {"compile": 0.2, "speed": 0.0}
    assert Config().reward.weights == {}


def test_levels_are_sorted_without_doubles() -> None:
    assert load(overrides=["level=3,1,3"]).levels == (1, 3)
    assert load(overrides=["level=2"]).levels == (2,)
