"""What a run's workers must do alike: they take it from the run, and say so where somebody wants otherwise."""

from __future__ import annotations

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import KEYS, Config, load
from kbrl_async.runs.config.agreed import AGREED, decode, differences, encode, follow
from kbrl_async.runs.config.loading import gather, resolve

RUN = load(overrides=["timing_bench.cap_s=0.4", "timing_bench.baselines=compile", "backend=cpp"])
OF_THE_HOST = {
    "compile_farm.slots", "compile_farm.store_max_bytes", "compile_farm.nice", "compile_farm.tuning_s",
    "timing_bench.core", "timing_bench.per_gpu", "timing_bench.shares_with", "timing_bench.clocks",
    "timing_bench.device", "timing_bench.memory_share", "timing_bench.likely_first",
}  # fmt: skip


def joined(*words: str, service: str = "timing_bench") -> Config:
    return resolve(follow(gather(overrides=words), service, decode(encode(RUN)), "tcp://broker:1"))


def test_a_worker_gets_the_runs_settings() -> None:
    config = joined("timing_bench.core=1")
    assert (config.backend, config.timing_bench.cap_s, config.timing_bench.baselines) == ("cpp", 0.4, ["compile"])
    assert config.timing_bench.core == 1


def test_what_its_own_flags_say_otherwise_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"cap_s is 0\.1 here \(command line\) and 0\.4 in the run \(tcp://broker:1"):
        joined("timing_bench.cap_s=.1")


def test_a_model_may_lie_elsewhere_on_another_host() -> None:
    run = decode(encode(load(overrides=["model_name=/models/seven", "lora_rank=8"])))
    offered = resolve(follow([], "sampler", run, "tcp://broker:1"))
    own = resolve(follow(gather(overrides=["model_name=/data/seven"]), "sampler", run, "tcp://broker:1"))
    assert (offered.model_name, offered.lora_rank) == ("/models/seven", 8)
    assert (own.model_name, own.lora_rank) == ("/data/seven", 8)


def test_the_same_said_twice_is_no_contradiction() -> None:
    assert joined("timing_bench.cap_s=4e-1", "backend=cpp").timing_bench.cap_s == 0.4


def test_what_is_not_its_business_is_left_alone() -> None:
    assert joined(service="compile_farm").timing_bench.cap_s == Config().timing_bench.cap_s


def test_a_broker_that_says_nothing_changes_nothing() -> None:
    assert decode("") == decode("no json") == decode('{"settings_of": "another age"}') == {}
    assert resolve(follow(gather(overrides=["backend=cpp"]), "timing_bench", {}, "")).backend == "cpp"
    assert differences(RUN, "timing_bench", "") == []


def test_a_running_worker_names_what_another_run_wants_of_it() -> None:
    assert differences(RUN, "timing_bench", encode(RUN)) == []
    (difference,) = differences(RUN, "compile_farm", encode(load(overrides=["backend=c"])))
    assert difference == "backend is cpp here and c in the run"


def test_every_setting_of_farm_and_bench_is_the_runs_or_the_hosts() -> None:
    keys = {key for key in KEYS if key.startswith(("compile_farm.", "timing_bench."))}
    agreed = {key for service in ("compile_farm", "timing_bench") for key in AGREED[service]}
    agreed -= {"backend", "processes.verifier"}
    assert agreed | OF_THE_HOST == keys, "a new key: must all hosts have the same? then it belongs into AGREED"
    assert not agreed & OF_THE_HOST
