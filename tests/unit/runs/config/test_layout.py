"""Timing gets cores of its own, sockets get addresses that the system takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.errors import ConfigError
from kbrl_async.runs.config import (
    Config,
    compile_slots,
    cpu_layout,
    endpoints,
    learner_threads,
    load,
    process_counts,
    sampler_threads,
)


def test_on_two_cores_the_bench_has_one_for_itself() -> None:
    layout = cpu_layout(Config(), [0, 1])
    assert (layout.bench, layout.compile) == ([1], [0])
    assert layout.sampler == layout.learner == layout.shared == [0]


def test_on_many_cores_nothing_shares_the_benchs() -> None:
    layout = cpu_layout(load(overrides=["processes.timing_bench=2"]), list(range(8)))
    assert layout.bench == [6, 7]
    assert layout.compile == [1, 2, 3, 4, 5]
    assert layout.sampler == [0, 1, 2, 3, 4, 5]


def test_on_one_core_everything_shares_it() -> None:
    layout = cpu_layout(Config(), [3])
    assert layout.bench == layout.compile == layout.sampler == layout.learner == [3]


def test_named_cores_are_taken() -> None:
    layout = cpu_layout(load(overrides=["cpu.bench=0", "cpu.compile=2,3", "cpu.learner=1"]), [0, 1, 2, 3])
    assert (layout.bench, layout.compile, layout.learner, layout.sampler) == ([0], [2, 3], [1], [1, 2, 3])


def test_the_timing_core_wins_over_the_layout() -> None:
    assert cpu_layout(load(overrides=["timing_bench.core=0"]), [0, 1]).bench == [0]


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cpu\.learner: this host lends no core 7\. Choose among 0,1"):
        cpu_layout(load(overrides=["cpu.learner=7"]), [0, 1])


@pytest.mark.parametrize(
    ("words", "cores", "each"),
    [
        ("backend=cuda-nvrtc", 32, 4),
        ("backend=cuda-nvrtc processes.timing_bench=4", 16, 2),
        ("backend=cuda-nvrtc", 2, 1),
        ("backend=triton placement=one_gpu", 16, 4),
        ("backend=triton timing_bench.device=cuda", 16, 4),
        ("backend=triton", 16, 1),
        ("backend=c", 16, 1),
    ],
)
def test_a_bench_on_a_gpu_has_several_cores_and_all_of_them_half_at_most(words: str, cores: int, each: int) -> None:
    config = load(overrides=words.split())
    layout = cpu_layout(config, list(range(cores)))
    assert layout.bench == list(range(cores))[-each * config.processes.timing_bench :]
    assert set(layout.bench).isdisjoint(layout.sampler)


def test_a_backend_that_is_not_here_is_for_others_to_miss() -> None:
    assert cpu_layout(load(overrides=["backend=nosuch.module:Backend"]), [0, 1, 2, 3]).bench == [3]


def test_each_bench_needs_a_core() -> None:
    with pytest.raises(ConfigError, match="3 timing benches need a core each, and there are 2"):
        cpu_layout(load(overrides=["processes.timing_bench=3"]), [0, 1])


def test_the_farm_has_a_little_more_slots_than_cores() -> None:
    assert compile_slots(Config(), cpu_layout(Config(), [0, 1])) == 2
    assert compile_slots(Config(), cpu_layout(Config(), list(range(12)))) == 11
    assert compile_slots(load(overrides=["compile_farm.slots=5"]), cpu_layout(Config(), [0, 1])) == 5


def test_threads_are_those_that_are_asked_for_or_one_for_each_core() -> None:
    layout = cpu_layout(Config(), list(range(4)))
    assert (sampler_threads(Config(), layout), learner_threads(Config(), layout)) == (3, 3)
    asked = load(overrides=["sampler.threads=2", "learner.threads=1"])
    assert (sampler_threads(asked, layout), learner_threads(asked, layout)) == (2, 1)


def test_sockets_lie_in_the_run_folder() -> None:
    found = endpoints(Config(), Path("/runs/x"))
    assert (found.submit, found.work) == ("ipc:///runs/x/sockets/submit", "ipc:///runs/x/sockets/work")


def test_a_run_folder_with_a_long_path_gets_short_socket_paths(tmp_path: Path) -> None:
    first, other = endpoints(Config(), tmp_path / ("x" * 120)), endpoints(Config(), tmp_path / ("y" * 120))
    assert len(first.work.removeprefix("ipc://")) <= 107
    assert len({first.submit, first.work, other.submit, other.work}) == 4


def test_configured_addresses_are_taken() -> None:
    config = load(overrides=["broker.work=tcp://127.0.0.1:5756"])
    assert endpoints(config, Path("r")).work == "tcp://127.0.0.1:5756"


def test_process_counts_come_from_the_configuration() -> None:
    counts = process_counts(load(overrides=["processes.compile_farm=3"]))
    assert counts == {
        "broker": 1, "learner": 1, "sampler": 1, "compile_farm": 3, "timing_bench": 1, "reward_aggregator": 1,
    }  # fmt: skip
